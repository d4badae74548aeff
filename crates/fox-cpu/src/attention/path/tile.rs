//! The walk of one query block, forward.

use fox_tensor::{PATH_BLOCK, Result};

use super::block::{Block, Blocks, keep_visible, scale_rows};
use super::softmax::{Statistics, Tile, soften};
use super::{Head, Path, Queries};
use crate::attention::call::Unit;
use crate::linear::{Matrix, multiply_here};
use crate::pool::Buffer;
use crate::shared::Shared;

/// Queries at the start of their block, and their scores inside it.
pub struct Start {
    /// `tril(Q U^T)` and `R`, `[count, n]` each.
    pub along: Buffer,
    pub r: Buffer,
    /// `Q K^T - R N`, `[count, n]`; those of hidden keys are not 0.
    pub scores: Buffer,
    /// `[count, d]`.
    pub x: Buffer,
}

impl Start {
    /// Computes them for the queries of one head.
    pub fn new(
        path: &Path<'_>,
        unit: &Unit,
        block: &Block,
        head: usize,
        queries: &Queries,
    ) -> Result<Self> {
        let (d, pool, n, m) = (path.head_dim(), path.call.pool, block.n, queries.count);
        let q = path.query_rows(path.call.q, head, queries);
        let (k, u) =
            (path.rows(path.call.k, unit, queries.own), path.rows(path.u, unit, queries.own));
        let (mut along, mut r) = (pool.take(m * n)?, pool.take(m * n)?);
        let (mut scores, mut x) = (pool.take(m * n)?, pool.take(m * d)?);
        multiply_here(1.0, q, u.t(), &mut along, n, false);
        keep_visible(&mut along, n, queries.lane());
        multiply_here(1.0, Matrix::new(&along, m, n), block.t(), &mut r, n, false);
        let rows = Matrix::new(&r, m, n);
        multiply_here(1.0, q, k.t(), &mut scores, n, false);
        multiply_here(-1.0, rows, block.n_keys(), &mut scores, n, true);
        q.copy_to(&mut x);
        multiply_here(-1.0, rows, u, &mut x, d, true);
        Ok(Start { along, r, scores, x })
    }
}

/// One step of the walk: `next = x - (x U^T) (T U)`, all `[m, d]`; `y` is scratch `[m, n]`.
pub fn step(x: &[f32], u: Matrix<'_>, block: &Block, y: &mut [f32], next: &mut [f32], d: usize) {
    let (m, n) = (x.len() / d, block.n);
    multiply_here(1.0, Matrix::new(x, m, d), u.t(), y, n, false);
    next.copy_from_slice(x);
    multiply_here(-1.0, Matrix::new(&y[..m * n], m, n), block.tu(), next, d, true);
}

/// Writes output and statistics of the queries of `head` in block `own`.
pub fn forward(
    path: &Path<'_>,
    unit: &Unit,
    blocks: &Blocks,
    (head, own): (&Head, usize),
    o: Shared<'_>,
    lse: Shared<'_>,
) -> Result<()> {
    let (d, level, pool, spec) = (path.head_dim(), path.call.level, path.call.pool, path.call.spec);
    let (queries, block) = (path.queries(unit, own), blocks.get(own));
    let m = queries.count;
    let mut start = Start::new(path, unit, block, head.head, &queries)?;
    let mut out = pool.take(m * d)?;
    let (mut next, mut y) = (pool.take(m * d)?, pool.take(m * PATH_BLOCK)?);
    let mut scores = pool.take(m * PATH_BLOCK)?;
    let (mut rows, mut factors) = (Statistics::new(), [0.0; PATH_BLOCK]);
    let mut tile = Tile {
        count: m,
        n: block.n,
        position: queries.position,
        key: own * PATH_BLOCK,
        scale: spec.scale,
        prefix: head.prefix.as_ref(),
    };
    soften(level, tile, &mut start.scores, &mut rows, &mut factors);
    let v = path.rows(path.call.v, unit, own);
    multiply_here(1.0, Matrix::new(&start.scores, m, block.n), v, &mut out, d, false);
    let x = &mut start.x;
    let first = head.first[own - path.first_query_block(unit)];
    for older in (first..own).rev() {
        let block = blocks.get(older);
        multiply_here(1.0, Matrix::new(x, m, d), block.kh().t(), &mut scores, PATH_BLOCK, false);
        (tile.n, tile.key) = (PATH_BLOCK, older * PATH_BLOCK);
        soften(level, tile, &mut scores, &mut rows, &mut factors);
        scale_rows(level, &factors[..m], &mut out, d);
        let v = path.rows(path.call.v, unit, older);
        multiply_here(1.0, Matrix::new(&scores, m, PATH_BLOCK), v, &mut out, d, true);
        if older > first {
            step(x, path.rows(path.u, unit, older), block, &mut y, &mut next, d);
            std::mem::swap(x, &mut next);
        }
    }
    for (r, row) in out.chunks_exact(d).enumerate() {
        let at = (queries.row + r) * spec.heads + head.head;
        // SAFETY: this task alone writes this row's columns of this head.
        let (o, lse) = unsafe { (o.slice(at * d, d), lse.slice(at, 1)) };
        let inverse = 1.0 / rows.sums[r];
        o.iter_mut().zip(row).for_each(|(o, x)| *o = x * inverse);
        lse[0] = rows.maxima[r] + rows.sums[r].ln();
    }
    Ok(())
}
