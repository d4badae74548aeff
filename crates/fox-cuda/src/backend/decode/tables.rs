//! Where everything lies that a decode step needs: one upload.

use bytemuck::{Pod, Zeroable};
use fox_tensor::{DType, DecodeBlock, DecodeKeys, LastRows, Tensor};

use super::super::storage::memory;
use super::super::{Cuda, f32_buffer, int};
use super::shape::PARTS;
use crate::{Buffer, Result};

/// Addresses of one layer.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(super) struct Layer {
    weights: [u64; PARTS + 3],
    bias: [u64; 3],
    mixer_norm: u64,
    mlp_norm: u64,
    gate_bias: u64,
    q_norm: u64,
    k_norm: u64,
    out_norm: u64,
    k_cache: u64,
    v_cache: u64,
    gate_cache: u64,
    sequences: u64,
    new_gates: u64,
}

/// What one layer has of one sequence.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Sequence {
    last_k: u64,
    last_v: u64,
    next_k: u64,
    next_v: u64,
    pages: u64,
    dropped: u64,
}

/// Addresses that are only known when everything has a place, in one upload.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) layers: Vec<Layer>,
    sequences: Vec<Sequence>,
    pub(super) dropped: Vec<i32>,
}

impl Cuda {
    /// Notes a layer's addresses; makes room for the raw rows of this step that the next one needs.
    pub(super) fn add_layer(
        &self,
        block: &mut DecodeBlock<'_>,
        batch: usize,
        tables: &mut Tables,
    ) -> Result<LastRows> {
        let weights = |w: Option<&Tensor>| w.map_or(Ok(0), |w| self.weight_address(w));
        let real = |x: Option<&Tensor>| x.map_or(Ok(0), |x| self.real_address(x));
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
            last_k: at(&last_k, b),
            last_v: at(&last_v, b),
            next_k: at(&next_k, b),
            next_v: at(&next_v, b),
            ..Sequence::default()
        }));
        match &mut block.keys {
            DecodeKeys::Rows { k, v, gates } => {
                layer.k_cache = self.writable(k)?.write().address();
                layer.v_cache = self.writable(v)?.write().address();
                if let Some(gates) = gates.as_deref_mut() {
                    layer.gate_cache = self.writable(gates)?.write().address();
                }
            }
            DecodeKeys::Pages(sequences) => {
                for (b, pages) in sequences.iter_mut().enumerate() {
                    tables.sequences[first + b].pages =
                        self.page_table(pages, block.k.weight.device())?;
                    tables.dropped.extend(pages.heads().iter().map(|keys| int(keys.dropped())));
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
    pub(super) fn upload_tables(
        &self,
        mut tables: Tables,
        batch: usize,
        heads: usize,
        log_gates: u64,
    ) -> Result<Buffer<u8>> {
        let sequences_at = size_of_val(&tables.layers[..]);
        let dropped_at = sequences_at + size_of_val(&tables.sequences[..]);
        let all = dropped_at + size_of_val(&tables.dropped[..]);
        let buffer = self.gpu.alloc::<u8>(all)?;
        let base = buffer.address();
        let each = size_of_val(&tables.dropped[..]) / tables.sequences.len().max(1);
        for (i, sequence) in tables.sequences.iter_mut().enumerate() {
            sequence.dropped = base + (dropped_at + i * each) as u64;
        }
        for (l, layer) in tables.layers.iter_mut().enumerate() {
            layer.sequences = base + (sequences_at + l * batch * size_of::<Sequence>()) as u64;
            if log_gates != 0 {
                layer.new_gates = log_gates + (4 * l * batch * heads) as u64;
            }
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(all);
        bytes.extend_from_slice(bytemuck::cast_slice(&tables.layers));
        bytes.extend_from_slice(bytemuck::cast_slice(&tables.sequences));
        bytes.extend_from_slice(bytemuck::cast_slice(&tables.dropped));
        // SAFETY: the buffer has that many bytes.
        unsafe { self.gpu.write(base, &bytes)? };
        Ok(buffer)
    }

    /// Where the bf16 copy of weights lies; it is kept with them.
    pub(super) fn weight_address(&self, w: &Tensor) -> Result<u64> {
        Ok(self.weights(w)?.address())
    }

    /// Where f32 values lie that need no conversion: parameters.
    pub(super) fn real_address(&self, x: &Tensor) -> Result<u64> {
        Ok(f32_buffer(x)?.address())
    }
}
