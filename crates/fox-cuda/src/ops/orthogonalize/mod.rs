//! Newton-Schulz iteration as batched GEMMs; see [`MatrixOps::orthogonalize`].
//!
//! Matrices of one shape (a model has the same ones in every layer) are batched: three GEMMs and one elementwise kernel
//! per step. GEMMs use the type of activations with f32 accumulation, which suffices because the singular values
//! converge to 0.7..1.2 only; norms are summed in f64.

use std::collections::BTreeMap;

use fox_tensor::{DType, MatrixOps, MatrixStack, NEWTON_SCHULZ};

use crate::backend::Cuda;
use crate::backend::launcher::{Op, Variant};
use crate::backend::storage::Data;
use crate::ops::linear::{GemmOperand, GemmProblem, plain, transposed};
use crate::params::{self, ConstPtr, KernelParams, Param, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Result, Source};

const ORTHOGONALIZE: Source =
    source!("orthogonalize", [], [OrthogonalizeEntry, SquareChunks, Normalize, Polynomial, Unpad]);

kernel_params! {
    /// A matrix in f32.
    table struct OrthogonalizeEntry {
        matrix: Ptr<f32>,
        /// Factor on the result.
        factor: f32,
        unused: i32,
    }

    list struct SquareChunks {
        /// `[matrices, chunks]`.
        partial: Ptr<f64>,
        entries: ConstPtr<OrthogonalizeEntry>,
        /// Elements of a matrix.
        count: u64,
    }

    list struct Normalize {
        /// `[matrices, padded_rows, padded_cols]`.
        x: Ptr<Real>,
        entries: ConstPtr<OrthogonalizeEntry>,
        rows: usize,
        cols: usize,
        padded_rows: usize,
        padded_cols: usize,
        /// `[matrices, chunks]`.
        partial: ConstPtr<f64>,
        chunks: usize,
    }

    list struct Polynomial {
        /// `[matrices, n, n]`, as all below.
        square: Ptr<Real>,
        gram: ConstPtr<Real>,
        n: usize,
        a: f32,
        b: f32,
        c: f32,
    }

    list struct Unpad {
        entries: ConstPtr<OrthogonalizeEntry>,
        /// `[matrices, padded_rows, padded_cols]`.
        x: ConstPtr<Real>,
        rows: usize,
        cols: usize,
        padded_rows: usize,
        padded_cols: usize,
    }
}

/// Typical variants, for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    let of = |dtype| (ORTHOGONALIZE, Variant::plain(dtype, 1).defines());
    [DType::F32, DType::Bf16].map(of).to_vec()
}

/// Threads per block, and elements per block of `square_chunks`.
const THREADS: usize = 256;
const CHUNK: usize = 16 * 1024;
/// Sides are padded to multiples of this: bf16 GEMMs need rows of 16 bytes, and batched matrices should be aligned to
/// 256 bytes.
const SIDE_ALIGN: usize = 16;
/// Limit on the scratch of a group; a single matrix may exceed it.
const SCRATCH_BYTES: usize = 256 << 20;
/// Maximum matrices of a group: the limit of the grid's y dimension.
const MAX_MATRICES: usize = 65535;

impl MatrixOps for Cuda {
    fn orthogonalize(
        &self,
        stacks: &mut [MatrixStack<'_>],
        steps: usize,
    ) -> fox_tensor::Result<()> {
        fox_tensor::check_orthogonalize(self, stacks)?;
        let _span = self.span("orthogonalize")?;
        let mut groups: BTreeMap<[usize; 2], Vec<OrthogonalizeEntry>> = BTreeMap::new();
        for stack in stacks {
            let (cols, parts) = (stack.cols(), stack.matrices().to_vec());
            if stack.x().dtype() != DType::F32 {
                return Err(fox_tensor::Error::argument(
                    "orthogonalize",
                    "the matrices must be f32",
                ));
            }
            let mut at = self.writable(stack.x())?.write().address();
            for part in parts.iter().filter(|part| part.rows * cols > 0) {
                let (matrix, factor) = (at.into(), part.factor);
                let entry = OrthogonalizeEntry { matrix, factor, unused: 0 };
                groups.entry([part.rows, cols]).or_default().push(entry);
                at += (part.rows * cols * DType::F32.size()) as u64;
            }
        }
        for ([rows, cols], entries) in groups {
            let shape = GroupShape::new(rows, cols);
            let bytes = shape.scratch() * self.activations().size();
            for group in entries.chunks((SCRATCH_BYTES / bytes).clamp(1, MAX_MATRICES)) {
                MatrixGroup::new(self, shape, group)?.run(steps)?;
            }
        }
        Ok(())
    }
}

/// Sides of a group's matrices, without and with padding.
#[derive(Clone, Copy)]
struct GroupShape {
    rows: usize,
    cols: usize,
    padded: [usize; 2],
}

impl GroupShape {
    fn new(rows: usize, cols: usize) -> Self {
        GroupShape {
            rows,
            cols,
            padded: [rows, cols].map(|side| side.next_multiple_of(SIDE_ALIGN)),
        }
    }

    /// The shorter padded side, which is the side of `A`.
    fn short(&self) -> usize {
        self.padded[0].min(self.padded[1])
    }

