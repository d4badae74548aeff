//! Matrix products.

use crate::naive::{Matrix, Naive, axpy, dot, matrix, maybe_real};
use crate::{
    LinearGroupOps, LinearOps, Result, Tensor, check_linear_bwd_bias, check_linear_bwd_input,
    check_linear_bwd_weight, check_linear_fwd, check_linear_group_bwd_input,
    check_linear_group_bwd_weight, check_linear_group_fwd, check_linear_split_bwd_input,
    check_linear_split_bwd_weight, check_linear_split_fwd, linear_split_bwd_input_by_copies,
    linear_split_bwd_weight_by_copies, linear_split_fwd_by_copies,
};

impl LinearOps for Naive {
    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        check_linear_fwd(self, x, w, bias)?;
        let y = forward(matrix(x)?, matrix(w)?, maybe_real(bias)?);
        Ok(self.tensor(x.device(), y, [x.rows(), w.rows()]))
    }

    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        check_linear_bwd_input(self, dy, w, acc.as_ref())?;
        let dx = backward_input(matrix(dy)?, matrix(w)?);
        self.plus(acc, self.tensor(dy.device(), dx, [dy.rows(), w.cols()]))
    }

    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        check_linear_bwd_weight(self, dy, x, acc.as_ref())?;
        let dw = backward_weight(matrix(dy)?, matrix(x)?);
        self.plus(acc, self.tensor(dy.device(), dw, [dy.cols(), x.cols()]))
    }

    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        check_linear_bwd_bias(self, dy, acc.as_ref())?;
        let db = backward_bias(matrix(dy)?);
        self.plus(acc, self.tensor(dy.device(), db, [dy.cols()]))
    }

    fn linear_split_fwd(&self, x: &Tensor, w: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        check_linear_split_fwd(self, x, w, widths)?;
        linear_split_fwd_by_copies(self, x, w, widths)
    }

    fn linear_split_bwd_input(
        &self,
        dys: &[Tensor],
        w: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_linear_split_bwd_input(self, dys, w, acc.as_ref())?;
        linear_split_bwd_input_by_copies(self, dys, w, acc)
    }

    fn linear_split_bwd_weight(
        &self,
        dys: &[Tensor],
        x: &Tensor,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_linear_split_bwd_weight(self, dys, x, acc.as_ref())?;
        linear_split_bwd_weight_by_copies(self, dys, x, acc)
    }
}

/// One by one: for tests of the tape.
impl LinearGroupOps for Naive {
    fn linear_group_fwd(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Option<Vec<Tensor>>> {
        check_linear_group_fwd(self, x, weights)?;
        weights.iter().map(|w| self.linear_fwd(x, w, None)).collect::<Result<_>>().map(Some)
    }

    fn linear_group_bwd_input(
        &self,
        dys: &[&Tensor],
        weights: &[&Tensor],
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        check_linear_group_bwd_input(self, dys, weights, acc.as_ref())?;
        let first = self.linear_bwd_input(dys[0], weights[0], acc)?;
        let mut rest = dys[1..].iter().zip(&weights[1..]);
        rest.try_fold(first, |acc, (dy, w)| self.linear_bwd_input(dy, w, Some(acc)))
    }

    fn linear_group_bwd_weight(
        &self,
        dys: &[&Tensor],
        x: &Tensor,
        accs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        check_linear_group_bwd_weight(self, dys, x, &accs)?;
        dys.iter().zip(accs).map(|(dy, acc)| self.linear_bwd_weight(dy, x, acc)).collect()
    }
}

/// `y[r, n] = <x[r], w[n]> + bias[n]`.
fn forward(x: Matrix<'_>, w: Matrix<'_>, bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.rows * w.rows);
    for r in 0..x.rows {
        for n in 0..w.rows {
            y.push(dot(x.row(r), w.row(n)) + bias.map_or(0.0, |b| b[n]));
        }
    }
    y
}

/// `dx[r] = sum_n dy[r, n] w[n]`.
fn backward_input(dy: Matrix<'_>, w: Matrix<'_>) -> Vec<f64> {
    let mut dx = vec![0.0; dy.rows * w.cols];
    for r in 0..dy.rows {
        for n in 0..w.rows {
            axpy(&mut dx[r * w.cols..][..w.cols], dy.row(r)[n], w.row(n));
        }
    }
    dx
}

/// `dw[n] = sum_r dy[r, n] x[r]`.
fn backward_weight(dy: Matrix<'_>, x: Matrix<'_>) -> Vec<f64> {
    let mut dw = vec![0.0; dy.cols * x.cols];
    for r in 0..dy.rows {
        for n in 0..dy.cols {
            axpy(&mut dw[n * x.cols..][..x.cols], dy.row(r)[n], x.row(r));
        }
    }
    dw
}

/// `db[n] = sum_r dy[r, n]`.
fn backward_bias(dy: Matrix<'_>) -> Vec<f64> {
    let mut db = vec![0.0; dy.cols];
    for r in 0..dy.rows {
        axpy(&mut db, 1.0, dy.row(r));
    }
    db
}
