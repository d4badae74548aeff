//! Matrix products by cuBLASLt: bf16 or f32 operands, f32 accumulation.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};

use crate::{Buffer, Error, Gpu, Result};

/// Workspace of cuBLASLt; 32 MiB is the recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;

/// A matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct GemmOperand {
    /// Device address.
    pub address: u64,
    /// Whether the stored row-major matrix is the transpose of the operand.
    pub transposed: bool,
}

/// `c[m, n] = a[m, k] b[k, n]`, plus `c` when it accumulates; all row-major.
#[derive(Clone, Copy, Debug)]
pub struct GemmProblem {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Left operand.
    pub a: GemmOperand,
    /// Right operand.
    pub b: GemmOperand,
    /// Device address of the result.
    pub c: u64,
    /// Whether the operands are f32 rather than bf16.
    pub wide_operands: bool,
    /// Whether the result is f32 rather than bf16.
    pub wide_result: bool,
    /// Whether the product is added to `c`.
    pub accumulate: bool,
}

/// Inputs of the algorithm heuristic.
#[derive(PartialEq, Eq, Hash)]
struct PlanKey([usize; 4], [bool; 4]);

impl GemmProblem {
    fn key(&self, count: usize) -> PlanKey {
        let flags = [self.a.transposed, self.b.transposed, self.wide_operands, self.wide_result];
        PlanKey([count, self.m, self.n, self.k], flags)
    }

    fn shapes(&self) -> String {
        let kind = if self.wide_operands { "f32" } else { "bf16" };
        format!("product [{}, {}] x [{}, {}] in {kind}", self.m, self.k, self.k, self.n)
    }
}

/// Descriptors of a product and the algorithm selected by the heuristic.
struct MatmulPlan {
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: the handles are only read after creation.
unsafe impl Send for MatmulPlan {}
// SAFETY: as above.
unsafe impl Sync for MatmulPlan {}

impl Drop for MatmulPlan {
    fn drop(&mut self) {
        // SAFETY: created in `make_plan`, destroyed once.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.desc);
        }
    }
}

/// cuBLASLt with its workspace and a cache of plans.
pub struct Gemm {
    handle: sys::cublasLtHandle_t,
    workspace: Buffer<u8>,
    plans: Mutex<HashMap<PlanKey, Arc<MatmulPlan>>>,
}

