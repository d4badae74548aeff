//! Preparation of blocks of keys, and its backward pass.

use std::sync::Arc;

use fox_tensor::{PATH_BLOCK, Result};

use super::{Path, collect_all};
use crate::attention::call::Unit;
use crate::linear::{Matrix, multiply_here};
use crate::pool::{Buffer, Pool};
use crate::simd::{Level, scale_add, simd_fn};

/// The prepared blocks of a unit, from `first` on.
pub struct Blocks {
    first: usize,
    blocks: Vec<Block>,
}

/// A prepared block of `n` keys.
pub struct Block {
    pub n: usize,
    d: usize,
    /// `T`, `N`, `[n, n]` each.
    t: Buffer,
    n_keys: Buffer,
    /// `T U` and `kh`, `[n, d]` each.
    tu: Buffer,
    kh: Buffer,
}

impl Blocks {
    pub fn new(path: &Path<'_>, unit: &Unit, first: usize, parallel: bool) -> Result<Self> {
        let count = path.key_blocks(unit) - first;
        let blocks = collect_all(count, parallel, |n| Block::new(path, unit, first + n))?;
        Ok(Blocks { first, blocks })
    }

    pub fn get(&self, block: usize) -> &Block {
        &self.blocks[block - self.first]
    }
}

impl Block {
    fn new(path: &Path<'_>, unit: &Unit, index: usize) -> Result<Self> {
        let (k, u) = (path.rows(path.call.k, unit, index), path.rows(path.u, unit, index));
        let (d, pool) = (path.head_dim(), path.call.pool);
        let n = PATH_BLOCK.min(unit.segment.k_len - index * PATH_BLOCK);
        let (mut lower, mut t) = (pool.take(n * n)?, pool.take(n * n)?);
        multiply_here(1.0, u, u.t(), &mut lower, n, false);
        invert(path.call.level, n, &lower, &mut t);
        let mut n_keys = pool.take(n * n)?;
        multiply_here(1.0, u, k.t(), &mut n_keys, n, false);
        keep_below(&mut n_keys, n);
        let mut tu = pool.take(n * d)?;
        multiply_here(1.0, Matrix::new(&t, n, n), u, &mut tu, d, false);
        let mut kh = pool.take(n * d)?;
        k.copy_to(&mut kh);
        let z = &mut lower;
        multiply_here(1.0, Matrix::new(&t, n, n), Matrix::new(&n_keys, n, n), z, n, false);
        multiply_here(-1.0, Matrix::new(z, n, n).t(), u, &mut kh, d, true);
        Ok(Block { n, d, t, n_keys, tu, kh })
    }

    /// `T`, `[n, n]`.
    pub fn t(&self) -> Matrix<'_> {
        Matrix::new(&self.t, self.n, self.n)
    }

    /// `N`, `[n, n]`.
    pub fn n_keys(&self) -> Matrix<'_> {
        Matrix::new(&self.n_keys, self.n, self.n)
    }

    /// `T U`, `[n, d]`.
    pub fn tu(&self) -> Matrix<'_> {
        Matrix::new(&self.tu, self.n, self.d)
    }

    /// `kh`, `[n, d]`.
    pub fn kh(&self) -> Matrix<'_> {
        Matrix::new(&self.kh, self.n, self.d)
    }
}

/// Sets the diagonal and the elements above it to 0.
fn keep_below(x: &mut [f32], n: usize) {
    x.chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| row[i..].fill(0.0));
}

/// Sets the elements of row `r` after column `first + r` to 0, in rows of `n`.
pub fn keep_visible(x: &mut [f32], n: usize, first: usize) {
    x.chunks_mut(n.max(1)).enumerate().for_each(|(r, row)| {
        let end = (first + r + 1).min(n);
        row[end..].fill(0.0);
    });
}

