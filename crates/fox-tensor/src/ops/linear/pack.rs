//! Weights kept in another format: an optional ability of a device.

use crate::{Error, Result, Tensor};

/// How a weight matrix is kept for inference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// As it is.
    #[default]
    F32,
    /// Rounded to bfloat16: half the memory, and half the time where memory is the limit.
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

/// Weights in the formats that a device likes; see [`Caps`](crate::Caps).
pub trait PackOps {
    /// The weights `[N, K]` of linear layers in another format: for `linear_fwd` and downloads alone,
    /// but in F32 for everything, kept as the device likes it best. `None` where the device lacks the
    /// format.
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
            None => Err(Error::unsupported(backend.name(), "weights in fewer bits")),
        }
    }
}
