//! Addresses of a model's weights on the device, and the sizes of its steps.

use std::sync::Arc;

use fox_tensor::{
    Activation, AttentionShape, DecodeAttention, DecodeBlock, DecodeMixer, DecodeWeights, PAGE,
    Segment, Segments, Tensor,
};

use super::dequantize::packed_values;
use super::kernels::MAX_ROWS;
use super::params::{DecodeMatrix, MAX_MATRICES};
use crate::backend::{Cuda, Operand, Precision, f32_buffer};
use crate::ops::packed::Int8;
use crate::{Buffer, Error, Result};

/// Columns of a step of the matmuls.
pub(super) const STEP: usize = 32;

/// A model's sizes and addresses.
pub(super) struct DeviceWeights {
    /// The shape of all attention layers.
    pub(super) shape: AttentionShape,
    /// Epsilon of the norms of the residual stream.
    pub(super) norm_eps: f32,
    pub(super) mlp_act: Activation,
    pub(super) width: usize,
    /// Query heads times head dim.
    pub(super) heads_width: usize,
    pub(super) inner: usize,
    pub(super) vocab: usize,
    /// Columns of a row of raw projections.
    pub(super) stride: usize,
    /// First column of each projection in such a row; -1 if absent.
    pub(super) start: [i32; MAX_MATRICES],
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: u64,
    pub(super) head: DecodeMatrix,
    pub(super) embeddings: u64,
    /// int8 weights of the matmul that has the most of them.
    pub(super) most_packed: usize,
    /// `[layers][heads]`; minus infinity where no page is skipped.
    pub(super) thresholds: Buffer<f64>,
    pub(super) rope: Option<Arc<Buffer<f32>>>,
    /// Keeps the memory behind the addresses alive.
    model: DecodeWeights,
}

impl DeviceWeights {
    /// The model.
    pub(super) fn model(&self) -> &DecodeWeights {
        &self.model
    }

    /// Whether the layers have forget gates.
    pub(super) fn is_gated(&self) -> bool {
        self.start[5] >= 0
    }

    /// The first page that attention of a layer may read after `len` tokens, if evicted pages are not skipped by their
    /// decay anyway.
    pub(super) fn first_read_page(&self, layer: usize, len: usize) -> Option<usize> {
        let skips_decayed = self.is_gated() && self.layers[layer].has_thresholds;
        let window = self.shape.window.map_or(0, |window| (len + 1).saturating_sub(window) / PAGE);
        (!skips_decayed).then_some(window)
    }
}

/// The matrices of a matmul with one of them.
pub(super) fn single(matrix: DecodeMatrix) -> [DecodeMatrix; MAX_MATRICES] {
    let mut matrices = [DecodeMatrix::default(); MAX_MATRICES];
    matrices[0] = matrix;
    matrices
}

/// Addresses of one layer; 0 for absent tensors.
pub(super) struct LayerWeights {
    /// The projections, which are one matmul.
    pub(super) matrices: [DecodeMatrix; MAX_MATRICES],
    pub(super) mixer_norm: u64,
    pub(super) mlp_norm: u64,
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    pub(super) q_shared: bool,
    pub(super) k_shared: bool,
    pub(super) gate_bias: u64,
    pub(super) output_norm: u64,
    pub(super) sinks: u64,
    pub(super) o_proj: DecodeMatrix,
    /// Whether decayed pages are skipped.
    pub(super) has_thresholds: bool,
    /// Its `rows` are the outputs of the GLU.
    pub(super) gate_up: DecodeMatrix,
    pub(super) down: DecodeMatrix,
}

/// The projections of a layer with their biases, in the order of [`DeviceWeights::start`].
fn projections(layer: &DecodeAttention) -> [(Option<&Tensor>, Option<&Tensor>); MAX_MATRICES] {
    let DecodeAttention { q, k, v, gate, output_gate, .. } = layer;
    [
        (Some(&q.weight), q.bias.as_ref()),
        (Some(&k.weight), k.bias.as_ref()),
        (Some(&v.weight), v.bias.as_ref()),
        (k.shift.as_ref(), None),
        (v.shift.as_ref(), None),
        (gate.as_ref().map(|(w, _)| w), None),
        (output_gate.as_ref(), None),
    ]
}

/// The attention layer of a block.
fn attention(block: &DecodeBlock) -> Option<&DecodeAttention> {
    match &block.mixer {
        DecodeMixer::Attention(attention) => Some(attention),
        _ => None,
    }
}

/// Whether all blocks have the same attention and MLP, which the kernels assume.
fn has_equal_blocks(model: &DecodeWeights) -> bool {
    let parts = |block: &DecodeBlock| {
        let layer = attention(block).filter(|a| a.v.norm.is_none() && a.q.shift.is_none())?;
        let mlp = (block.mlp.act, block.mlp.down.cols());
        Some((layer.shape, projections_present(layer), mlp))
    };
    let Some(first) = model.blocks.first().and_then(parts) else { return false };
    model.blocks.iter().all(|block| parts(block) == Some(first))
}

/// Which of the optional projections a layer has.
fn projections_present(layer: &DecodeAttention) -> [bool; MAX_MATRICES] {
    projections(layer).map(|(w, _)| w.is_some())
}

