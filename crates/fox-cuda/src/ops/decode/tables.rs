//! Where everything lies that a decode step needs: one upload.

use fox_tensor::{DType, DecodeBlock, DecodeKeys, LastRows, Tensor};
use half::bf16;

use super::shape::PARTS;
use crate::backend::storage::memory;
use crate::backend::{Cuda, Operand, f32_buffer};
use crate::ops::paged::Page;
use crate::params::{ConstPtr, Param, Ptr, int, kernel_params, rows};
use crate::{Buffer, Error, Result};

kernel_params! {
    /// Addresses of one layer.
    #[derive(Default)]
    pub(super) table struct Layer {
        /// The parts of the projections, then output, gate and up, down.
        weights: [ConstPtr<bf16>; PARTS + 3],
        /// Of queries, keys and values, or null.
        bias: [ConstPtr<f32>; 3],
        mixer_norm: ConstPtr<f32>,
        mlp_norm: ConstPtr<f32>,
        /// `[heads]`, or null.
        gate_bias: ConstPtr<f32>,
        /// `[heads * d]` or `[d]`, or null.
        q_norm: ConstPtr<f32>,
        k_norm: ConstPtr<f32>,
        /// `[heads * d]`, or null.
        out_norm: ConstPtr<f32>,
        /// `[rows, kv_heads * d]`, where there are no pages.
        k_cache: Ptr<bf16>,
        v_cache: Ptr<bf16>,
        /// `[rows, heads]`, or null.
        gate_cache: Ptr<f32>,
        /// `[batch]`.
        sequences: ConstPtr<Sequence>,
        /// Log gates of this step `[batch, heads]`, or null.
        new_gates: Ptr<f32>,
    }
}

kernel_params! {
    /// What one layer has of one sequence.
    #[derive(Default)]
    pub(super) table struct Sequence {
        /// Raw rows of the step before `[kv_heads * d]`, or null.
        last_k: ConstPtr<bf16>,
        last_v: ConstPtr<bf16>,
        /// Raw rows of this step, or null.
        next_k: Ptr<bf16>,
        next_v: Ptr<bf16>,
        /// `[page][kv_heads]`; null for rows of the cache.
        pages: ConstPtr<Page>,
        /// Pages gone from the front `[kv_heads]`.
        dropped: ConstPtr<i32>,
    }
}

/// Addresses that are only known when everything has a place, in one upload.
#[derive(Default)]
pub(crate) struct Tables {
    pub(super) layers: Vec<Layer>,
    sequences: Vec<Sequence>,
    pub(crate) dropped: Vec<i32>,
}

impl Cuda {
    /// Adds a layer's addresses; allocates the raw rows of this step that the next one needs.
    pub(crate) fn add_layer(
        &self,
        block: &mut DecodeBlock<'_>,
        batch: usize,
        tables: &mut Tables,
    ) -> Result<LastRows> {
        let weights = |w: Option<&Tensor>| -> Result<ConstPtr<bf16>> {
            Ok(w.map_or(Ok(0), |w| self.weight_address(w))?.into())
        };
        let real = |x: Option<&Tensor>| -> Result<ConstPtr<f32>> {
            Ok(x.map_or(Ok(0), |x| self.real_address(x))?.into())
        };
        let mut layer = Layer {
            weights: [
                weights(Some(block.q.weight))?,
                weights(Some(block.k.weight))?,
                weights(Some(block.v.weight))?,
                weights(block.k.shift)?,
                weights(block.v.shift)?,
                weights(block.gate.map(|(w, _)| w))?,
                weights(block.output_gate)?,
                weights(Some(block.o_proj))?,
                weights(Some(block.gate_up))?,
                weights(Some(block.down))?,
            ],
            bias: [real(block.q.bias)?, real(block.k.bias)?, real(block.v.bias)?],
            mixer_norm: real(Some(block.mixer_norm))?,
            mlp_norm: real(Some(block.mlp_norm))?,
            gate_bias: real(block.gate.map(|(_, bias)| bias))?,
            q_norm: real(block.q.norm)?,
            k_norm: real(block.k.norm)?,
            out_norm: real(block.output_norm)?,
            ..Layer::default()
        };
        let (k, last_k, next_k) = self.next_rows(&block.k.last)?;
        let (v, last_v, next_v) = self.next_rows(&block.v.last)?;
        let at = |rows: &[u64], b: usize| rows.get(b).copied().unwrap_or(0);
        let first = tables.sequences.len();
        tables.sequences.extend((0..batch).map(|b| Sequence {
            last_k: at(&last_k, b).into(),
            last_v: at(&last_v, b).into(),
            next_k: at(&next_k, b).into(),
            next_v: at(&next_v, b).into(),
            ..Sequence::default()
        }));
        match &mut block.keys {
            DecodeKeys::Rows { k, v, gates } => {
                layer.k_cache = self.writable(k)?.write().address().into();
                layer.v_cache = self.writable(v)?.write().address().into();
                if let Some(gates) = gates.as_deref_mut() {
                    layer.gate_cache = self.writable(gates)?.write().address().into();
                }
            }
            DecodeKeys::Pages(sequences) => {
                for (b, keys) in sequences.iter_mut().enumerate() {
                    tables.sequences[first + b].pages =
                        self.page_table(&mut **keys, block.k.weight.device())?.into();
                    for head in 0..keys.shape().kv_heads {
                        let dropped = int("decode_step", "dropped pages", keys.dropped(head))?;
                        tables.dropped.push(dropped);
                    }
                }
            }
        }
        tables.layers.push(layer);
        Ok(LastRows { k, v })
    }

