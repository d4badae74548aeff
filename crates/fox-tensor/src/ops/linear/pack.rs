//! Packed weights: an optional capability of a device.

use crate::check::Operands;
use crate::{Backend, Error, Result, Tensor};

/// Storage format of a weight matrix for inference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// Unchanged.
    #[default]
    F32,
    /// Rounded to bfloat16: half the memory, and half the time where memory bandwidth is the limit.
    Bf16,
    /// Rounded to 8 bits with a scale for every [`INT8_BLOCK`] values: about a quarter.
    Int8,
}

impl WeightFormat {
    /// Bytes per value, scales included.
    pub fn bytes_per_value(self) -> f64 {
        match self {
            WeightFormat::F32 => 4.0,
            WeightFormat::Bf16 => 2.0,
            WeightFormat::Int8 => 1.0 + 4.0 / INT8_BLOCK as f64,
        }
    }
}

/// Values of [`WeightFormat::Int8`] that share a scale.
pub const INT8_BLOCK: usize = 64;

/// Rounds up to [`INT8_BLOCK`] values that share a scale to 8 bits, as [`WeightFormat::Int8`]; returns the scale.
/// A value is `out[i] * scale`; the largest magnitude becomes 127.
pub fn quantize_int8(values: &[f32], out: &mut [i8]) -> f32 {
    let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = if scale > 0.0 { scale.recip() } else { 0.0 };
    let round = |x: &f32| (x * inverse).round().clamp(-127.0, 127.0) as i8;
    out.iter_mut().zip(values).for_each(|(out, x)| *out = round(x));
    scale
}

/// Weights in the storage formats of a device; see [`Caps`](crate::Caps).
pub trait PackOps {
    /// The weights `[N, K]` of a linear layer in another format, which only `linear_fwd` and downloads read.
    /// F32 is the layout that the device prefers for trained weights, and every op reads it. `None` where
    /// the device lacks the format.
    fn pack_weight(&self, w: &Tensor, format: WeightFormat) -> Result<Option<Tensor>>;
}

impl Tensor {
    /// These weights `[N, K]` in another format, as [`PackOps::pack_weight`]. Every device takes F32.
    pub fn packed(&self, format: WeightFormat) -> Result<Tensor> {
        let backend = self.device().backend();
        let packed = match backend.caps().packing {
            Some(packing) => packing.pack_weight(self, format)?,
            None => None,
        };
        match packed {
            Some(packed) => Ok(packed),
            None if format == WeightFormat::F32 => Ok(self.clone()),
            None => Err(Error::unsupported(backend.name(), "packed weights")),
        }
    }
}

/// Validates the operand of [`PackOps::pack_weight`].
pub fn check_pack_weight(backend: &dyn Backend, w: &Tensor) -> Result<()> {
    Operands::new("pack_weight", backend).matrix("weight", w).map(drop)
}