impl Cuda {
    /// Whether the model can decode in slots.
    pub(super) fn supports_slots(&self, model: &DecodeWeights) -> bool {
        let Some((layer, block)) =
            model.blocks.first().and_then(|block| Some((attention(block)?, block)))
        else {
            return false;
        };
        let AttentionShape { heads, kv_heads, head_dim, .. } = layer.shape;
        let (width, inner) = (model.embeddings.cols(), block.mlp.down.cols());
        self.precision == Precision::Bf16
            && self.gpu.generation().has_bf16_mma()
            && (1..=MAX_ROWS).contains(&model.slots)
            && matches!(head_dim, 64 | 128 | 256)
            && kv_heads > 0
            && heads.is_multiple_of(kv_heads)
            && heads / kv_heads <= 32
            && [width, inner, heads * head_dim].iter().all(|n| n.is_multiple_of(STEP))
            && has_equal_blocks(model)
    }

    /// The addresses of a model that [`Cuda::supports_slots`].
    pub(super) fn device_weights(&self, model: &DecodeWeights) -> Result<DeviceWeights> {
        let unsupported = || Error::argument("slots", "a model without attention layers");
        let first = model.blocks.first().and_then(attention).ok_or_else(unsupported)?;
        let shape = first.shape;
        let mlp = &model.blocks[0].mlp;
        let (mut start, mut stride) = ([-1; MAX_MATRICES], 0);
        for (start, (weight, _)) in start.iter_mut().zip(projections(first)) {
            if let Some(weight) = weight {
                *start = crate::params::int("decode_heads", "start", stride)?;
                stride += weight.rows();
            }
        }
        let layers = model.blocks.iter().map(|block| self.layer_weights(block, &start));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let none = vec![f64::NEG_INFINITY; shape.heads];
        let thresholds = model.blocks.iter().filter_map(attention);
        let thresholds: Vec<f64> = thresholds
            .flat_map(|layer| layer.thresholds.as_deref().unwrap_or(&none))
            .copied()
            .collect();
        let rope = match shape.rope {
            Some(rope) => {
                let all = Segment { q_start: 0, q_len: 1, k_start: 0, k_len: model.max_context };
                let segments = Segments::new(vec![all])
                    .map_err(|e| Error::argument("slots", e.to_string()))?;
                Some(self.rope_table(rope, shape.head_dim, &segments)?)
            }
            None => None,
        };
        let (width, heads_width, inner) =
            (model.embeddings.cols(), shape.heads * shape.head_dim, mlp.down.cols());
        let head = self.weight_matrix(&model.head)?;
        let packed_in = |layer: &LayerWeights| {
            packed_values(layer.matrices, width, false)
                .max(packed_values(single(layer.o_proj), heads_width, false))
                .max(packed_values(single(layer.gate_up), width, true))
                .max(packed_values(single(layer.down), inner, false))
        };
        let most_packed = layers.iter().map(packed_in).max().unwrap_or(0);
        Ok(DeviceWeights {
            shape,
            norm_eps: model.norm_eps,
            mlp_act: mlp.act,
            width,
            heads_width,
            inner,
            vocab: model.head.rows(),
            stride,
            start,
            layers,
            norm: self.real_address(&model.norm)?,
            head,
            embeddings: self.weight_address(&model.embeddings)?,
            most_packed: most_packed.max(packed_values(single(head), width, false)),
            thresholds: self.gpu.upload(&thresholds)?,
            rope,
            model: model.clone(),
        })
    }

    /// The address of the bf16 copy of weights, which lives as long as they do.
    fn weight_address(&self, w: &Tensor) -> Result<u64> {
        match self.weights(w)? {
            Operand::Converted(_) => {
                Err(Error::argument("weights", "int8 weights instead of bf16"))
            }
            stored => Ok(stored.address()),
        }
    }

    /// The address of f32 parameters.
    fn real_address(&self, x: &Tensor) -> Result<u64> {
        Ok(f32_buffer(x)?.address())
    }

    /// A matrix of a matmul, in bf16 or int8 as it is stored.
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
        block: &DecodeBlock,
        start: &[i32; MAX_MATRICES],
    ) -> Result<LayerWeights> {
        let unsupported = || Error::argument("slots", "a block without attention");
        let (layer, mlp) = (attention(block).ok_or_else(unsupported)?, &block.mlp);
        let real = |x: Option<&Tensor>| x.map_or(Ok(0), |x| self.real_address(x));
        let mut matrices = [DecodeMatrix::default(); MAX_MATRICES];
        for (matrix, ((weight, bias), start)) in
            matrices.iter_mut().zip(projections(layer).into_iter().zip(start))
        {
            if let Some(weight) = weight {
                *matrix = self.weight_matrix(weight)?;
            }
            matrix.start = usize::try_from(*start).unwrap_or(0);
            matrix.bias = real(bias)?.into();
        }
        let both = self.weight_matrix(&mlp.gate_up)?;
        let (q, k) = (&layer.q, &layer.k);
        let shared = |w: Option<&Tensor>, rows: usize| w.is_some_and(|w| w.len() < rows);
        Ok(LayerWeights {
            matrices,
            mixer_norm: self.real_address(&block.mixer_norm)?,
            mlp_norm: self.real_address(&mlp.norm)?,
            q_norm: real(q.norm.as_ref())?,
            k_norm: real(k.norm.as_ref())?,
            q_shared: shared(q.norm.as_ref(), q.weight.rows()),
            k_shared: shared(k.norm.as_ref(), k.weight.rows()),
            gate_bias: real(layer.gate.as_ref().map(|(_, bias)| bias))?,
            output_norm: real(layer.output_norm.as_ref())?,
            sinks: real(layer.sinks.as_ref())?,
            has_thresholds: layer.thresholds.is_some(),
            o_proj: self.weight_matrix(&layer.o_proj)?,
            gate_up: DecodeMatrix { rows: both.rows / 2, ..both },
            down: self.weight_matrix(&mlp.down)?,
        })
    }
}