    /// New tensors like `last`, and where the rows of both lie.
    #[allow(clippy::type_complexity)]
    fn next_rows(&self, last: &[&Tensor]) -> Result<(Vec<Tensor>, Vec<u64>, Vec<u64>)> {
        let (mut tensors, mut from, mut to) = (Vec::new(), Vec::new(), Vec::new());
        for last in last {
            let (next, next_at) = self.output(last.shape(), DType::Bf16, last.device())?;
            let last_at = memory(last)?.data.address();
            let offsets = (0..last.rows()).map(|r| (2 * r * last.cols()) as u64);
            from.extend(offsets.clone().map(|offset| last_at + offset));
            to.extend(offsets.map(|offset| next_at + offset));
            tensors.push(next);
        }
        Ok((tensors, from, to))
    }

    /// Layers, then sequences, then the numbers of dropped pages.
    pub(crate) fn upload_tables(
        &self,
        mut tables: Tables,
        batch: usize,
        heads: usize,
        log_gates: u64,
    ) -> Result<Buffer<u8>> {
        let sequence_bytes = size_of::<<Sequence as Param>::Device>();
        let sequences_at = tables.layers.len() * size_of::<<Layer as Param>::Device>();
        let dropped_at = sequences_at + tables.sequences.len() * sequence_bytes;
        let all = dropped_at + size_of_val(&tables.dropped[..]);
        let buffer = self.gpu.alloc::<u8>(all)?;
        let base = buffer.address();
        let each = size_of_val(&tables.dropped[..]) / tables.sequences.len().max(1);
        for (i, sequence) in tables.sequences.iter_mut().enumerate() {
            sequence.dropped = (base + (dropped_at + i * each) as u64).into();
        }
        for (l, layer) in tables.layers.iter_mut().enumerate() {
            layer.sequences = (base + (sequences_at + l * batch * sequence_bytes) as u64).into();
            if log_gates != 0 {
                layer.new_gates = (log_gates + (4 * l * batch * heads) as u64).into();
            }
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(all);
        bytes.extend_from_slice(bytemuck::cast_slice(&rows("decode_step", &tables.layers)?));
        bytes.extend_from_slice(bytemuck::cast_slice(&rows("decode_step", &tables.sequences)?));
        bytes.extend_from_slice(bytemuck::cast_slice(&tables.dropped));
        // SAFETY: the buffer has that many bytes.
        unsafe { self.gpu.write(base, &bytes)? };
        Ok(buffer)
    }

    /// Where the bf16 copy of weights lies; it is kept with them. Weights in 8 bits have none.
    pub(crate) fn weight_address(&self, w: &Tensor) -> Result<u64> {
        match self.weights(w)? {
            Operand::Converted(_) => {
                Err(Error::argument("weights", "a matrix in 8 bits where bf16 is needed"))
            }
            kept => Ok(kept.address()),
        }
    }

    /// Where f32 values lie that need no conversion: parameters.
    pub(crate) fn real_address(&self, x: &Tensor) -> Result<u64> {
        Ok(f32_buffer(x)?.address())
    }
}
