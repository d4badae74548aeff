//! The CUDA backend: NVIDIA GPUs since Ampere, with special kernels for Hopper.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that contains it: the driver,
//! NVRTC and cuBLASLt are opened when a [`Gpu`] is asked for, NCCL when it is connected with others, and a missing
//! library is an ordinary [`Error`]. Kernels are CUDA C++ sources beside the ops in `ops/`, compiled for the GPU at hand when first used
//! and kept on disk.
//!
//! Layers, from the bottom: `cudarc` opens the libraries and declares their functions; [`Gpu`] owns a
//! device, its stream, its memory ([`Buffer`]s from a caching pool) and its compiled kernels; the ops
//! ([`attention`]) turn shapes into launches, and [`Cuda`] is the [`fox_tensor::Backend`] made of them.
//!
//! A program can be built anywhere and takes a GPU where there is one:
//!
//! ```
//! use fox_cuda::{Cuda, Gpu, Precision};
//! use fox_tensor::Device;
//!
//! if Gpu::driver_is_present() {
//!     match Gpu::new(0).and_then(|gpu| Cuda::new(gpu, Precision::Bf16)) {
//!         Ok(cuda) => {
//!             let device = Device::new(cuda);
//!             assert_eq!(device.full([2], 1.5)?.to_f32()?, [1.5, 1.5]);
//!         }
//!         Err(error) => println!("no GPU: {error}"),
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod backend;
mod compile;
mod copies;
mod error;
mod generation;
mod gpu;
mod kernel_cache;
mod launch;
mod lru;
mod nccl;
mod ops;
mod params;
mod pool;
mod source;
mod timer;

pub use backend::{Cuda, Precision, device};
pub use compile::{Compiled, compile, nvrtc_is_present};
pub use error::{Error, Result};
pub use generation::{ComputeCapability, Generation};
pub use gpu::Gpu;
pub use ops::attention;
pub use ops::variants;
pub use pool::{Buffer, Element, Float};
pub use source::Source;
