//! Loaded modules and checked kernel launches.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::params::{DriverParam, KernelParams};
use crate::{Error, Result};

/// Shared memory that a launch may use without setting a function attribute.
const FREE_SHARED_BYTES: usize = 48 * 1024;

/// A function of a module.
struct Function {
    handle: sys::CUfunction,
    /// Dynamic shared memory in bytes that the driver allows its launches.
    allowed: Mutex<usize>,
}

pub(crate) struct Module {
    name: &'static str,
    handle: sys::CUmodule,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

// SAFETY: a function handle may be used from any thread that has made the context current.
unsafe impl Send for Function {}
// SAFETY: as above; what changes is behind a mutex.
unsafe impl Sync for Function {}
// SAFETY: a module handle may be used from any thread; the map is behind a mutex.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(crate) fn load(name: &'static str, cubin: &[u8]) -> Result<Self> {
        // SAFETY: `cubin` is a complete image from the compiler, or from the disk cache, whose checksum was verified.
        let handle = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(|e| Error::driver(format!("loading kernel {name}"), e))?;
        Ok(Module { name, handle, functions: Mutex::default() })
    }

    pub(crate) fn function(self: Arc<Self>, entry: &str, stream: sys::CUstream) -> Result<Kernel> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match functions.get(entry) {
            Some(function) => Arc::clone(function),
            None => {
                let function = Arc::new(self.find(entry)?);
                functions.insert(entry.to_owned(), Arc::clone(&function));
                function
            }
        };
        drop(functions);
        Ok(Kernel { function, stream, entry: entry.to_owned(), module: self })
    }

    fn find(&self, entry: &str) -> Result<Function> {
        let name = CString::new(entry).map_err(|e| Error::driver(entry, e))?;
        // SAFETY: the module is loaded.
        let handle = unsafe { result::module::get_function(self.handle, name) }
            .map_err(|e| Error::driver(format!("{}: finding {entry}", self.name), e))?;
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to this module, which is loaded.
        let own_shared = unsafe { result::function::get_function_attribute(handle, which) }
            .map_err(|e| Error::driver(format!("attributes of {entry}"), e))?;
        let own_shared = own_shared.unsigned_abs() as usize;
        let allowed = Mutex::new(FREE_SHARED_BYTES.saturating_sub(own_shared));
        Ok(Function { handle, allowed })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; kernels hold an `Arc` to this, so none is left.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

/// A kernel, launched on one CUDA stream.
pub(crate) struct Kernel {
    function: Arc<Function>,
    stream: sys::CUstream,
    entry: String,
    module: Arc<Module>,
}

// SAFETY: function and stream handles may be used from any thread that has made the context current.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// A launch of `grid` blocks of `block` threads.
    pub(crate) fn launch(&self, grid: [usize; 3], block: usize) -> Launch<'_> {
        Launch {
            kernel: self,
            size: Size { grid, block, shared: 0 },
            overlapping: false,
            params: Vec::with_capacity(12),
        }
    }
}

/// Grid, threads per block and dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug)]
struct Size {
    grid: [usize; 3],
    block: usize,
    shared: usize,
}

impl Size {
    /// Checks the limits common to all GPUs; the driver checks further ones.
    fn check(&self, kernel: &str) -> Result<()> {
        let [x, y, z] = self.grid;
        let limits = [
            ("the grid's x", x, i32::MAX as usize),
            ("the grid's y", y, 65535),
            ("the grid's z", z, 65535),
            ("threads of a block", self.block, 1024),
            ("bytes of shared memory", self.shared, i32::MAX as usize),
        ];
        for (field, value, most) in limits {
            if value > most {
                return Err(Error::TooLarge { kernel: kernel.to_owned(), field, value, most });
            }
        }
        Ok(())
    }
}

/// A launch under construction.
pub(crate) struct Launch<'a> {
    kernel: &'a Kernel,
    size: Size,
    overlapping: bool,
    /// Parameters in the order of the kernel's declaration.
    params: Vec<DriverParam>,
}

