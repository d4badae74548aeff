//! Quantized weights for inference: matmuls and downloads read them, nothing writes them.

use std::sync::Arc;

use fox_tensor::{DType, INT8_BLOCK, PackOps, Tensor, WeightFormat};
use half::bf16;

use crate::backend::Cuda;
use crate::backend::launcher::{Variant, plain_variants};
use crate::backend::storage::{Data, memory};
use crate::launch::Kernel;
use crate::params::{ConstPtr, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Error, Gpu, Result, Source};

const SOURCE: Source = source!("packed", [], [QuantInt8, DequantMatrix, DequantInt8]);

/// Threads of a thread block.
const THREADS: usize = 256;
/// Most matrices of a launch.
pub(crate) const MATRICES: usize = 7;

kernel_params! {
    struct QuantInt8 {
        /// `[rows, padded width]`.
        values: Ptr<i8>,
        /// `[rows, padded width / INT8_BLOCK]`.
        scales: Ptr<f32>,
        /// `[rows, width]`.
        x: ConstPtr<f32>,
        rows: usize,
        width: usize,
    }
}

kernel_params! {
    /// A matrix to dequantize.
    #[derive(Default)]
    pub(crate) struct DequantMatrix {
        pub(crate) values: ConstPtr<i8>,
        pub(crate) scales: ConstPtr<f32>,
        /// `[rows, width]`.
        pub(crate) to: Ptr<Real>,
        /// Vectors of the kernel's `VEC` values in all rows.
        pub(crate) vectors: usize,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(crate) struct DequantInt8 {
        pub(crate) matrices: [DequantMatrix; MATRICES],
        pub(crate) width: usize,
    }
}

/// Typical variants for compilation checks.
pub(crate) fn variants() -> Vec<(Source, Vec<String>)> {
    plain_variants(SOURCE)
}

/// Weights `[N, K]` of a matmul.
#[derive(Debug)]
pub(crate) enum Packed {
    /// Rounded to bf16.
    Bf16(Buffer<bf16>),
    Int8(Int8),
}

/// int8 weights; rows are zero-padded to whole blocks of values that share a scale.
#[derive(Debug)]
pub(crate) struct Int8 {
    /// `[rows, padded]`.
    pub(crate) values: Buffer<i8>,
    /// `[rows, padded / INT8_BLOCK]`.
    pub(crate) scales: Buffer<f32>,
    rows: usize,
    width: usize,
}

impl Packed {
    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        match self {
            Packed::Bf16(x) => x.len(),
            Packed::Int8(x) => x.rows * x.width,
        }
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Packed::Bf16(x) => x.address(),
            Packed::Int8(x) => x.values.address(),
        }
    }

    /// The error of an op that would write them.
    pub(crate) fn refusal() -> Error {
        let detail = "quantized weights cannot be changed; load the model with f32 weights";
        Error::argument("cuda", detail)
    }
}

impl Int8 {
    /// The int8 matrix behind a tensor, if it is one.
    pub(crate) fn of(w: &Tensor) -> Result<Option<&Int8>> {
        Ok(match &memory(w)?.data {
            Data::Packed(Packed::Int8(x)) => Some(x),
            _ => None,
        })
    }
}

/// Dequantizes matrices whose widths are multiples of `vec`.
pub(crate) struct Dequantize {
    kernel: Arc<Kernel>,
    vec: usize,
    most_blocks: usize,
}

impl Dequantize {
    /// To values of type `dtype`.
    pub(crate) fn new(gpu: &Gpu, dtype: DType, width: usize) -> Result<Self> {
        let variant = Variant::plain(dtype, width);
        let kernel =
            gpu.cached_kernel(SOURCE, "dequantize_int8", variant, |variant| variant.defines())?;
        Ok(Dequantize { kernel, vec: variant.vec, most_blocks: 8 * gpu.processors() as usize })
    }

    /// Vectors of a matrix.
    pub(crate) fn vectors(&self, rows: usize, width: usize) -> usize {
        rows * (width / self.vec)
    }

    /// Dequantizes the first `count` matrices.
    ///
    /// # Safety
    /// The addresses must belong to live buffers of the sizes of the matrices.
    pub(crate) unsafe fn launch(
        &self,
        params: DequantInt8,
        count: usize,
        overlapping: bool,
    ) -> Result<()> {
        let most = params.matrices[..count].iter().map(|matrix| matrix.vectors).max().unwrap_or(0);
        let grid = [most.div_ceil(THREADS).min(self.most_blocks), count, 1];
        let width = params.width;
        let launch = self.kernel.launch(grid, THREADS).overlapping(overlapping).params(params)?;
        // SAFETY: the caller's promise.
        unsafe { launch.run(|| format!("{count} matrices of width {width}")) }
    }
}

impl Cuda {
    fn pack(&self, w: &Tensor, format: WeightFormat) -> Result<Tensor> {
        let packed = match format {
            WeightFormat::F32 if matches!(memory(w)?.data, Data::Packed(_)) => {
                return Err(Packed::refusal());
            }
            WeightFormat::F32 => return self.in_halves(w),
            WeightFormat::Bf16 => {
                let real = self.real(w)?;
                let Some(Data::F32(values)) = real.data() else { return Err(Packed::refusal()) };
                Packed::Bf16(self.narrow(values)?)
            }
            WeightFormat::Int8 => Packed::Int8(self.quantize_int8(w)?),
        };
        Ok(self.tensor(Data::Packed(packed), w.shape(), w.device()))
    }

    fn quantize_int8(&self, w: &Tensor) -> Result<Int8> {
        let (rows, width) = (w.rows(), w.cols());
        let blocks = rows * width.div_ceil(INT8_BLOCK);
        let real = self.real(w)?;
        let (values, scales) = (self.gpu.alloc(blocks * INT8_BLOCK)?, self.gpu.alloc(blocks)?);
        let params = QuantInt8 {
            values: values.address().into(),
            scales: scales.address().into(),
            x: real.address().into(),
            rows,
            width,
        };
        let variant = Variant::plain(DType::F32, 1);
        let kernel = self
            .gpu
            .cached_kernel(SOURCE, "quantize_int8", variant, |variant| variant.defines())?;
        // One warp per block of values.
        let grid = [self.flat_blocks(32 * blocks), 1, 1];
        let launch = kernel.launch(grid, THREADS).params(params)?;
        // SAFETY: the buffers have the sizes named.
        unsafe { launch.run(|| format!("weights [{rows}, {width}]"))? };
        Ok(Int8 { values, scales, rows, width })
    }

    /// int8 weights as values of type `dtype`, for one matmul.
    pub(crate) fn unpack(&self, x: &Int8, dtype: DType) -> Result<Data> {
        let data = Data::alloc(&self.gpu, x.rows * x.width, dtype)?;
        let kernel = Dequantize::new(&self.gpu, dtype, x.width)?;
        let mut params = DequantInt8 { width: x.width, ..DequantInt8::default() };
        params.matrices[0] = DequantMatrix {
            values: x.values.address().into(),
            scales: x.scales.address().into(),
            to: data.address().into(),
            vectors: kernel.vectors(x.rows, x.width),
        };
        // SAFETY: both have the sizes of the matrix.
        unsafe { kernel.launch(params, 1, false)? };
        Ok(data)
    }
}

impl PackOps for Cuda {
    fn pack_weight(&self, w: &Tensor, format: WeightFormat) -> fox_tensor::Result<Option<Tensor>> {
        fox_tensor::check_pack_weight(self, w)?;
        Ok(Some(self.timed("pack", || self.pack(w, format))?))
    }
}
