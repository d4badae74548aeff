#!/bin/sh
# Installs the `fox` executable and its pretrained model on Linux and macOS:
#
#   curl -fsSL ADDRESS/releases/latest/download/install.sh | sh
#   sh install.sh --prefix /usr/local          default: ~/.local
#   FOX_RELEASES=/folder sh install.sh         archives and SHA256SUMS of a folder or a mirror
#
# release/build fills in the address of the repository (from Cargo.toml) and the version.
set -eu

version="@VERSION@"
address="@ADDRESS@"
prefix="${HOME:-/root}/.local"

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case "$1" in
    --prefix) [ $# -ge 2 ] || fail "--prefix needs a folder"; prefix="$2"; shift ;;
    --prefix=*) prefix="${1#--prefix=}" ;;
    *) fail "unknown argument $1; the only option is --prefix DIR" ;;
    esac
    shift
done
case "$version" in @*) fail "this is the template; run release/build and use its install.sh" ;; esac
releases="${FOX_RELEASES:-$address/releases/download/v$version}"
case "$releases" in
https://example.com*) fail "the project has no release address yet; build from source with cargo install --path crates/fox" ;;
esac

case "$(uname -s)-$(uname -m)" in
# A static executable where there is no glibc: it runs everywhere, but without a GPU.
Linux-x86_64) libc=gnu; getconf GNU_LIBC_VERSION >/dev/null 2>&1 || libc=musl; target="x86_64-unknown-linux-$libc" ;;
Linux-aarch64) libc=gnu; getconf GNU_LIBC_VERSION >/dev/null 2>&1 || libc=musl; target="aarch64-unknown-linux-$libc" ;;
Darwin-arm64) target=aarch64-apple-darwin ;;
Darwin-x86_64) target=x86_64-apple-darwin ;;
*) fail "no archive for $(uname -s) on $(uname -m); build from source with cargo install --path crates/fox" ;;
esac

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
get() { # FILE
    case "$releases" in
    /*) cp "$releases/$1" "$work/$1" ;;
    *)
        if command -v curl >/dev/null; then curl -fsSL -o "$work/$1" "$releases/$1"
        elif command -v wget >/dev/null; then wget -q -O "$work/$1" "$releases/$1"
        else fail "curl or wget is needed"; fi
        ;;
    esac || fail "cannot get $releases/$1"
}
archive="fox-$version-$target.tar.gz"
get SHA256SUMS
get "$archive"
expected="$(sed -n "s/^\([0-9a-f]\{64\}\) [ *]$archive\$/\1/p" "$work/SHA256SUMS")"
[ -n "$expected" ] || fail "SHA256SUMS does not list $archive"
if command -v sha256sum >/dev/null; then found="$(sha256sum "$work/$archive")"; else found="$(shasum -a 256 "$work/$archive")"; fi
[ "${found%% *}" = "$expected" ] || fail "the checksum of $archive is wrong; download it again"

tar -xzf "$work/$archive" -C "$work"
unpacked="$work/fox-$version-$target"
mkdir -p "$prefix/bin" "$prefix/share/fox" "$prefix/share/doc/fox"
# Renamed into place: an executable that is running cannot be written to.
cp "$unpacked/bin/fox" "$prefix/bin/fox.new"
mv -f "$prefix/bin/fox.new" "$prefix/bin/fox"
cp -R "$unpacked/share/fox/." "$prefix/share/fox/"
cp "$unpacked"/LICENSE-* "$unpacked"/*.md "$prefix/share/doc/fox/"
"$prefix/bin/fox" --version
echo "installed to $prefix"
case ":$PATH:" in *":$prefix/bin:"*) ;; *) echo "add $prefix/bin to PATH" ;; esac