// SAFETY: cuBLASLt handles may be used from any thread; the plans are behind a mutex.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// Opens cuBLASLt.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        // SAFETY: opening a shared library runs its initialisers; cuBLASLt's have no requirements.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::MissingLibrary {
                library: "libcublasLt",
                hint: "install the CUDA runtime libraries (the nvidia-cublas package is enough) and put them on the library path",
            });
        }
        let workspace = gpu.alloc::<u8>(WORKSPACE)?;
        let handle = result::create_handle()
            .map_err(|e| Error::driver("cublasLtCreate", format!("{e:?}")))?;
        Ok(Gemm { handle, workspace, plans: Mutex::default() })
    }

    /// Runs a product.
    ///
    /// # Safety
    /// The addresses must belong to live buffers of the sizes that the product implies.
    pub unsafe fn run(&self, gpu: &Gpu, product: &GemmProblem) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run_batch(gpu, product, 1) }
    }

    /// Runs a strided batch of `count` products: operands and results are contiguous.
    ///
    /// # Safety
    /// The addresses must belong to live buffers of `count` times the sizes that the product implies.
    pub unsafe fn run_batch(&self, gpu: &Gpu, product: &GemmProblem, count: usize) -> Result<()> {
        if product.m == 0 || product.n == 0 || count == 0 {
            return Ok(());
        }
        gpu.bind()?;
        let plan = self.plan(product, count)?;
        let (alpha, beta) = (1f32, if product.accumulate { 1f32 } else { 0f32 });
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let [a, b, c] = plan.layouts;
        // SAFETY: the plan's descriptions are live, and the caller vouches for the addresses.
        unsafe {
            result::matmul(
                self.handle,
                plan.desc,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                at(product.b.address),
                a,
                at(product.a.address),
                b,
                at(product.c),
                c,
                at(product.c),
                c,
                &plan.algorithm,
                at(self.workspace.address()),
                WORKSPACE,
                gpu.stream().cast(),
            )
        }
        .map_err(|e| Error::driver(product.shapes(), format!("{e:?}")))
    }

    fn plan(&self, product: &GemmProblem, count: usize) -> Result<Arc<MatmulPlan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&product.key(count)) {
            return Ok(Arc::clone(plan));
        }
        let plan = self.make_plan(product, count).map_err(|e| {
            Error::driver(format!("planning {}", product.shapes()), format!("{e:?}"))
        })?;
        let plan = Arc::new(plan);
        plans.insert(product.key(count), Arc::clone(&plan));
        Ok(plan)
    }

    /// cuBLASLt is column-major: it computes `c^T = b^T a^T`.
    fn make_plan(
        &self,
        p: &GemmProblem,
        count: usize,
    ) -> std::result::Result<MatmulPlan, result::CublasError> {
        let kind = |wide: bool| match wide {
            true => sys::cudaDataType_t::CUDA_R_32F,
            false => sys::cudaDataType_t::CUDA_R_16BF,
        };
        // Column-major layout of a row-major [rows, columns] matrix.
        let layout = |wide: bool, rows: usize, columns: usize| {
            let (width, height) = (columns as u64, rows as u64);
            let layout = result::create_matrix_layout(kind(wide), width, height, columns as i64)?;
            if count > 1 {
                set_batch(layout, count as i32, (rows * columns) as i64)?;
            }
            Ok(layout)
        };
        let stored = |matrix: GemmOperand, rows: usize, columns: usize| match matrix.transposed {
            true => layout(p.wide_operands, columns, rows),
            false => layout(p.wide_operands, rows, columns),
        };
        let desc = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )?;
        let layouts =
            [stored(p.b, p.k, p.n)?, stored(p.a, p.m, p.k)?, layout(p.wide_result, p.m, p.n)?];
        let pref = result::create_matmul_pref()?;
        use sys::cublasLtMatmulDescAttributes_t as A;
        // SAFETY: descriptors are live, attributes have the sizes given.
        unsafe {
            for (which, matrix) in
                [(A::CUBLASLT_MATMUL_DESC_TRANSA, p.b), (A::CUBLASLT_MATMUL_DESC_TRANSB, p.a)]
            {
                // CUBLAS_OP_T is 1; the bindings omit it.
                let transpose = i32::from(matrix.transposed);
                let value = ptr::from_ref(&transpose).cast();
                result::set_matmul_desc_attribute(desc, which, value, size_of_val(&transpose))?;
            }
            result::set_matmul_pref_attribute(
                pref,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&WORKSPACE).cast(),
                size_of_val(&WORKSPACE),
            )?;
            let [a, b, c] = layouts;
            let choice = result::get_matmul_algo_heuristic(self.handle, desc, a, b, c, c, pref);
            result::destroy_matmul_pref(pref)?;
            Ok(MatmulPlan { desc, layouts, algorithm: choice?.algo })
        }
    }
}

/// Makes a layout a strided batch of `count` matrices.
fn set_batch(
    layout: sys::cublasLtMatrixLayout_t,
    count: i32,
    stride: i64,
) -> std::result::Result<(), result::CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as A;
    let (count_at, stride_at) = (ptr::from_ref(&count).cast(), ptr::from_ref(&stride).cast());
    // SAFETY: the layout is live, the attributes have the sizes given.
    unsafe {
        let which = A::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
        result::set_matrix_layout_attribute(layout, which, count_at, size_of_val(&count))?;
        let which = A::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        result::set_matrix_layout_attribute(layout, which, stride_at, size_of_val(&stride))
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
