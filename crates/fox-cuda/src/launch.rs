//! Loaded machine code and checked launches.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::{Error, Result};

/// Shared memory that a launch gets without asking the driver first.
const FREE_SHARED_BYTES: u32 = 48 * 1024;

pub(crate) struct Module {
    name: &'static str,
    handle: sys::CUmodule,
    functions: Mutex<HashMap<String, usize>>,
}

// SAFETY: a module handle may be used from any thread; the map is behind a mutex.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(crate) fn load(name: &'static str, cubin: &[u8]) -> Result<Self> {
        // SAFETY: `cubin` is a complete image made by the compiler (or checked by its hash).
        let handle = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(|e| Error::driver(format!("loading kernel {name}"), e))?;
        Ok(Module { name, handle, functions: Mutex::default() })
    }

    pub(crate) fn function(self: Arc<Self>, entry: &str, stream: sys::CUstream) -> Result<Kernel> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = match functions.get(entry) {
            Some(&handle) => handle as sys::CUfunction,
            None => {
                let name = CString::new(entry).map_err(|e| Error::driver(entry, e))?;
                // SAFETY: the module is loaded.
                let handle = unsafe { result::module::get_function(self.handle, name) }
                    .map_err(|e| Error::driver(format!("{}: finding {entry}", self.name), e))?;
                functions.insert(entry.to_owned(), handle as usize);
                handle
            }
        };
        drop(functions);
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to this module, which is loaded.
        let own_shared = unsafe { result::function::get_function_attribute(handle, which) }
            .map_err(|e| Error::driver(format!("attributes of {entry}"), e))?;
        let own_shared = own_shared.unsigned_abs();
        Ok(Kernel { handle, stream, entry: entry.to_owned(), own_shared, module: self })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; kernels hold an `Arc` to this, so none is left.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

/// A function on the GPU.
pub struct Kernel {
    handle: sys::CUfunction,
    stream: sys::CUstream,
    entry: String,
    /// Shared memory that it declares itself, in bytes.
    own_shared: u32,
    module: Arc<Module>,
}

// SAFETY: function and stream handles may be used from any thread that has made the context current.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// A launch of `grid` blocks of `block` threads.
    pub fn launch(&self, grid: [u32; 3], block: u32) -> Launch<'_> {
        Launch {
            kernel: self,
            grid,
            block,
            shared: 0,
            overlapping: false,
            cooperative: false,
            args: Vec::with_capacity(12),
            life: PhantomData,
        }
    }

    /// Registers per thread.
    pub fn registers(&self) -> Result<i32> {
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe { result::function::get_function_attribute(self.handle, which) }
            .map_err(|e| Error::driver(format!("attributes of {}", self.entry), e))
    }
}

/// A value that a kernel takes by value.
///
/// # Safety
/// The type must have the layout of the parameter in the kernel's source.
pub unsafe trait KernelArg: Copy {}
// SAFETY: the same on both sides.
unsafe impl KernelArg for i32 {}
// SAFETY: the same on both sides.
unsafe impl KernelArg for u32 {}
// SAFETY: the same on both sides.
unsafe impl KernelArg for f32 {}
// SAFETY: a device address is a 64-bit pointer.
unsafe impl KernelArg for u64 {}

/// A parameter of one machine word or less: what the ops' kernels take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arg(u64);

// The driver reads as many of the low bytes as the parameter has: GPUs' hosts are little-endian.
impl From<u64> for Arg {
    fn from(address: u64) -> Self {
        Arg(address)
    }
}
impl From<usize> for Arg {
    fn from(count: usize) -> Self {
        Arg(count as u64)
    }
}
impl From<i32> for Arg {
    fn from(value: i32) -> Self {
        Arg(u64::from(value as u32))
    }
}
impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Arg(u64::from(value.to_bits()))
    }
}

/// A launch being put together.
pub struct Launch<'a> {
    kernel: &'a Kernel,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    overlapping: bool,
    cooperative: bool,
    args: Vec<*mut c_void>,
    life: PhantomData<&'a ()>,
}

impl<'a> Launch<'a> {
    /// Dynamic shared memory, in bytes.
    pub fn shared(mut self, bytes: u32) -> Self {
        self.shared = bytes;
        self
    }

    /// Whether it may begin before the launch in front of it has ended. The kernel must then wait by itself
    /// before it touches what others write.
    pub(crate) fn overlapping(mut self, on: bool) -> Self {
        self.overlapping = on;
        self
    }

    /// All thread blocks run at once, so that they may wait for each other.
    pub(crate) fn cooperative(mut self) -> Self {
        self.cooperative = true;
        self
    }

    /// The next parameter.
    pub fn arg<T: KernelArg>(mut self, value: &'a T) -> Self {
        self.args.push(ptr_of(value));
        self
    }

    /// The next parameters.
    pub(crate) fn args(mut self, values: &'a [Arg]) -> Self {
        self.args.extend(values.iter().map(|value| ptr_of(&value.0)));
        self
    }

    /// Runs it. `shapes` describes the operands for the error message.
    ///
    /// # Safety
    /// The parameters must be those of the kernel, in order, and every address among them must
    /// belong to live buffers of the sizes that the kernel expects.
    pub unsafe fn run(mut self, shapes: impl FnOnce() -> String) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let outcome = self.allow_shared().and_then(|()| {
            // SAFETY: the caller vouches for the parameters; the function and stream are live.
            unsafe { self.submit() }
        });
        outcome.map_err(|e| {
            let Kernel { entry, module, .. } = self.kernel;
            Error::driver(
                format!(
                    "launching {}::{entry} on a grid of {:?} for {}",
                    module.name,
                    self.grid,
                    shapes()
                ),
                e,
            )
        })
    }

    /// # Safety
    /// As for [`Launch::run`].
    unsafe fn submit(&mut self) -> std::result::Result<(), cudarc::driver::DriverError> {
        use sys::CUlaunchAttributeID as Id;
        use sys::CUlaunchAttributeValue as Value;
        let overlapping = (
            Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            Value { programmaticStreamSerializationAllowed: 1 },
        );
        let cooperative = (Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, Value { cooperative: 1 });
        let mut attributes: Vec<sys::CUlaunchAttribute> =
            [(self.overlapping, overlapping), (self.cooperative, cooperative)]
                .into_iter()
                .filter(|(on, _)| *on)
                .map(|(_, (id, value))| sys::CUlaunchAttribute { id, pad: [0; 4], value })
                .collect();
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: self.kernel.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let (handle, args) = (self.kernel.handle, self.args.as_mut_ptr());
        // SAFETY: the caller's promise; the configuration lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&config, handle, args, ptr::null_mut()) }.result()
    }

    fn allow_shared(&self) -> std::result::Result<(), cudarc::driver::DriverError> {
        if self.shared + self.kernel.own_shared <= FREE_SHARED_BYTES {
            return Ok(());
        }
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is live; the driver checks the value.
        unsafe {
            result::function::set_function_attribute(self.kernel.handle, which, self.shared as i32)
        }
    }
}

fn ptr_of<T>(value: &T) -> *mut c_void {
    // The driver only reads parameters.
    ptr::from_ref(value).cast_mut().cast()
}
