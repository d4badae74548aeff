//! The backward pass: the walk again, from the oldest visited block to the newest.

use fox_tensor::{PATH_BLOCK, Result};

use super::block::{BlockGrads, Blocks, keep_visible};
use super::softmax::{RowGrads, Tile, gradients, row_dots};
use super::tile::{Start, step};
use super::{Head, Path, Queries, collect_all};
use crate::attention::call::Unit;
use crate::attention::{Outputs, run_all};
use crate::linear::{Matrix, multiply_here};
use crate::pool::Buffer;
use crate::shared::Shared;

/// Accumulators of a unit that runs on all cores.
const ACCUMULATORS: usize = 8;

/// Output, its gradient, and statistics of the forward pass.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    pub d_out: &'a [f32],
    pub o: &'a [f32],
    pub lse: &'a [f32],
}

/// Gradients that queries of several blocks add to.
struct Sums {
    /// `[blocks][64, d]`.
    dkh: Buffer,
    dv: Buffer,
    /// Of the products of reflections `[blocks][d, d]`.
    dproduct: Buffer,
    /// Column sums of the gradients of scores `[heads][blocks][64]`.
    columns: Buffer,
}

/// Gradients that only queries of one block add to.
#[derive(Clone, Copy)]
struct OwnGrads<'a> {
    /// Of `T` and `N`, `[blocks][64, 64]`.
    dt: Shared<'a>,
    dn: Shared<'a>,
    /// Of keys and reflections `[blocks][64, d]`.
    dk: Shared<'a>,
    du: Shared<'a>,
    /// Row sums of the gradients of scores `[heads][q_len]`.
    rows: Shared<'a>,
}

pub fn unit(
    path: &Path<'_>,
    unit: &Unit,
    given: &Given<'_>,
    (out, du_out): (&Outputs<'_>, Shared<'_>),
    parallel: bool,
) -> Result<()> {
    let (d, pool, heads) = (path.head_dim(), path.call.pool, path.heads(unit)?);
    let count = path.key_blocks(unit);
    let blocks = Blocks::new(path, unit, 0, parallel)?;
    let (values, squares) = (count * PATH_BLOCK * d, count * PATH_BLOCK * PATH_BLOCK);
    let (mut dt, mut dn) = (pool.zeros(squares)?, pool.zeros(squares)?);
    let (mut dk, mut du) = (pool.zeros(values)?, pool.zeros(values)?);
    let mut row_sums = pool.zeros(heads.len() * unit.segment.q_len)?;
    let own = OwnGrads {
        dt: Shared::new(&mut dt),
        dn: Shared::new(&mut dn),
        dk: Shared::new(&mut dk),
        du: Shared::new(&mut du),
        rows: Shared::new(&mut row_sums),
    };
    let accumulators = if parallel { ACCUMULATORS } else { 1 };
    let sums = collect_all(accumulators, parallel, |n| {
        let mut sums = Sums {
            dkh: pool.zeros(values)?,
            dv: pool.zeros(values)?,
            dproduct: pool.zeros(count * d * d)?,
            columns: pool.zeros(heads.len() * count * PATH_BLOCK)?,
        };
        for block in path.query_blocks(unit).filter(|block| block % accumulators == n) {
            for (h, head) in heads.iter().enumerate() {
                let tile = QueryTile { path, unit, blocks: &blocks, head, h, given };
                tile.backward(path.queries(unit, block), &mut sums, own, out.dq)?;
            }
        }
        Ok(sums)
    })?;
    let items: Vec<usize> = (0..count).collect();
    run_all(&items, parallel, |&index| {
        let n = blocks.get(index).n;
        let add = |f: fn(&Sums) -> &Buffer, len: usize| -> Result<Buffer> {
            let mut sum = pool.zeros(len)?;
            for part in &sums {
                let part = &f(part)[index * len..][..len];
                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
            Ok(sum)
        };
        let (rows, square) = (index * PATH_BLOCK * d, index * PATH_BLOCK * PATH_BLOCK);
        let dkh = add(|sums| &sums.dkh, PATH_BLOCK * d)?;
        let dv = add(|sums| &sums.dv, PATH_BLOCK * d)?;
        let dproduct = add(|sums| &sums.dproduct, d * d)?;
        // SAFETY: this task alone uses the gradients of this block.
        let mut grads = unsafe {
            BlockGrads {
                dt: own.dt.slice(square, n * n),
                dn: own.dn.slice(square, n * n),
                dkh: &dkh[..n * d],
                dproduct: &dproduct,
                dk: own.dk.slice(rows, n * d),
                du: own.du.slice(rows, n * d),
            }
        };
        let operands = (path.rows(path.call.k, unit, index), path.rows(path.u, unit, index));
        blocks.get(index).backward(operands, &mut grads, pool)?;
        for (from, to) in [(&*grads.dk, out.dk), (&*grads.du, du_out), (&dv[..n * d], out.dv)] {
            scatter(path, unit, index, from, to);
        }
        Ok(())
    })?;
    if let Some(gates) = out.dgates {
        for (h, head) in heads.iter().enumerate() {
            scatter_gates(path, unit, (h, head), &sums, &row_sums, gates);
        }
    }
    Ok(())
}

/// Writes rows `[n, d]` of a block to their place in `[R, H_kv * d]`.
fn scatter(path: &Path<'_>, unit: &Unit, block: usize, from: &[f32], to: Shared<'_>) {
    let (d, width) = (path.head_dim(), path.call.spec.kv_heads * path.head_dim());
    let first = unit.segment.k_start + block * PATH_BLOCK;
    for (r, row) in from.chunks_exact(d).enumerate() {
        // SAFETY: this task alone writes these columns of the block's rows.
        unsafe { to.slice((first + r) * width + unit.kv_head * d, d) }.copy_from_slice(row);
    }
}

/// A gate is part of every later sum: its gradient is the sum of theirs.
fn scatter_gates(
    path: &Path<'_>,
    unit: &Unit,
    (h, head): (usize, &Head),
    sums: &[Sums],
    rows: &[f32],
    gates: Shared<'_>,
) {
    let (segment, heads) = (&unit.segment, path.call.spec.heads);
    let keys = path.key_blocks(unit) * PATH_BLOCK;
    let mut sum = 0.0f64;
    for j in (0..segment.k_len).rev() {
        if j >= segment.offset() {
            sum += rows[h * segment.q_len + j - segment.offset()] as f64;
        }
        for part in sums {
            sum -= part.columns[h * keys + j] as f64;
        }
        // SAFETY: this task alone writes this head's column of the segment's rows.
        unsafe { gates.slice((segment.k_start + j) * heads + head.head, 1)[0] = sum as f32 };
    }
}

/// The query blocks of one head.
struct QueryTile<'a> {
    path: &'a Path<'a>,
    unit: &'a Unit,
    blocks: &'a Blocks,
    head: &'a Head,
    /// Number of the head in its group.
    h: usize,
    given: &'a Given<'a>,
}

