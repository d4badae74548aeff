//! Matrix products by cuBLASLt: bf16 operands, f32 accumulation.

use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::{result, sys};
use half::bf16;

use crate::{Buffer, Error, Gpu, Result};

/// Scratch that the library's algorithms may use; 32 MiB is what it recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// A handle to the library and its scratch.
pub struct Gemm<'a> {
    gpu: &'a Gpu,
    handle: sys::cublasLtHandle_t,
    workspace: Buffer<u8>,
}

impl<'a> Gemm<'a> {
    /// Opens cuBLASLt.
    pub fn new(gpu: &'a Gpu) -> Result<Self> {
        // SAFETY: opening a shared library runs its initialisers; cuBLASLt's have no requirements.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::MissingLibrary {
                library: "libcublasLt",
                hint: "install the CUDA runtime libraries and put them on the library path",
            });
        }
        let workspace = gpu.alloc::<u8>(WORKSPACE)?;
        let handle = result::create_handle()
            .map_err(|e| Error::driver("cublasLtCreate", format!("{e:?}")))?;
        Ok(Gemm { gpu, handle, workspace })
    }

    /// `y[rows, n] = x[rows, k] w[n, k]^T`.
    pub fn linear(
        &self,
        x: &Buffer<bf16>,
        w: &Buffer<bf16>,
        y: &Buffer<bf16>,
        rows: usize,
        n: usize,
        k: usize,
    ) -> Result<()> {
        if x.len() != rows * k || w.len() != n * k || y.len() != rows * n {
            return Err(Error::argument(
                "linear",
                format!(
                    "x has {} elements, w {}, y {} for rows {rows}, n {n}, k {k}",
                    x.len(),
                    w.len(),
                    y.len()
                ),
            ));
        }
        self.gpu.bind()?;
        self.product(x, w, y, rows, n, k).map_err(|e| {
            Error::driver(format!("product [{rows}, {k}] x [{n}, {k}]^T"), format!("{e:?}"))
        })
    }

    /// The library is column-major: what it sees is `y^T = (w^T)^T x^T`.
    fn product(
        &self,
        x: &Buffer<bf16>,
        w: &Buffer<bf16>,
        y: &Buffer<bf16>,
        rows: usize,
        n: usize,
        k: usize,
    ) -> std::result::Result<(), result::CublasError> {
        let kind = sys::cudaDataType_t::CUDA_R_16BF;
        let (alpha, beta) = (1f32, 0f32);
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let desc = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )?;
        let w_layout = result::create_matrix_layout(kind, k as u64, n as u64, k as i64)?;
        let x_layout = result::create_matrix_layout(kind, k as u64, rows as u64, k as i64)?;
        let y_layout = result::create_matrix_layout(kind, n as u64, rows as u64, n as i64)?;
        let pref = result::create_matmul_pref()?;
        // CUBLAS_OP_T, which the bindings leave out.
        let transpose = 1i32;
        // SAFETY: descriptors are live until the end of the block, attributes have the sizes given,
        // and the caller checked that the buffers have the sizes of the layouts.
        unsafe {
            result::set_matmul_desc_attribute(
                desc,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                ptr::from_ref(&transpose).cast(),
                size_of_val(&transpose),
            )?;
            result::set_matmul_pref_attribute(
                pref,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&WORKSPACE).cast(),
                size_of_val(&WORKSPACE),
            )?;
            let choice = result::get_matmul_algo_heuristic(
                self.handle,
                desc,
                w_layout,
                x_layout,
                y_layout,
                y_layout,
                pref,
            )?;
            result::matmul(
                self.handle,
                desc,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                at(w.address()),
                w_layout,
                at(x.address()),
                x_layout,
                at(y.address()),
                y_layout,
                at(y.address()),
                y_layout,
                &choice.algo,
                at(self.workspace.address()),
                WORKSPACE,
                self.gpu.stream().cast(),
            )?;
            result::destroy_matmul_pref(pref)?;
            for layout in [w_layout, x_layout, y_layout] {
                result::destroy_matrix_layout(layout)?;
            }
            result::destroy_matmul_desc(desc)
        }
    }
}

impl Drop for Gemm<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
