//! Matrix products and the embedding table.

use super::storage::Matrix;

/// Inner product.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += a x`.
pub(super) fn axpy(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// `y[r, n] = <x[r], w[n]> + bias[n]`.
pub(super) fn forward(x: Matrix<'_>, w: Matrix<'_>, bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.rows * w.rows);
    for r in 0..x.rows {
        for n in 0..w.rows {
            y.push(dot(x.row(r), w.row(n)) + bias.map_or(0.0, |b| b[n]));
        }
    }
    y
}

/// `dx[r] = sum_n dy[r, n] w[n]`.
pub(super) fn backward_input(dy: Matrix<'_>, w: Matrix<'_>) -> Vec<f64> {
    let mut dx = vec![0.0; dy.rows * w.cols];
    for r in 0..dy.rows {
        for n in 0..w.rows {
            axpy(&mut dx[r * w.cols..][..w.cols], dy.row(r)[n], w.row(n));
        }
    }
    dx
}

/// `dw[n] = sum_r dy[r, n] x[r]`.
pub(super) fn backward_weight(dy: Matrix<'_>, x: Matrix<'_>) -> Vec<f64> {
    let mut dw = vec![0.0; dy.cols * x.cols];
    for r in 0..dy.rows {
        for n in 0..dy.cols {
            axpy(&mut dw[n * x.cols..][..x.cols], dy.row(r)[n], x.row(r));
        }
    }
    dw
}

/// `db[n] = sum_r dy[r, n]`.
pub(super) fn backward_bias(dy: Matrix<'_>) -> Vec<f64> {
    let mut db = vec![0.0; dy.cols];
    for r in 0..dy.rows {
        axpy(&mut db, 1.0, dy.row(r));
    }
    db
}

/// `y[r] = table[ids[r]]`.
pub(super) fn embedding_forward(table: Matrix<'_>, ids: &[i32]) -> Vec<f64> {
    ids.iter().flat_map(|&id| table.row(id as usize).iter().copied()).collect()
}

/// `dtable[v] = sum over r with ids[r] = v of dy[r]`, nothing for row `pad`.
pub(super) fn embedding_backward(
    dy: Matrix<'_>,
    ids: &[i32],
    vocab: usize,
    pad: Option<usize>,
) -> Vec<f64> {
    let mut dtable = vec![0.0; vocab * dy.cols];
    for (r, &id) in ids.iter().enumerate() {
        if pad != Some(id as usize) {
            axpy(&mut dtable[id as usize * dy.cols..][..dy.cols], 1.0, dy.row(r));
        }
    }
    dtable
}