impl QueryTile<'_> {
    fn backward(
        &self,
        queries: Queries,
        sums: &mut Sums,
        own_grads: OwnGrads<'_>,
        dq: Shared<'_>,
    ) -> Result<()> {
        let (path, unit, d, m) = (self.path, self.unit, self.path.head_dim(), queries.count);
        let (pool, level, spec) = (path.call.pool, path.call.level, path.call.spec);
        let (own, head, block) = (queries.own, self.head.head, self.blocks.get(queries.own));
        let first = self.head.first[own - path.first_query_block(unit)];
        let mut start = Start::new(path, unit, block, head, &queries)?;
        // Queries as they meet each older block, from `first` on.
        let older = own - first;
        let (mut xs, mut y) = (pool.take(older * m * d)?, pool.take(m * PATH_BLOCK)?);
        if older > 0 {
            xs[(older - 1) * m * d..].copy_from_slice(&start.x);
        }
        for n in (1..older).rev() {
            let (next, x) = xs.split_at_mut(n * m * d);
            let (u, block) = (path.rows(path.u, unit, first + n), self.blocks.get(first + n));
            step(&x[..m * d], u, block, &mut y, &mut next[(n - 1) * m * d..], d);
        }
        let width = spec.heads * d;
        let from = queries.row * width + head * d;
        let d_out = path.query_rows(self.given.d_out, head, &queries);
        let (mut delta, mut lse) = ([0.0; PATH_BLOCK], [0.0; PATH_BLOCK]);
        row_dots(
            level,
            &self.given.d_out[from..],
            &self.given.o[from..],
            width,
            d,
            &mut delta[..m],
        );
        for (r, lse) in lse[..m].iter_mut().enumerate() {
            *lse = self.given.lse[(queries.row + r) * spec.heads + head];
        }
        let rows = RowGrads { lse: &lse[..m], delta: &delta[..m] };
        // SAFETY: this task alone adds to the row sums of these queries.
        let row_sums = unsafe {
            let first = self.h * unit.segment.q_len + queries.row - unit.segment.q_start;
            own_grads.rows.slice(first, m)
        };
        let keys = path.key_blocks(unit) * PATH_BLOCK;
        let mut tile = Tile {
            count: m,
            n: PATH_BLOCK,
            position: queries.position,
            key: 0,
            scale: spec.scale,
            prefix: self.head.prefix.as_ref(),
        };
        let (mut p, mut g) = (pool.take(m * PATH_BLOCK)?, pool.take(m * PATH_BLOCK)?);
        let (mut dx, mut next) = (pool.zeros(m * d)?, pool.take(m * d)?);
        for n in 0..older {
            let (index, x) = (first + n, Matrix::new(&xs[n * m * d..][..m * d], m, d));
            let block = self.blocks.get(index);
            let (u, v) = (path.rows(path.u, unit, index), path.rows(path.call.v, unit, index));
            multiply_here(1.0, x, block.kh().t(), &mut p, PATH_BLOCK, false);
            multiply_here(1.0, d_out, v.t(), &mut g, PATH_BLOCK, false);
            tile.key = index * PATH_BLOCK;
            let columns = &mut sums.columns[self.h * keys + tile.key..][..PATH_BLOCK];
            gradients(level, tile, rows, &mut p, &mut g, row_sums, columns);
            let (p, g) = (Matrix::new(&p, m, PATH_BLOCK), Matrix::new(&g, m, PATH_BLOCK));
            let at = index * PATH_BLOCK * d;
            multiply_here(1.0, p.t(), d_out, &mut sums.dv[at..], d, true);
            multiply_here(1.0, g.t(), x, &mut sums.dkh[at..], d, true);
            multiply_here(1.0, g, block.kh(), &mut next, d, false);
            if n > 0 {
                let older = Matrix::new(&dx, m, d);
                multiply_here(1.0, x.t(), older, &mut sums.dproduct[index * d * d..], d, true);
                older.add_to(&mut next);
                multiply_here(1.0, older, block.tu().t(), &mut y, PATH_BLOCK, false);
                multiply_here(-1.0, Matrix::new(&y, m, PATH_BLOCK), u, &mut next, d, true);
            }
            std::mem::swap(&mut dx, &mut next);
        }
        let n = block.n;
        (tile.n, tile.key) = (n, own * PATH_BLOCK);
        let (k, u, v) = (
            path.rows(path.call.k, unit, own),
            path.rows(path.u, unit, own),
            path.rows(path.call.v, unit, own),
        );
        let g = &mut g[..m * n];
        multiply_here(1.0, d_out, v.t(), g, n, false);
        let columns = &mut sums.columns[self.h * keys + tile.key..][..PATH_BLOCK];
        gradients(level, tile, rows, &mut start.scores, g, row_sums, columns);
        let weights = Matrix::new(&start.scores, m, n);
        multiply_here(1.0, weights.t(), d_out, &mut sums.dv[own * PATH_BLOCK * d..], d, true);
        // SAFETY: only queries of this block use these gradients, and they are in the same task.
        let (dt, dn, dk, du) = unsafe {
            let (square, rows) = (own * PATH_BLOCK * PATH_BLOCK, own * PATH_BLOCK * d);
            (
                own_grads.dt.slice(square, n * n),
                own_grads.dn.slice(square, n * n),
                own_grads.dk.slice(rows, n * d),
                own_grads.du.slice(rows, n * d),
            )
        };
        let (g, q) = (Matrix::new(g, m, n), path.query_rows(path.call.q, head, &queries));
        let (along, r) = (Matrix::new(&start.along, m, n), Matrix::new(&start.r, m, n));
        // S = Q K^T - R N and x = Q - R U.
        multiply_here(1.0, g, k, &mut next, d, false);
        Matrix::new(&dx, m, d).add_to(&mut next);
        let dr = &mut y[..m * n];
        multiply_here(-1.0, g, block.n_keys().t(), dr, n, false);
        let dx = Matrix::new(&dx, m, d);
        multiply_here(-1.0, dx, u.t(), dr, n, true);
        multiply_here(1.0, g.t(), q, dk, d, true);
        multiply_here(-1.0, r.t(), g, dn, n, true);
        multiply_here(-1.0, r.t(), dx, du, d, true);
        // R = tril(Q U^T) T.
        let dr = Matrix::new(dr, m, n);
        multiply_here(1.0, along.t(), dr, dt, n, true);
        let dalong = &mut p[..m * n];
        multiply_here(1.0, dr, block.t().t(), dalong, n, false);
        keep_visible(dalong, n, queries.lane());
        let dalong = Matrix::new(dalong, m, n);
        multiply_here(1.0, dalong, u, &mut next, d, true);
        multiply_here(1.0, dalong.t(), q, du, d, true);
        for (r, row) in next.chunks_exact(d).enumerate() {
            // SAFETY: this task alone writes this row's columns of this head.
            unsafe { dq.slice(from + r * width, d) }.copy_from_slice(row);
        }
        Ok(())
    }
}
