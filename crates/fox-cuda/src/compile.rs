//! Run-time compilation of CUDA C++ with NVRTC, cached on disk.
//!
//! A kernel is a `.cu` file and a list of `-D` options. The result is stored in the user's cache folder under a hash of
//! sources, options, architecture and compiler version.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::sys as nvrtc;
use fox_base::{FileError, durable};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::{Error, Result, Source};

/// Machine code and the compiler's log.
#[derive(Debug)]
pub struct Compiled {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// Registers, spills and warnings, as ptxas prints them.
    pub log: String,
}

/// Whether the NVRTC library can be loaded.
pub fn nvrtc_is_present() -> bool {
    // SAFETY: opening a shared library runs its initialisers; NVRTC's have no requirements.
    unsafe { nvrtc::is_culib_present() }
}

pub(crate) fn missing_nvrtc() -> Error {
    Error::MissingLibrary {
        library: "libnvrtc",
        hint: "install the CUDA runtime libraries (the nvidia-cuda-nvrtc package is enough) and put them on the library path",
    }
}

/// Compiles `source` for `architecture` (e.g. `sm_90a`) with `-D` for each of `defines`.
pub fn compile(source: Source, architecture: &str, defines: &[String]) -> Result<Compiled> {
    if !nvrtc_is_present() {
        return Err(missing_nvrtc());
    }
    let program = Program::new(source)?;
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ];
    options.extend(defines.iter().map(|d| format!("-D{d}")));
    if defines.iter().any(|d| d == RACECHECK) {
        options.push("--generate-line-info".to_owned());
    }
    program.compile(architecture, &options)
}

/// Builds kernels for compute-sanitizer's racecheck: line numbers, barriers on which every reader arrives (`tma.cuh`),
/// waits for all copies instead of some (`mma.cuh`). The arithmetic is the same.
const RACECHECK: &str = "RACECHECK=1";

struct Program {
    handle: nvrtc::nvrtcProgram,
    source: Source,
}

impl Program {
    fn new(source: Source) -> Result<Self> {
        let text = c_string(source.text)?;
        let name = c_string(source.name)?;
        let (mut names, mut headers) = (Vec::new(), Vec::new());
        for (name, text) in source.headers() {
            names.push(c_string(name)?);
            headers.push(c_string(&text)?);
        }
        let count = headers.len() as i32;
        let headers: Vec<*const c_char> = headers.iter().map(|h| h.as_ptr()).collect();
        let names: Vec<*const c_char> = names.iter().map(|n| n.as_ptr()).collect();
        let mut handle = ptr::null_mut();
        // SAFETY: all strings are alive and terminated, and the two arrays have `count` items.
        let status = unsafe {
            nvrtc::nvrtcCreateProgram(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                count,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        check(status, "nvrtcCreateProgram")?;
        Ok(Program { handle, source })
    }

    fn compile(&self, architecture: &str, options: &[String]) -> Result<Compiled> {
        let options: Vec<CString> = options.iter().map(|o| c_string(o)).collect::<Result<_>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the handle is live, the options are terminated strings that outlive the call.
        let status = unsafe {
            nvrtc::nvrtcCompileProgram(self.handle, options.len() as i32, options.as_ptr())
        };
        let log = self.log();
        if status != nvrtc::nvrtcResult::NVRTC_SUCCESS {
            return Err(Error::Compile {
                kernel: self.source.name,
                architecture: architecture.to_owned(),
                log,
            });
        }
        let mut size = 0;
        // SAFETY: the handle is live and `size` is valid for writes.
        check(unsafe { nvrtc::nvrtcGetCUBINSize(self.handle, &mut size) }, "nvrtcGetCUBINSize")?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size that the call above gave.
        let status = unsafe { nvrtc::nvrtcGetCUBIN(self.handle, cubin.as_mut_ptr().cast()) };
        check(status, "nvrtcGetCUBIN")?;
        Ok(Compiled { cubin, log })
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the handle is live and `size` is valid for writes.
        unsafe { nvrtc::nvrtcGetProgramLogSize(self.handle, &mut size) };
        let mut log = vec![0u8; size.max(1)];
        // SAFETY: the buffer has the size that the call above gave.
        unsafe { nvrtc::nvrtcGetProgramLog(self.handle, log.as_mut_ptr().cast()) };
        CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        unsafe { nvrtc::nvrtcDestroyProgram(&mut self.handle) };
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|e| Error::driver("nvrtc", e))
}

fn check(status: nvrtc::nvrtcResult, call: &str) -> Result<()> {
    if status == nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::driver(call, format!("{status:?}")))
}

/// Machine code from the disk cache, or compiled and stored there. An unusable cache costs time, never correctness. The
/// environment variable `FOX_RACECHECK=1` selects the variant for `compute-sanitizer --tool racecheck`.
pub(crate) fn compile_cached(
    source: Source,
    architecture: &str,
    defines: &[String],
) -> Result<Vec<u8>> {
    let racecheck = std::env::var_os("FOX_RACECHECK").is_some_and(|set| set == "1");
    let mut defines = defines.to_vec();
    defines.extend(racecheck.then(|| RACECHECK.to_owned()));
    let defines = &defines;
    let path = cache_folder().map(|folder| folder.join(cache_name(source, architecture, defines)));
    if let Some(cubin) = path.as_deref().and_then(read_cached) {
        return Ok(cubin);
    }
    let cubin = compile(source, architecture, defines)?.cubin;
    if let Some(path) = path {
        // Best effort by design: see above.
        let _ = write_cached(&path, &cubin);
    }
    Ok(cubin)
}

fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("fox").join("kernels"))
}

