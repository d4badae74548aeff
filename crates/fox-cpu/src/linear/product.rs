//! Matrix products by the `gemm` crates; only the f32 crate, which builds in a fraction of the time.

use fox_tensor::Result;
use gemm_common::Parallelism;

/// An operand: element `(r, c)` of the matrix at `data[r * row_stride + c * col_stride]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major `[rows, cols]`.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        Matrix { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// Row-major `[rows, cols]` with row stride `stride`: columns of a wider matrix.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(cols <= stride && (rows == 0 || (rows - 1) * stride + cols <= data.len()));
        Matrix { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose, without a copy.
    pub fn t(self) -> Self {
        Matrix {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Copies a matrix that is not transposed to row-major `[rows, cols]`.
    pub fn copy_to(&self, out: &mut [f32]) {
        self.each_row(out, |row, out| out.copy_from_slice(row));
    }

    /// Adds a matrix that is not transposed to row-major `[rows, cols]`.
    pub fn add_to(&self, out: &mut [f32]) {
        self.each_row(out, |row, out| out.iter_mut().zip(row).for_each(|(y, x)| *y += x));
    }

    fn each_row(&self, out: &mut [f32], f: impl Fn(&[f32], &mut [f32])) {
        assert!(self.col_stride == 1 && out.len() == self.rows * self.cols);
        for (r, out) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            f(&self.data[r * self.row_stride..][..self.cols], out);
        }
    }
}

/// `c = a b`, or `c += a b` with `add`; `c` is row-major.
///
/// The crate splits work over rows and columns of `c`, never over the inner dimension, so the
/// result does not depend on the number of threads.
pub fn multiply(a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], add: bool) {
    let width = b.cols;
    product(1.0, a, b, c, width, add, Parallelism::Rayon(0));
}

/// `c = factor a b`, or `c += factor a b` with `add`, single-threaded; `stride` is the row stride of
/// `c`. For the small products inside parallel kernels.
pub fn multiply_here(
    factor: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    stride: usize,
    add: bool,
) {
    product(factor, a, b, c, stride, add, Parallelism::None);
}

fn product(
    factor: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    stride: usize,
    add: bool,
    parallelism: Parallelism,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    if m == 0 || n == 0 {
        return;
    }
    assert!(b.rows == k && n <= stride && (m - 1) * stride + n <= c.len());
    if k == 0 {
        if !add {
            c.chunks_mut(stride).take(m).for_each(|row| row[..n].fill(0.0));
        }
        return;
    }
    // The kernels want a column-major result, so the transposed product is computed: c^T = b^T a^T.
    let (a, b) = (b.t(), a.t());
    // SAFETY: the asserts above and in the constructors of `Matrix` keep every access inside the
    // three slices, and `c` is borrowed exclusively.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            n,
            m,
            k,
            c.as_mut_ptr(),
            stride as isize,
            1,
            add,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            factor,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Column sums of `[rows, cols]`, added to `acc`, in f64 and in order.
pub fn add_column_sums(x: &[f32], acc: &mut [f32]) -> Result<()> {
    let mut sums = vec![0.0f64; acc.len()];
    for row in x.chunks_exact(acc.len()) {
        sums.iter_mut().zip(row).for_each(|(s, x)| *s += *x as f64);
    }
    acc.iter_mut().zip(&sums).for_each(|(a, s)| *a += *s as f32);
    Ok(())
}
