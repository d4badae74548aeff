//! PaTH attention by blocks of keys: reflections of a block are applied together, never a `T x T` matrix.
//!
//! With the reflections `U`, keys `K` and queries `Q` of a block as rows,
//!
//! ```text
//! T  = (I + tril(U U^T, -1))^-1        N = tril(U K^T, -1)
//! kh = K - (T N)^T U                   keys as they are at the end of the block
//! R  = tril(Q U^T) T                   S = tril(Q K^T - R N), scores inside the block
//! x  = Q - R U                         queries at the start of their block
//! x <- x - (x U^T) (T U)               one step of the walk, over an older block with scores x kh^T
//! ```
//!
//! A query block walks from its own block to the oldest one that it has not forgotten. Reflections can be singular and
//! are never inverted: the backward pass keeps the queries of one tile at every block, and walks from old to new.
//!
//! Query blocks are independent. In the backward pass they are distributed over a fixed number of accumulators, which
//! are added in order at the end, so results are bit-exact for any number of threads.

mod backward;
mod block;
mod decode;
mod softmax;
mod tile;

use std::ops::Range;

use fox_tensor::{
    AttentionOut, AttentionSpec, PATH_BLOCK, PathGrads, PathInputs, PathOps, Result, Tensor,
    check_path_attention_bwd, check_path_attention_fwd,
};
use rayon::prelude::*;

use super::call::{Attention, Unit};
use super::visits::Prefix;
use super::{Counts, MANY_UNITS, count_tiles, run_all, start_gradients, start_output};
use crate::Cpu;
use crate::linear::Matrix;
use crate::shared::Shared;
use block::Blocks;

impl PathOps for Cpu {
    fn path_attention_fwd(
        &self,
        inputs: &PathInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        check_path_attention_fwd(self, inputs, spec)?;
        self.run(|| forward(self, inputs, spec))
    }

    fn path_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &PathInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<PathGrads> {
        check_path_attention_bwd(self, d_out, inputs, out, spec)?;
        let mut du = self.pool().zeros(inputs.u.len())?;
        let grads = self.run(|| {
            let call = Path {
                call: Attention::new(self, &inputs.attention(), spec),
                u: self.real(inputs.u),
            };
            let given = backward::Given {
                d_out: self.real(d_out),
                o: self.real(&out.o),
                lse: self.real(&out.lse),
            };
            let du = Shared::new(&mut du);
            start_gradients(self, &inputs.attention(), |out| {
                let units = call.call.units();
                let parallel = units.len() >= MANY_UNITS;
                run_all(&units, parallel, |unit| {
                    backward::unit(&call, unit, &given, (out, du), !parallel)
                })
            })
        })?;
        Ok(PathGrads {
            dq: grads.dq,
            dk: grads.dk,
            dv: grads.dv,
            du: self.tensor(du, inputs.u.shape(), inputs.u.device()),
            dlog_gates: grads.dlog_gates,
        })
    }
}

/// Operands of a call.
struct Path<'a> {
    call: Attention<'a>,
    u: &'a [f32],
}

/// One query head of a unit.
struct Head {
    head: usize,
    prefix: Option<Prefix>,
    /// Per query block, from [`Path::first_query_block`] on, the first key block that it visits.
    first: Vec<usize>,
}

/// The queries of one head at the positions of one block.
struct Queries {
    /// The block.
    own: usize,
    /// The first row, and number of queries.
    row: usize,
    count: usize,
    /// Position of the first query.
    position: usize,
}

impl Queries {
    /// Position of the first query in its block.
    fn lane(&self) -> usize {
        self.position - self.own * PATH_BLOCK
    }
}

impl<'a> Path<'a> {
    fn head_dim(&self) -> usize {
        self.call.spec.head_dim
    }

    fn first_query_block(&self, unit: &Unit) -> usize {
        unit.segment.offset() / PATH_BLOCK
    }

    fn key_blocks(&self, unit: &Unit) -> usize {
        unit.segment.k_len.div_ceil(PATH_BLOCK)
    }

    fn queries(&self, unit: &Unit, own: usize) -> Queries {
        let (segment, offset) = (&unit.segment, unit.segment.offset());
        let position = (own * PATH_BLOCK).max(offset);
        let end = ((own + 1) * PATH_BLOCK).min(segment.k_len);
        let row = segment.q_start + position - offset;
        Queries { own, row, count: end - position, position }
    }

