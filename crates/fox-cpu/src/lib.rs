//! The CPU backend: every fused op of [`fox_tensor::Backend`], vectorised and on all cores.
//!
//! - `simd`: one vector trait for AVX-512, AVX2, NEON and plain Rust, chosen at run time.
//! - `pool`: cache-aligned memory that is reused from step to step.
//! - `linear`: matrix products, on the `gemm` crate; `thin` for few rows, `packed` for weights in fewer bits.
//! - `attention`: forgetting attention in tiles, forward, backward and decode.
//! - `baseline`: what only the baselines need; linear recurrences in chunks, on matrix products.
//! - the other files: one fused op each.
//!
//! Work is cut into pieces by shape alone and partial sums are added in order, so results are the
//! same to the bit from run to run and for any number of threads.

mod attention;
mod backend;
mod baseline;
mod elementwise;
mod embedding;
mod gated_norm;
mod heads;
mod linear;
mod loss;
mod norm;
mod packed;
mod pool;
mod rope;
mod rows;
mod shared;
pub mod simd;
mod thin;

pub use attention::BLOCK as ATTENTION_BLOCK;
pub use backend::{Cpu, Options};

use fox_tensor::{Device, Result};

/// The CPU with all its cores and its best instructions.
pub fn device() -> Device {
    Device::new(Cpu::default())
}

/// The CPU with options of one's own.
pub fn device_with(options: Options) -> Result<Device> {
    Ok(Device::new(Cpu::new(options)?))
}