simd_fn! {
    /// `t = (I + lower)^-1`, both `[n, n]`; the diagonal of `lower` and the elements above it are not read.
    fn invert<'k, S>(s, n: usize, lower: &'k [f32], t: &'k mut [f32]) {
        for i in 0..n {
            let (above, row) = t.split_at_mut(i * n);
            let row = &mut row[..n];
            row.fill(0.0);
            for j in 0..i {
                let width = j + 1;
                let factor = -lower[i * n + j];
                scale_add(s, factor, &above[j * n..][..width], &mut row[..width]);
            }
            row[i] = 1.0;
        }
    }
}

/// Gradients of a block's prepared matrices and, directly, of its keys and reflections.
pub struct BlockGrads<'a> {
    /// `[n, n]` each.
    pub dt: &'a mut [f32],
    pub dn: &'a mut [f32],
    /// Of `kh` `[n, d]`, and of the product of the block's reflections `[d, d]`.
    pub dkh: &'a [f32],
    pub dproduct: &'a [f32],
    /// Of keys and reflections `[n, d]`: what does not pass through the prepared matrices is already there.
    pub dk: &'a mut [f32],
    pub du: &'a mut [f32],
}

impl Block {
    /// Completes the gradients of keys and reflections; `k` and `u` are `[n, d]`.
    pub fn backward(
        &self,
        (k, u): (Matrix<'_>, Matrix<'_>),
        grads: &mut BlockGrads<'_>,
        pool: &Arc<Pool>,
    ) -> Result<()> {
        let (n, d) = (self.n, self.d);
        let BlockGrads { dt, dn, dkh, dproduct, dk, du } = grads;
        let (dkh, dproduct) = (Matrix::new(dkh, n, d), Matrix::new(dproduct, d, d));
        let (mut z, mut dz, mut dtu) = (pool.take(n * n)?, pool.take(n * n)?, pool.take(n * d)?);
        // kh = K - Z^T U with Z = T N.
        multiply_here(1.0, self.t(), self.n_keys(), &mut z, n, false);
        multiply_here(-1.0, u, dkh.t(), &mut dz, n, false);
        multiply_here(-1.0, Matrix::new(&z, n, n), dkh, du, d, true);
        dkh.add_to(dk);
        let dz = Matrix::new(&dz, n, n);
        multiply_here(1.0, dz, self.n_keys().t(), dt, n, true);
        multiply_here(1.0, self.t().t(), dz, dn, n, true);
        // The product of the reflections is I - U^T (T U).
        multiply_here(-1.0, u, dproduct, &mut dtu, d, false);
        multiply_here(-1.0, self.tu(), dproduct.t(), du, d, true);
        let dtu = Matrix::new(&dtu, n, d);
        multiply_here(1.0, dtu, u.t(), dt, n, true);
        multiply_here(1.0, self.t().t(), dtu, du, d, true);
        // N = tril(U K^T, -1).
        keep_below(dn, n);
        let dn = Matrix::new(dn, n, n);
        multiply_here(1.0, dn, k, du, d, true);
        multiply_here(1.0, dn.t(), u, dk, d, true);
        // T = (I + L)^-1 with L = tril(U U^T, -1): dL = -tril(T^T dT T^T, -1).
        multiply_here(-1.0, self.t().t(), Matrix::new(dt, n, n), &mut z, n, false);
        multiply_here(1.0, Matrix::new(&z, n, n), self.t().t(), dt, n, false);
        keep_below(dt, n);
        let dl = Matrix::new(dt, n, n);
        multiply_here(1.0, dl, u, du, d, true);
        multiply_here(1.0, dl.t(), u, du, d, true);
        Ok(())
    }
}

/// `y[r] *= f[r]`, row by row.
pub fn scale_rows(level: Level, factors: &[f32], y: &mut [f32], width: usize) {
    for (y, factor) in y.chunks_mut(width).zip(factors) {
        scale(level, *factor, y);
    }
}

simd_fn! {
    fn scale<'k, S>(s, a: f32, y: &'k mut [f32]) {
        let a = s.splat(a);
        crate::simd::update(s, [], y, |[], y| s.mul(a, y));
    }
}
