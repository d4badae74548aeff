//! Sets the commit and features that `fox --version` prints.

use std::path::Path;
use std::process::Command;

/// The output of git; `None` outside of a checkout.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // logs/HEAD changes with every commit and checkout.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) =
            git(&["rev-parse", "--git-path", name]).filter(|p| Path::new(p).exists())
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    // Sources unpacked inside another checkout are not of that commit.
    let tracked = git(&["ls-files", "--error-unmatch", "build.rs"]).is_some();
    let commit = tracked.then(|| git(&["rev-parse", "--short=9", "HEAD"])).flatten();
    let mut parts = vec![commit.unwrap_or_else(|| "no commit".to_owned())];
    for feature in ["hf-tokenizers", "parquet", "parquet-zstd"] {
        let variable = format!("CARGO_FEATURE_{}", feature.to_uppercase().replace('-', "_"));
        if std::env::var_os(variable).is_some() {
            parts.push(feature.to_owned());
        }
    }
    println!("cargo::rustc-env=FOX_BUILD={}", parts.join(", "));
}
