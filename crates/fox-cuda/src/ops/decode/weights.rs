//! Where the weights of a model lie, and the sizes of its steps.

use std::sync::Arc;

use fox_tensor::{DecodeBlock, DecodeShape, Segment, Segments, DecodeWeights, Tensor};

use super::kernels::MAX_ROWS;
use super::params::{PARTS, DecodeMatrix};
use super::unpack::packed_values;
use crate::backend::{Cuda, Precision};
use crate::ops::packed::Int8;
use crate::{Buffer, Error, Result};

/// Columns of a step of the products.
pub(super) const STEP: usize = 32;

/// A model's sizes and addresses.
pub(super) struct DeviceWeights {
    pub(super) shape: DecodeShape,
    pub(super) width: usize,
    /// Width of the heads of queries together.
    pub(super) heads_width: usize,
    pub(super) inner: usize,
    pub(super) vocab: usize,
    /// Columns of a row of raw projections, and where each of them begins; -1 for what is absent.
    pub(super) stride: usize,
    pub(super) start: [i32; PARTS],
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: u64,
    pub(super) head: DecodeMatrix,
    pub(super) embeddings: u64,
    /// Weights in 8 bits of the product that has the most of them.
    pub(super) most_packed: usize,
    /// `[layers][heads]`; all minus infinity where nothing is skipped.
    pub(super) thresholds: Buffer<f64>,
    pub(super) rope: Option<Arc<Buffer<f32>>>,
    /// What the addresses belong to.
    _tensors: Vec<Tensor>,
}

/// A product of one matrix.
pub(super) fn single(matrix: DecodeMatrix) -> [DecodeMatrix; PARTS] {
    let mut parts = [DecodeMatrix::default(); PARTS];
    parts[0] = matrix;
    parts
}

/// Addresses of one layer; 0 for what is absent.
pub(super) struct LayerWeights {
    /// The projections, as parts of one product.
    pub(super) parts: [DecodeMatrix; PARTS],
    pub(super) mixer_norm: u64,
    pub(super) mlp_norm: u64,
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    pub(super) q_shared: bool,
    pub(super) k_shared: bool,
    pub(super) gate_bias: u64,
    pub(super) output_norm: u64,
    pub(super) o_proj: DecodeMatrix,
    /// With as many rows as results.
    pub(super) gate_up: DecodeMatrix,
    pub(super) down: DecodeMatrix,
}

/// The projections of a block in the order of the parts, with their biases.
fn projections<'a>(block: &DecodeBlock<'a>) -> [(Option<&'a Tensor>, Option<&'a Tensor>); PARTS] {
    [
        (Some(block.q.weight), block.q.bias),
        (Some(block.k.weight), block.k.bias),
        (Some(block.v.weight), block.v.bias),
        (block.k.shift, None),
        (block.v.shift, None),
        (block.gate.map(|(w, _)| w), None),
        (block.output_gate, None),
    ]
}

impl Cuda {
    /// Whether steps of this model can run over slots.
    pub(super) fn supports_slots(&self, model: &DecodeWeights<'_>) -> bool {
        let Some(block) = model.blocks.first() else { return false };
        let DecodeShape { heads, kv_heads, head_dim, .. } = model.shape;
        let (width, inner) = (model.embeddings.cols(), block.down.cols());
        self.precision == Precision::Bf16
            && self.gpu.architecture().major >= 8
            && (1..=MAX_ROWS).contains(&model.slots)
            && matches!(head_dim, 64 | 128 | 256)
            && heads.is_multiple_of(kv_heads)
            && heads / kv_heads <= 32
            && [width, inner, heads * head_dim].iter().all(|n| n.is_multiple_of(STEP))
    }

