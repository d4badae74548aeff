//! The CPU backend: every fused op of [`fox_tensor::Backend`], vectorised and on all cores.
//!
//! - `simd`: one vector trait for AVX-512, AVX2, NEON and plain Rust, chosen at run time.
//! - `pool`: cache-aligned memory that is reused from step to step.
//! - `rows`, `shared`: how rows are shared out among tasks, and how tasks write to one result.
//! - the others: one op each, `impl XOps for Cpu` and its kernels; `attention` holds stick-breaking and
//!   paged attention, too.
//!
//! Work is cut into pieces by shape alone and partial sums are added in order, so results are the
//! same to the bit from run to run and for any number of threads.

mod add;
mod attention;
mod backend;
mod columns;
mod conv;
mod embedding;
mod foreign;
mod gate;
mod gated_norm;
mod glu;
mod heads;
mod hgrn;
mod linear;
mod loss;
mod norm;
mod orthogonalize;
mod pool;
mod rope;
mod rows;
mod scan;
mod shared;
pub mod simd;
mod sink;
mod time_step;
mod update;

pub use attention::BLOCK as ATTENTION_BLOCK;
pub use backend::{Cpu, Options};
pub use foreign::{borrowed, values, values_mut};

use fox_tensor::{Device, Result};

/// The CPU with all its cores and its best instructions.
pub fn device() -> Device {
    Device::new(Cpu::default())
}

/// The CPU with options of one's own.
pub fn device_with(options: Options) -> Result<Device> {
    Ok(Device::new(Cpu::new(options)?))
}