impl Launch<'_> {
    /// Dynamic shared memory, in bytes.
    pub(crate) fn shared(mut self, bytes: usize) -> Self {
        self.size.shared = bytes;
        self
    }

    /// Whether it may start before its predecessor has ended (programmatic dependent launch). The kernel must then wait
    /// before it touches memory that predecessors write.
    pub(crate) fn overlapping(mut self, on: bool) -> Self {
        self.overlapping = on;
        self
    }

    /// Appends parameters; an error if a number does not fit.
    pub(crate) fn params<P: KernelParams>(mut self, params: P) -> Result<Self> {
        params.hold_all(&self.kernel.entry, &mut self.params)?;
        Ok(self)
    }

    /// Appends a driver-defined parameter, such as a tensor map.
    pub(crate) fn opaque<T: Copy + 'static>(mut self, value: T) -> Self {
        self.params.push(DriverParam::Value(Box::new(value)));
        self
    }

    /// Launches the kernel. `shapes` describes the operands for error messages.
    ///
    /// # Safety
    /// The parameters must be those of the kernel, in order, and every address among them must belong to a live buffer of
    /// the size that the kernel expects.
    pub(crate) unsafe fn run(self, shapes: impl FnOnce() -> String) -> Result<()> {
        self.size.check(&self.kernel.entry)?;
        if self.size.grid.contains(&0) {
            return Ok(());
        }
        let outcome = self.allow_shared().and_then(|()| {
            // SAFETY: the caller vouches for the parameters; the function and stream are live.
            unsafe { self.submit() }
        });
        outcome.map_err(|e| {
            let Kernel { entry, module, .. } = self.kernel;
            let (name, grid) = (module.name, self.size.grid);
            let call = format!("launching {name}::{entry} on a grid of {grid:?} for {}", shapes());
            Error::driver(call, e)
        })
    }

    /// # Safety
    /// As for [`Launch::run`].
    unsafe fn submit(&self) -> std::result::Result<(), cudarc::driver::DriverError> {
        use sys::CUlaunchAttributeID as Id;
        use sys::CUlaunchAttributeValue as Value;
        let mut attributes = [sys::CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: Value { programmaticStreamSerializationAllowed: i32::from(self.overlapping) },
        }];
        let Size { grid: [x, y, z], block, shared } = self.size;
        // All of these were checked by `run`.
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: block as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: self.kernel.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::from(self.overlapping),
        };
        // The driver only reads parameters.
        let mut params: Vec<*mut c_void> =
            self.params.iter().map(|param| param.address().cast_mut()).collect();
        // SAFETY: the caller's promise; configuration and parameters live until the call returns.
        unsafe {
            let function = self.kernel.function.handle;
            sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), ptr::null_mut())
        }
        .result()
    }

    /// Raises the driver's limit of dynamic shared memory for this function if needed.
    fn allow_shared(&self) -> std::result::Result<(), cudarc::driver::DriverError> {
        let Function { handle, ref allowed } = *self.kernel.function;
        let mut allowed = allowed.lock().unwrap_or_else(PoisonError::into_inner);
        if self.size.shared <= *allowed {
            return Ok(());
        }
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // Checked by `run`.
        let shared = self.size.shared as i32;
        // SAFETY: the function is live; the driver checks the value.
        unsafe { result::function::set_function_attribute(handle, which, shared) }?;
        *allowed = self.size.shared;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_launches_beyond_the_limits() {
        let fits = Size { grid: [i32::MAX as usize, 65535, 65535], block: 1024, shared: 227 << 10 };
        assert!(fits.check("probe").is_ok());
        let message = |size: Size| size.check("probe").map_err(|e| e.to_string()).unwrap_err();
        let expected = |field: &str, value: usize, most: usize| {
            format!(
                "kernel probe: {field} is {value}, and it can be at most {most}; give the op less at a time"
            )
        };
        let most = i32::MAX as usize;
        let size = Size { grid: [most + 1, 1, 1], ..fits };
        assert_eq!(message(size), expected("the grid's x", most + 1, most));
        let size = Size { grid: [1, 65536, 1], ..fits };
        assert_eq!(message(size), expected("the grid's y", 65536, 65535));
        let size = Size { grid: [1, 1, usize::MAX], ..fits };
        assert_eq!(message(size), expected("the grid's z", usize::MAX, 65535));
        let size = Size { block: 1025, ..fits };
        assert_eq!(message(size), expected("threads of a block", 1025, 1024));
        let size = Size { shared: 1 << 31, ..fits };
        assert_eq!(message(size), expected("bytes of shared memory", 1 << 31, most));
    }
}