    /// Rows of keys, values or reflections of a block, `[n, d]`.
    fn rows<'x>(&self, x: &'x [f32], unit: &Unit, block: usize) -> Matrix<'x> {
        let (d, width) = (self.head_dim(), self.call.spec.kv_heads * self.head_dim());
        let first = block * PATH_BLOCK;
        let n = PATH_BLOCK.min(unit.segment.k_len - first);
        let start = (unit.segment.k_start + first) * width + unit.kv_head * d;
        Matrix::strided(&x[start..], n, d, width)
    }

    /// Rows of queries, outputs or their gradients, `[count, d]`.
    fn query_rows<'x>(&self, x: &'x [f32], head: usize, queries: &Queries) -> Matrix<'x> {
        let (d, width) = (self.head_dim(), self.call.spec.heads * self.head_dim());
        Matrix::strided(&x[queries.row * width + head * d..], queries.count, d, width)
    }

    fn heads(&self, unit: &Unit) -> Result<Vec<Head>> {
        self.call.query_heads(unit).map(|head| self.head(unit, head)).collect()
    }

    fn head(&self, unit: &Unit, head: usize) -> Result<Head> {
        let prefix = self.call.prefix(unit, head)?;
        let threshold = prefix.as_ref().and_then(|_| self.call.threshold(unit, head));
        let mut block = 0;
        let first = |own: usize| {
            if let (Some(c), Some(threshold)) = (&prefix, threshold) {
                let query = self.queries(unit, own).position;
                // Sums of gates never increase, so the first visited block never moves back.
                let decay = |block: usize| c.at(query) - c.at((block + 1) * PATH_BLOCK - 1);
                while block < own && decay(block) < threshold {
                    block += 1;
                }
            }
            block
        };
        let first = self.query_blocks(unit).map(first).collect();
        Ok(Head { head, prefix, first })
    }

    fn query_blocks(&self, unit: &Unit) -> Range<usize> {
        self.first_query_block(unit)..self.key_blocks(unit)
    }
}

impl Head {
    /// Visited and total tiles; `from` is the first query block.
    fn counts(&self, from: usize) -> Counts {
        let of = |(n, first): (usize, &usize)| (from + n + 1 - first, from + n + 1);
        let counts = self.first.iter().enumerate().map(of);
        let (visited, total) = counts.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (self.head, visited, total)
    }
}

fn forward(cpu: &Cpu, inputs: &PathInputs<'_>, spec: &AttentionSpec) -> Result<AttentionOut> {
    let path = Path { call: Attention::new(cpu, &inputs.attention(), spec), u: cpu.real(inputs.u) };
    start_output(cpu, &inputs.attention(), spec, |o, lse| {
        let units = path.call.units();
        let parallel = units.len() >= MANY_UNITS;
        let run = |unit: &Unit| forward_unit(&path, unit, o, lse, !parallel);
        count_tiles(&units, parallel, spec.heads, run)
    })
}

fn forward_unit(
    path: &Path<'_>,
    unit: &Unit,
    o: Shared<'_>,
    lse: Shared<'_>,
    parallel: bool,
) -> Result<Vec<Counts>> {
    let (heads, from) = (path.heads(unit)?, path.first_query_block(unit));
    if path.call.is_decode(&unit.segment) {
        let queries: Vec<(usize, usize)> =
            (0..heads.len()).flat_map(|h| (0..unit.segment.q_len).map(move |t| (h, t))).collect();
        run_all(&queries, parallel, |&(h, t)| decode::query(path, unit, &heads[h], t, o, lse))?;
    } else {
        let oldest = heads.iter().flat_map(|head| &head.first).min().copied().unwrap_or(0);
        let blocks = Blocks::new(path, unit, oldest, parallel)?;
        let tiles: Vec<(usize, usize)> = (0..heads.len())
            .flat_map(|h| path.query_blocks(unit).rev().map(move |own| (h, own)))
            .collect();
        run_all(&tiles, parallel, |&(h, own)| {
            tile::forward(path, unit, &blocks, (&heads[h], own), o, lse)
        })?;
    }
    Ok(heads.iter().map(|head| head.counts(from)).collect())
}

/// Runs `f` for every item, in parallel or one after the other, and collects.
fn collect_all<T: Send>(
    count: usize,
    parallel: bool,
    f: impl Fn(usize) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    match parallel {
        true => (0..count).into_par_iter().map(f).collect(),
        false => (0..count).map(f).collect(),
    }
}
