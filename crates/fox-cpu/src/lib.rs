//! The CPU backend: every fused op of [`fox_tensor::Backend`], vectorised and on all cores.
//!
//! - `simd`: one vector trait for AVX-512, AVX2, NEON and plain Rust, chosen at run time.
//! - `pool`: cache-aligned memory that is reused from step to step.
//! - `rows`, `shared`: division of rows into tasks, and concurrent writes to one result.
//! - the others: one op each, `impl XOps for Cpu` and its kernels; stick-breaking, PaTH and paged attention are in `attention`.
//!
//! Work is divided into tasks by shape alone and partial sums are added in a fixed order, so results are bit-exact from
//! run to run and for any number of threads.
//!
//! Attention with forget gates on user buffers, forward and backward:
//!
//! ```
//! use fox_tensor::{AttentionSpec, Gradients, Segments, Tape};
//!
//! let (batch, time, heads, head_dim) = (2, 128, 4, 64);
//! let (rows, width) = (batch * time, heads * head_dim);
//! // Queries, keys and values [batch, time, heads, head_dim]; log gates [batch, time, heads], none above 0.
//! let (q, k, v) = (vec![0.1; rows * width], vec![0.2; rows * width], vec![0.3; rows * width]);
//! let log_gates = vec![-0.01; rows * heads];
//!
//! let device = fox_cpu::device();
//! let mut tape = Tape::recording(&device);
//! let q = tape.leaf(device.from_f32(&q, [rows, width])?);
//! let k = tape.leaf(device.from_f32(&k, [rows, width])?);
//! let v = tape.leaf(device.from_f32(&v, [rows, width])?);
//! let gates = tape.leaf(device.from_f32(&log_gates, [rows, heads])?);
//! let spec = AttentionSpec::causal(heads, head_dim, Segments::uniform(batch, time));
//! let (out, _) = tape.attention(&q, &k, &v, Some(&gates), &spec)?;
//! // Means of equal values [batch, time, heads, head_dim].
//! assert!(out.value().to_f32()?.iter().all(|o| (o - 0.3).abs() < 1e-5));
//!
//! let d_out = device.full([rows, width], 1.0)?;
//! let leaves = [q, k, v, gates];
//! let gradients = tape.backward_from(&[(out, d_out)], &leaves, &mut Gradients::default())?;
//! let dv = gradients[2].as_ref().ok_or("no gradient")?.to_f32()?;
//! // Weights of a query add up to 1, so every query passes on all of its gradient.
//! let sum: f64 = dv.iter().map(|x| f64::from(*x)).sum();
//! assert!((sum / (rows * width) as f64 - 1.0).abs() < 1e-5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`borrowed`] makes a tensor over memory of the caller, without a copy.

mod attention;
mod backend;
mod channel_decay;
mod columns;
mod conv;
mod dropout;
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
mod reflection;
mod rope;
mod rows;
mod scan;
mod shared;
mod simd;
mod sink;
mod time_step;
mod update;

pub use attention::BLOCK as ATTENTION_BLOCK;
pub use backend::{Cpu, Options};
pub use foreign::{borrowed, values, values_mut};
pub use simd::Level;

use fox_tensor::{Device, Result};

/// The CPU with all cores and the best instruction set.
pub fn device() -> Device {
    Device::new(Cpu::default())
}

/// The CPU with these options.
pub fn device_with(options: Options) -> Result<Device> {
    Ok(Device::new(Cpu::new(options)?))
}
