//! The functions of NCCL, loaded at run time.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use crate::{Error, Result};

/// The library's file name on Linux; NCCL supports no other system.
const NAME: &str = "libnccl.so.2";

const MISSING: Error = Error::MissingLibrary {
    library: NAME,
    hint: "install NCCL (pip install nvidia-nccl-cu13), put its folder on the library path or name the file with FOX_NCCL, or set parallel.exchange=\"host\", which is slower",
};

/// NCCL result codes that are not errors.
const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// The bootstrap id, created by rank 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; 128]);

/// A communicator's handle.
pub(super) type Comm = *mut c_void;

/// Settings of a communicator: the fields of version 2.14, which later versions accept.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// Nonblocking calls, so that another thread can abort them.
    pub(super) fn not_blocking() -> Self {
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 }
    }
}

/// The library.
pub(super) struct Nccl {
    pub(super) get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub(super) init_rank:
        unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *const Config) -> c_int,
    pub(super) async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    pub(super) abort: unsafe extern "C" fn(Comm) -> c_int,
    pub(super) group_start: unsafe extern "C" fn() -> c_int,
    pub(super) group_end: unsafe extern "C" fn() -> c_int,
    pub(super) send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int,
    pub(super) recv:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    // Keeps the functions loaded.
    _library: Library,
}

impl Nccl {
    /// The library, opened once.
    pub(super) fn get() -> Result<&'static Nccl> {
        static NCCL: OnceLock<Option<Nccl>> = OnceLock::new();
        NCCL.get_or_init(|| candidates().iter().find_map(|path| open(path))).as_ref().ok_or(MISSING)
    }

    /// Its version, e.g. `2.28.3`.
    pub(super) fn version(&self) -> Result<String> {
        let mut code = 0;
        // SAFETY: `code` is a valid place to write.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&mut code) })?;
        Ok(format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100))
    }

    /// An error for a code that is one. Work in progress is not: the communicator reports its end.
    pub(super) fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = |words: *const c_char| match words.is_null() {
            true => String::new(),
            // SAFETY: NCCL's texts are terminated and live as long as it does.
            false => unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned(),
        };
        // SAFETY: any code has a text; without a communicator the last error is that of the process.
        let (name, last) = unsafe {
            (text((self.error_string)(code)), text((self.last_error)(std::ptr::null_mut())))
        };
        let detail = if last.is_empty() { name } else { format!("{name} ({})", last.trim()) };
        Err(Error::driver(call, detail))
    }
}

fn open(path: &Path) -> Option<Nccl> {
    // SAFETY: opening a shared library runs its initialisers; those of NCCL have no requirements.
    let library = unsafe { Library::new(path) }.ok()?;
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the types above are those of nccl.h.
            *unsafe { library.get($name) }.ok()?
        };
    }
    Some(Nccl {
        get_version: function!(b"ncclGetVersion"),
        get_unique_id: function!(b"ncclGetUniqueId"),
        init_rank: function!(b"ncclCommInitRankConfig"),
        async_error: function!(b"ncclCommGetAsyncError"),
        abort: function!(b"ncclCommAbort"),
        group_start: function!(b"ncclGroupStart"),
        group_end: function!(b"ncclGroupEnd"),
        send: function!(b"ncclSend"),
        recv: function!(b"ncclRecv"),
        error_string: function!(b"ncclGetErrorString"),
        last_error: function!(b"ncclGetLastError"),
        _library: library,
    })
}

/// Where it may be, in order: what the user names, the loader's path, beside the libraries of CUDA that are open
/// already, and in Python's packages.
fn candidates() -> Vec<PathBuf> {
    if let Some(own) = std::env::var_os("FOX_NCCL") {
        return vec![own.into()];
    }
    let mut files = vec![PathBuf::from(NAME)];
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for folder in cuda_folders(&maps) {
        files.push(folder.join(NAME));
        // PyPI has a folder for every package: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib, nvidia/nccl/lib.
        files.push(folder.join("../../nccl/lib").join(NAME));
    }
    for prefix in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os) {
        files.extend(in_python(Path::new(&prefix)));
    }
    files.extend(["/usr/local", "/usr"].iter().flat_map(|prefix| in_python(Path::new(prefix))));
    files
}

/// Folders of the libraries of CUDA among the files that are mapped.
fn cuda_folders(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let of_cuda = |path: &&Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        ["libnvrtc", "libcublas"].iter().any(|library| name.starts_with(library))
    };
    paths.filter(of_cuda).filter_map(|path| Some(path.parent()?.to_owned())).collect()
}

/// The package of NCCL in the Python installations below a prefix.
fn in_python(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for python in std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten() {
        if python.file_name().to_string_lossy().starts_with("python") {
            for packages in ["site-packages", "dist-packages"] {
                found.push(python.path().join(packages).join("nvidia/nccl/lib").join(NAME));
            }
        }
    }
    found.retain(|file| file.exists());
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_for_beside_what_is_open() {
        let maps = "7f01-7f02 r-xp 00000000 08:01 42   /opt/env/nvidia/cu13/lib/libnvrtc.so.13\n\
                    7f03-7f04 r-xp 00000000 08:01 43   /opt/env/nvidia/cu13/lib/libcublasLt.so.13\n\
                    7f05-7f06 r-xp 00000000 08:01 44   /usr/lib/libc.so.6\n7f07-7f08 rw-p 0 00:00 0 [heap]\n";
        let folders: Vec<PathBuf> = cuda_folders(maps).into_iter().collect();
        assert_eq!(folders, [Path::new("/opt/env/nvidia/cu13/lib")]);
        assert!(cuda_folders("").is_empty());
    }

    #[test]
    fn searches_python_packages() {
        let prefix = std::env::temp_dir().join(format!("fox-nccl-{}", std::process::id()));
        let folder = prefix.join("lib/python3.12/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&folder).unwrap();
        assert!(in_python(&prefix).is_empty());
        std::fs::write(folder.join(NAME), "no library").unwrap();
        assert_eq!(in_python(&prefix), [folder.join(NAME)]);
        assert!(open(&folder.join(NAME)).is_none());
        std::fs::remove_dir_all(&prefix).unwrap();
    }

    /// Where there is NCCL, it has all functions; elsewhere the remedy is named.
    #[test]
    fn opens_or_names_the_remedy() {
        match Nccl::get() {
            Ok(nccl) => assert!(nccl.version().unwrap().starts_with("2."), "{:?}", nccl.version()),
            Err(error) => assert_eq!(error.to_string(), MISSING.to_string()),
        }
    }

    #[test]
    fn missing_library_error_names_the_remedy() {
        let words = MISSING.to_string();
        assert!(words.starts_with("libnccl.so.2 was not found; install NCCL"), "{words}");
        assert!(words.contains("parallel.exchange=\"host\""), "{words}");
    }
}