fn cache_name(source: Source, architecture: &str, defines: &[String]) -> String {
    let mut key = String::new();
    let (mut major, mut minor) = (0, 0);
    if nvrtc_is_present() {
        // SAFETY: both are valid for writes.
        unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    }
    for part in [&format!("{major}.{minor}"), architecture, source.name, source.text] {
        key.push_str(part);
        key.push('\0');
    }
    for (name, text) in source.headers() {
        key.push_str(name);
        key.push_str(&text);
    }
    for define in defines {
        key.push_str(define);
        key.push('\0');
    }
    format!("{}-{:032x}.cubin", source.name, XxHash3_128::oneshot(key.as_bytes()))
}

/// A cached file ends with a checksum, so that a truncated one is recompiled.
fn read_cached(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let body = bytes.len().checked_sub(8)?;
    let sum = u64::from_le_bytes(bytes[body..].try_into().ok()?);
    bytes.truncate(body);
    (XxHash3_64::oneshot(&bytes) == sum).then_some(bytes)
}

fn write_cached(path: &Path, cubin: &[u8]) -> std::result::Result<(), FileError> {
    if let Some(folder) = path.parent() {
        durable::create_folder(folder)?;
    }
    let mut bytes = cubin.to_vec();
    bytes.extend_from_slice(&XxHash3_64::oneshot(cubin).to_le_bytes());
    durable::write(path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_damaged_cache_files() {
        let path =
            std::env::temp_dir().join(format!("fox-cache-test-{}.cubin", std::process::id()));
        write_cached(&path, b"machine code").unwrap();
        assert_eq!(read_cached(&path).unwrap(), b"machine code");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[3] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read_cached(&path), None);
        std::fs::write(&path, [1, 2, 3]).unwrap();
        assert_eq!(read_cached(&path), None);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn cache_name_depends_on_all_inputs() {
        let source = Source { name: "probe", text: "", headers: &[], params: &[] };
        let name =
            |source, arch: &str, define: &str| cache_name(source, arch, &[define.to_owned()]);
        let base = name(source, "sm_80", "A=1");
        assert_eq!(base, name(source, "sm_80", "A=1"));
        assert_ne!(base, name(source, "sm_90a", "A=1"));
        assert_ne!(base, name(source, "sm_80", "A=2"));
        let others = [
            Source { name: "another", ..source },
            Source { text: " ", ..source },
            Source { headers: &[("a.cuh", "")], ..source },
            Source { params: &[crate::params::tests::PROBE], ..source },
        ];
        for other in others {
            assert_ne!(base, name(other, "sm_80", "A=1"), "{other:?}");
        }
    }
}
