//! Several narrow linear layers of one input (gates, shifts) as one product: alone, each would read the input
//! and, in the backward, read and write its gradient once more.

use fox_tensor::{DType, Tensor};

use super::launcher::{Op, Variant};
use super::linear::{GATE_WIDTH, Sizes, plain, transposed};
use super::storage::Data;
use super::{Cuda, Operand, int};
use crate::{KernelArg, Result, Source};

/// Weights of a group, at most.
const PARTS: usize = 4;

/// Matrices of f32 side by side.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Parts {
    at: [u64; PARTS],
    end: [i32; PARTS],
    add: [i32; PARTS],
}

// SAFETY: mirrors the struct of the same name in columns.cu.
unsafe impl KernelArg for Parts {}

impl Parts {
    /// Parts of these widths, in these places.
    fn new(places: impl Iterator<Item = u64>, widths: impl Iterator<Item = usize>) -> Self {
        let (mut parts, mut end) = (Parts::default(), 0);
        for (slot, place) in parts.at.iter_mut().zip(places) {
            *slot = place;
        }
        // Parts that are not there end where the last one does.
        for (slot, width) in parts.end.iter_mut().zip(widths.chain(std::iter::repeat(0))) {
            end += int(width);
            *slot = end;
        }
        parts
    }
}

/// Columns of a group of `widths`, padded to what products like.
fn padded(widths: impl Iterator<Item = usize>) -> usize {
    widths.sum::<usize>().next_multiple_of(8)
}

impl Cuda {
    /// Whether these weights go as one product.
    pub(super) fn is_group(&self, x: &Tensor, weights: &[&Tensor]) -> bool {
        let narrow = weights.iter().all(|w| w.rows() <= GATE_WIDTH);
        // The kernels count elements in 31 bits.
        let small = x.rows().max(x.cols()) < (i32::MAX as usize) / (PARTS * GATE_WIDTH);
        let several = (2..=PARTS).contains(&weights.len());
        several && narrow && small && !self.is_thin(x.rows(), x.cols())
    }

    /// `y_i[R, N_i]` in f32.
    pub(super) fn group_forward(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (rows, inner) = (x.rows(), x.cols());
        let widths = || weights.iter().map(|w| w.rows());
        let n = padded(widths());
        let joined = self.joined_weights(weights, n, inner)?;
        let whole = Data::alloc(&self.gpu, rows * n, DType::F32)?;
        let x_at = self.activation(x)?;
        let sizes = Sizes { m: rows, n, k: inner };
        let (left, right) = (plain(x_at.address()), transposed(joined.address()));
        self.multiply(left, right, whole.address(), sizes, DType::F32, false)?;
        let (mut outs, mut places) = (Vec::new(), Vec::new());
        for w in weights {
            let (out, at) = self.output([rows, w.rows()], DType::F32, x.device())?;
            outs.push(out);
            places.push(at);
        }
        let parts = Parts::new(places.into_iter(), widths());
        self.launch_parts("split_columns", DType::F32, whole.address(), rows, n, &parts)?;
        Ok(outs)
    }

    /// `dx = sum_i dy_i w_i`, added to `acc`.
    pub(super) fn group_input_gradient(
        &self,
        dys: &[&Tensor],
        weights: &[&Tensor],
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let (dy, n) = self.joined_gradients(dys)?;
        let (rows, inner) = (dys[0].rows(), weights[0].cols());
        let joined = self.joined_weights(weights, n, inner)?;
        let (dx, at, add) = self.sum_of(acc, [rows, inner], self.activations(), dys[0].device())?;
        let sizes = Sizes { m: rows, n: inner, k: n };
        let (left, right) = (plain(dy.address()), plain(joined.address()));
        self.multiply(left, right, at, sizes, dx.dtype(), add)?;
        Ok(dx)
    }

    /// `dw_i = dy_i^T x`, each added to what there is.
    pub(super) fn group_weight_gradients(
        &self,
        dys: &[&Tensor],
        x: &Tensor,
        accs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let (dy, n) = self.joined_gradients(dys)?;
        let (rows, inner) = (x.rows(), x.cols());
        let whole = Data::alloc(&self.gpu, n * inner, DType::F32)?;
        let x_at = self.activation(x)?;
        let sizes = Sizes { m: n, n: inner, k: rows };
        let (left, right) = (transposed(dy.address()), plain(x_at.address()));
        self.multiply(left, right, whole.address(), sizes, DType::F32, false)?;
        // Weights lie one after the other, so they are parts of a single row.
        let widths = dys.iter().map(|dy| dy.cols() * inner);
        let mut parts = Parts::new(std::iter::empty(), widths);
        let mut dws = Vec::with_capacity(dys.len());
        for (i, (dy, acc)) in dys.iter().zip(accs).enumerate() {
            let (dw, at, add) = self.sum_of(acc, [dy.cols(), inner], DType::F32, x.device())?;
            (parts.at[i], parts.add[i]) = (at, i32::from(add));
            dws.push(dw);
        }
        self.launch_parts("split_columns", DType::F32, whole.address(), 1, n * inner, &parts)?;
        Ok(dws)
    }

    /// The gradients side by side `[R, n]` in the type of activations, and `n`.
    fn joined_gradients(&self, dys: &[&Tensor]) -> Result<(Data, usize)> {
        let widths = || dys.iter().map(|dy| dy.cols());
        let (rows, n, dtype) = (dys[0].rows(), padded(widths()), self.activations());
        let joined = Data::alloc(&self.gpu, rows * n, dtype)?;
        let own = dys.iter().map(|dy| self.real(dy)).collect::<Result<Vec<_>>>()?;
        let parts = Parts::new(own.iter().map(Operand::address), widths());
        self.launch_parts("join_columns", dtype, joined.address(), rows, n, &parts)?;
        Ok((joined, n))
    }

    /// The weights one below the other `[n, inner]`, zeros after the last.
    fn joined_weights(&self, weights: &[&Tensor], n: usize, inner: usize) -> Result<Data> {
        let dtype = self.activations();
        let joined = Data::alloc(&self.gpu, n * inner, dtype)?;
        let own = weights.iter().map(|w| self.real(w)).collect::<Result<Vec<_>>>()?;
        let widths = weights.iter().map(|w| w.len());
        let parts = Parts::new(own.iter().map(Operand::address), widths);
        self.launch_parts("join_columns", dtype, joined.address(), 1, n * inner, &parts)?;
        Ok(joined)
    }

    fn launch_parts(
        &self,
        entry: &'static str,
        dtype: DType,
        whole: u64,
        rows: usize,
        width: usize,
        parts: &Parts,
    ) -> Result<()> {
        let count = rows * width;
        let blocks = count.div_ceil(256).min(self.gpu.processors() as usize * 16);
        let args = [whole.into(), int(count).into(), int(width).into()];
        let op = Op {
            source: Source::COLUMNS,
            entry,
            variant: Variant::plain(dtype, 1),
            grid: [blocks, 1],
            block: 256,
            shared: 0,
            args: &args,
        };
        let kernel = self.kernel(&op)?;
        let launch = kernel.launch([blocks as u32, 1, 1], 256);
        // SAFETY: parameters as declared in columns.cu; the callers' parts have the sizes they say.
        unsafe { launch.args(&args).arg(parts).run(|| format!("{rows} x {width}")) }
    }
}
