//! Where the weights of a model lie, and the sizes of its steps.

use std::sync::Arc;

use fox_tensor::{DecodeBlock, DecodeShape, Segment, Segments, StreamModel, Tensor};

use super::kernels::MAX_ROWS;
use super::params::{PARTS, StreamPart};
use crate::backend::{Cuda, Precision};
use crate::{Buffer, Error, Result};

/// Columns of a step of the products.
pub(super) const STEP: usize = 32;

/// A model's sizes and addresses.
pub(super) struct StreamWeights {
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
    pub(super) head: u64,
    pub(super) embeddings: u64,
    /// `[layers][heads]`; all minus infinity where nothing is skipped.
    pub(super) thresholds: Buffer<f64>,
    pub(super) rope: Option<Arc<Buffer<f32>>>,
    /// What the addresses belong to.
    _tensors: Vec<Tensor>,
}

/// Addresses of one layer; 0 for what is absent.
pub(super) struct LayerWeights {
    /// The projections, as parts of one product.
    pub(super) parts: [StreamPart; PARTS],
    pub(super) mixer_norm: u64,
    pub(super) mlp_norm: u64,
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    pub(super) q_shared: bool,
    pub(super) k_shared: bool,
    pub(super) gate_bias: u64,
    pub(super) output_norm: u64,
    pub(super) o_proj: u64,
    pub(super) gate_up: u64,
    pub(super) down: u64,
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
    pub(super) fn has_streams(&self, model: &StreamModel<'_>) -> bool {
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

    pub(super) fn stream_weights(&self, model: &StreamModel<'_>) -> Result<StreamWeights> {
        let Some(block) = model.blocks.first() else {
            return Err(Error::argument("streams", "a model without blocks"));
        };
        let DecodeShape { heads, head_dim, .. } = model.shape;
        let (mut start, mut stride) = ([-1; PARTS], 0);
        for (start, (weight, _)) in start.iter_mut().zip(projections(block)) {
            if let Some(weight) = weight {
                *start = crate::params::int("stream_heads", "start", stride)?;
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
        Ok(StreamWeights {
            shape: model.shape,
            width: model.embeddings.cols(),
            heads_width: heads * head_dim,
            inner: block.down.cols(),
            vocab: model.head.rows(),
            stride,
            start,
            layers,
            norm: self.real_address(model.norm)?,
            head: self.weight_address(model.head)?,
            embeddings: self.weight_address(model.embeddings)?,
            thresholds: self.gpu.upload(&thresholds)?,
            rope,
            _tensors: tensors,
        })
    }

    fn layer_weights(
        &self,
        block: &DecodeBlock<'_>,
        start: &[i32; PARTS],
        tensors: &mut Vec<Tensor>,
    ) -> Result<LayerWeights> {
        let mut weights = |w: Option<&Tensor>| -> Result<u64> {
            let Some(w) = w else { return Ok(0) };
            tensors.push(w.clone());
            self.weight_address(w)
        };
        let mut parts = [StreamPart::default(); PARTS];
        for (part, ((weight, _), start)) in
            parts.iter_mut().zip(projections(block).iter().zip(start))
        {
            part.w = weights(*weight)?.into();
            part.rows = weight.map_or(0, Tensor::rows);
            part.start = usize::try_from(*start).unwrap_or(0);
        }
        let (o_proj, gate_up, down) = (
            weights(Some(block.o_proj))?,
            weights(Some(block.gate_up))?,
            weights(Some(block.down))?,
        );
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