    /// Scratch elements per matrix: before and after a step, `A` and `A^2`.
    fn scratch(&self) -> usize {
        2 * self.padded[0] * self.padded[1] + 2 * self.short() * self.short()
    }
}

/// A batch of matrices of one shape.
struct MatrixGroup<'a> {
    cuda: &'a Cuda,
    shape: GroupShape,
    count: usize,
    entries: Buffer<<OrthogonalizeEntry as Param>::Device>,
    /// The matrices `[count, rows, cols]` before a step and after it.
    x: Data,
    next: Data,
    /// `A` and `A^2` `[count, n, n]`.
    gram: Data,
    square: Data,
}

impl<'a> MatrixGroup<'a> {
    fn new(cuda: &'a Cuda, shape: GroupShape, entries: &[OrthogonalizeEntry]) -> Result<Self> {
        let (count, dtype) = (entries.len(), cuda.activations());
        let matrices = || Data::alloc(&cuda.gpu, count * shape.padded[0] * shape.padded[1], dtype);
        let squares = || Data::alloc(&cuda.gpu, count * shape.short() * shape.short(), dtype);
        Ok(MatrixGroup {
            cuda,
            shape,
            count,
            entries: cuda.gpu.upload(&params::rows("orthogonalize", entries)?)?,
            x: matrices()?,
            next: matrices()?,
            gram: squares()?,
            square: squares()?,
        })
    }

    fn run(mut self, steps: usize) -> Result<()> {
        self.normalize()?;
        for _ in 0..steps {
            self.step()?;
        }
        let GroupShape { rows, cols, padded: [padded_rows, padded_cols] } = self.shape;
        let params = Unpad {
            entries: self.entries.address().into(),
            x: self.x.address().into(),
            rows,
            cols,
            padded_rows,
            padded_cols,
        };
        // SAFETY: buffers of this group.
        unsafe { self.launch("unpad", self.blocks(rows * cols), params) }
    }

    fn normalize(&self) -> Result<()> {
        let GroupShape { rows, cols, padded: [padded_rows, padded_cols] } = self.shape;
        let (entries, count) = (self.entries.address().into(), rows * cols);
        let chunks = count.div_ceil(CHUNK);
        let partial = self.cuda.gpu.alloc::<f64>(self.count * chunks)?;
        let params =
            SquareChunks { partial: partial.address().into(), entries, count: count as u64 };
        // SAFETY: buffers of this group, and partial sums of all chunks.
        unsafe { self.launch("square_chunks", chunks, params)? };
        let params = Normalize {
            x: self.x.address().into(),
            entries,
            rows,
            cols,
            padded_rows,
            padded_cols,
            partial: partial.address().into(),
            chunks,
        };
        // SAFETY: as above.
        unsafe { self.launch("normalize", self.blocks(padded_rows * padded_cols), params) }
    }

    /// `X = (a + b A + c A^2) X`, or `X (a + b A + c A^2)` if `X` is tall.
    fn step(&mut self) -> Result<()> {
        let (n, [rows, cols]) = (self.shape.short(), self.shape.padded);
        let (x, gram, square) = (self.x.address(), self.gram.address(), self.square.address());
        let wide = self.shape.rows <= self.shape.cols;
        let (left, right) = match wide {
            true => (plain(x), transposed(x)),
            false => (transposed(x), plain(x)),
        };
        let [a, b, c] = NEWTON_SCHULZ.map(|x| x as f32);
        let params = Polynomial { square: square.into(), gram: gram.into(), n, a, b, c };
        // SAFETY: `x` and `next` have `count` padded matrices, `gram` and `square` as many of their shorter side.
        unsafe {
            self.multiply([n, n, rows.max(cols)], left, right, gram)?;
            self.multiply([n, n, n], plain(gram), plain(gram), square)?;
            self.launch("polynomial", self.blocks(n * n), params)?;
            let (left, right) = match wide {
                true => (plain(square), plain(x)),
                false => (plain(x), plain(square)),
            };
            self.multiply([rows, cols, n], left, right, self.next.address())?;
        }
        std::mem::swap(&mut self.x, &mut self.next);
        Ok(())
    }

    /// `c[m, n] = a[m, k] b[k, n]` for every matrix.
    ///
    /// # Safety
    /// All three must be live buffers of `count` matrices of these sizes.
    unsafe fn multiply(
        &self,
        [m, n, k]: [usize; 3],
        a: GemmOperand,
        b: GemmOperand,
        c: u64,
    ) -> Result<()> {
        let wide = self.cuda.activations() == DType::F32;
        let product = GemmProblem {
            m,
            n,
            k,
            a,
            b,
            c,
            wide_operands: wide,
            wide_result: wide,
            accumulate: false,
        };
        // SAFETY: the caller's promise.
        unsafe { self.cuda.gemm.run_batch(&self.cuda.gpu, &product, self.count) }
    }

    /// Blocks per matrix for `elements`, limited to about one wave for the batch.
    fn blocks(&self, elements: usize) -> usize {
        let most = (self.cuda.gpu.processors() as usize * 16).div_ceil(self.count);
        elements.div_ceil(THREADS).clamp(1, most)
    }

    /// # Safety
    /// The addresses in `params` must be those of this group.
    unsafe fn launch<P: KernelParams>(
        &self,
        entry: &'static str,
        blocks: usize,
        params: P,
    ) -> Result<()> {
        let (variant, grid) = (Variant::plain(self.cuda.activations(), 1), [blocks, self.count]);
        let op = Op::new(ORTHOGONALIZE, entry, variant, grid, THREADS);
        // SAFETY: the caller's promise; the buffers are allocated for the shape of the group.
        unsafe { self.cuda.launch(&op, params) }
    }
}