    pub(super) fn device_weights(&self, model: &DecodeWeights<'_>) -> Result<DeviceWeights> {
        let Some(block) = model.blocks.first() else {
            return Err(Error::argument("streams", "a model without blocks"));
        };
        let DecodeShape { heads, head_dim, .. } = model.shape;
        let (mut start, mut stride) = ([-1; PARTS], 0);
        for (start, (weight, _)) in start.iter_mut().zip(projections(block)) {
            if let Some(weight) = weight {
                *start = crate::params::int("decode_heads", "start", stride)?;
                stride += weight.rows();
            }
        }
        let mut tensors = vec![model.embeddings.clone(), model.norm.clone(), model.head.clone()];
        let layers =
            model.blocks.iter().map(|block| self.layer_weights(block, &start, &mut tensors));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let none = vec![f64::NEG_INFINITY; heads];
        let thresholds = model.thresholds.iter().flat_map(|own| own.as_deref().unwrap_or(&none));
        let thresholds: Vec<f64> = thresholds.copied().collect();
        let rope = match model.shape.rope {
            Some(rope) => {
                let whole = Segment { q_start: 0, q_len: 1, k_start: 0, k_len: model.max_context };
                let segments = Segments::new(vec![whole])
                    .map_err(|e| Error::argument("streams", e.to_string()))?;
                Some(self.rope_table(rope, head_dim, &segments)?)
            }
            None => None,
        };
        let (width, heads_width, inner) =
            (model.embeddings.cols(), heads * head_dim, block.down.cols());
        let head = self.weight_matrix(model.head)?;
        let packed_in = |layer: &LayerWeights| {
            packed_values(layer.parts, width, false)
                .max(packed_values(single(layer.o_proj), heads_width, false))
                .max(packed_values(single(layer.gate_up), width, true))
                .max(packed_values(single(layer.down), inner, false))
        };
        let most_packed = layers.iter().map(packed_in).max().unwrap_or(0);
        Ok(DeviceWeights {
            shape: model.shape,
            width,
            heads_width,
            inner,
            vocab: model.head.rows(),
            stride,
            start,
            layers,
            norm: self.real_address(model.norm)?,
            head,
            embeddings: self.weight_address(model.embeddings)?,
            most_packed: most_packed.max(packed_values(single(head), width, false)),
            thresholds: self.gpu.upload(&thresholds)?,
            rope,
            _tensors: tensors,
        })
    }

    /// A matrix of a product, as it lies.
    pub(super) fn weight_matrix(&self, w: &Tensor) -> Result<DecodeMatrix> {
        let (at, scales) = match Int8::of(w)? {
            Some(own) => (own.values.address(), own.scales.address()),
            None => (self.weight_address(w)?, 0),
        };
        let (w, rows) = (at.into(), w.rows());
        Ok(DecodeMatrix { w, scales: scales.into(), rows, ..DecodeMatrix::default() })
    }

    fn layer_weights(
        &self,
        block: &DecodeBlock<'_>,
        start: &[i32; PARTS],
        tensors: &mut Vec<Tensor>,
    ) -> Result<LayerWeights> {
        let mut weights = |w: &Tensor| -> Result<DecodeMatrix> {
            tensors.push(w.clone());
            self.weight_matrix(w)
        };
        let mut parts = [DecodeMatrix::default(); PARTS];
        for (part, ((weight, _), start)) in
            parts.iter_mut().zip(projections(block).iter().zip(start))
        {
            *part = weight.map_or(Ok(DecodeMatrix::default()), &mut weights)?;
            part.start = usize::try_from(*start).unwrap_or(0);
        }
        let (o_proj, both, down) =
            (weights(block.o_proj)?, weights(block.gate_up)?, weights(block.down)?);
        let gate_up = DecodeMatrix { rows: both.rows / 2, ..both };
        let mut real = |x: Option<&Tensor>| -> Result<u64> {
            let Some(x) = x else { return Ok(0) };
            tensors.push(x.clone());
            self.real_address(x)
        };
        for (part, (_, bias)) in parts.iter_mut().zip(projections(block)) {
            part.bias = real(bias)?.into();
        }
        let shared = |w: Option<&Tensor>, rows: usize| w.is_some_and(|w| w.len() < rows);
        Ok(LayerWeights {
            parts,
            mixer_norm: real(Some(block.mixer_norm))?,
            mlp_norm: real(Some(block.mlp_norm))?,
            q_norm: real(block.q.norm)?,
            k_norm: real(block.k.norm)?,
            q_shared: shared(block.q.norm, block.q.weight.rows()),
            k_shared: shared(block.k.norm, block.k.weight.rows()),
            gate_bias: real(block.gate.map(|(_, bias)| bias))?,
            output_norm: real(block.output_norm)?,
            o_proj,
            gate_up,
            down,
        })
    }
}
