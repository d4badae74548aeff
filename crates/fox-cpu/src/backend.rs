//! The backend: from tensors to slices and back.

use std::fmt;
use std::sync::Arc;

use fox_tensor::{
    Activation, AdamW, AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec,
    AttentionWeights, Backend, BaselineOps, DType, Device, EXACT_ROWS, Error, GatedNormInputs,
    HeadGrads, HeadInputs, HeadSpec, LayerPages, LossOut, MemoryStats, PagedSpec, Result, Rope,
    Shape, Storage, Tensor, WeightFormat,
};

use crate::linear::{Matrix, add_column_sums, multiply};
use crate::packed::Packed;
use crate::pool::{Buffer, Pool};
use crate::rope::{Table, Tables};
use crate::simd::Level;
use crate::thin::{Plain, multiply_thin};
use crate::{attention, elementwise, embedding, gated_norm, heads, loss, norm};

/// How to run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Number of threads; all cores when absent.
    pub threads: Option<usize>,
    /// Instruction set; the best one when absent.
    pub level: Option<Level>,
    /// Fill fresh memory with NaN, so that tests see what an op forgot to write.
    pub poison: bool,
}

/// The CPU backend.
pub struct Cpu {
    level: Level,
    pool: Arc<Pool>,
    ropes: Tables,
    /// Threads of its own; `None` is the process-wide pool.
    threads: Option<rayon::ThreadPool>,
}

impl Default for Cpu {
    fn default() -> Self {
        Cpu {
            level: Level::detect(),
            pool: Pool::new(false),
            ropes: Tables::default(),
            threads: None,
        }
    }
}

impl Cpu {
    /// A backend with options of one's own.
    pub fn new(options: Options) -> Result<Self> {
        let build = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build();
        let threads = options.threads.map(build).transpose().map_err(|error| Error::Device {
            device: "cpu".into(),
            detail: format!("cannot start threads: {error}"),
        })?;
        Ok(Cpu {
            level: options.level.unwrap_or_else(Level::detect),
            pool: Pool::new(options.poison),
            ropes: Tables::default(),
            threads,
        })
    }

    pub(crate) fn level(&self) -> Level {
        self.level
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn rope(&self, rope: Rope, head_dim: usize, positions: usize) -> Arc<Table> {
        self.ropes.get(rope, head_dim, positions)
    }

    /// A tensor's elements.
    pub(crate) fn real<'a>(&self, x: &'a Tensor) -> &'a [f32] {
        self.buffer(x)
    }

    #[allow(clippy::expect_used)]
    fn buffer<'a>(&self, x: &'a Tensor) -> &'a Buffer {
        x.storage().expect("the tape lets only tensors of this device through")
    }

    /// A tensor's storage for writing; copied first when someone else holds it too.
    #[allow(clippy::expect_used)]
    fn buffer_mut<'a>(&self, x: &'a mut Tensor) -> Result<&'a mut Buffer> {
        if x.is_shared() {
            let mut copy = self.pool.take(x.len())?;
            copy.copy_from_slice(self.real(x));
            *x = Tensor::from_storage(Arc::new(copy), x.shape(), x.dtype(), x.device().clone());
        }
        Ok(x.storage_mut().expect("this tensor is of this device and not shared"))
    }

    /// A real tensor on the storage given.
    pub(crate) fn tensor(&self, data: Buffer, shape: impl Into<Shape>, device: &Device) -> Tensor {
        Tensor::from_storage(Arc::new(data), shape, DType::F32, device.clone())
    }

    pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        match &self.threads {
            Some(threads) => threads.install(f),
            None => f(),
        }
    }

    /// Continues the sum in `acc`, or starts one at zero, and lets `f` add to it.
    fn accumulate(
        &self,
        acc: Option<Tensor>,
        shape: impl Into<Shape>,
        device: &Device,
        f: impl FnOnce(&mut [f32]) -> Result<()> + Send,
    ) -> Result<Tensor> {
        let mut acc = match acc {
            Some(acc) => acc,
            None => device.zeros(shape, DType::F32)?,
        };
        let sum = self.buffer_mut(&mut acc)?;
        self.run(|| f(sum))?;
        Ok(acc)
    }

    /// A new tensor that `f` writes in full.
    fn produce(
        &self,
        shape: impl Into<Shape>,
        device: &Device,
        f: impl FnOnce(&mut [f32]) + Send,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let mut out = self.pool.take(shape.len())?;
        self.run(|| f(&mut out));
        Ok(self.tensor(out, shape, device))
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({})", self.level.name())
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self) -> MemoryStats {
        self.pool.stats()
    }

    fn reset_peak(&self) {
        self.pool.reset_peak();
    }

    fn alloc(&self, len: usize, _: DType) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(self.pool.take(len)?))
    }

    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        let mut buffer = self.pool.take(data.len())?;
        buffer.copy_from_slice(data);
        Ok(Arc::new(buffer))
    }

    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>> {
        let mut buffer = self.pool.take(data.len())?;
        buffer.iter_mut().zip(data).for_each(|(b, x)| *b = *x as f32);
        Ok(Arc::new(buffer))
    }

    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        let mut buffer = self.pool.take(data.len())?;
        buffer.as_i32_mut().copy_from_slice(data);
        Ok(Arc::new(buffer))
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        if let Some(packed) = x.storage::<Packed>() {
            self.run(|| packed.unpack(0, out));
            return Ok(());
        }
        out.copy_from_slice(self.real(x));
        Ok(())
    }

    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>> {
        let mut values = vec![0.0; x.len()];
        self.download(x, &mut values)?;
        Ok(values.into_iter().map(f64::from).collect())
    }

    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>> {
        Ok(self.buffer(x).as_i32().to_vec())
    }

    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()> {
        if x.dtype() == DType::I32 {
            self.buffer_mut(x)?.as_i32_mut().fill(value as i32);
        } else {
            self.buffer_mut(x)?.fill(value);
        }
        Ok(())
    }

    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        let width = src.cols();
        let from = &self.real(src)[src_row * width..][..count * width];
        self.buffer_mut(dst)?[dst_row * width..][..count * width].copy_from_slice(from);
        Ok(())
    }

    fn copy_columns(
        &self,
        src: &Tensor,
        (row, column): (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        let (width, d) = (src.cols(), dst.cols());
        let from = self.real(src)[row * width..].chunks(width).take(count);
        let to = self.buffer_mut(dst)?[dst_row * d..].chunks_exact_mut(d);
        to.zip(from).for_each(|(to, from)| to.copy_from_slice(&from[column..column + d]));
        Ok(())
    }

    fn pack_weight(&self, w: &Tensor, format: WeightFormat) -> Result<Tensor> {
        let data = self.real(w);
        let packed = self.run(|| Packed::new(&self.pool, data, w.rows(), w.cols(), format))?;
        Ok(match packed {
            Some(packed) => {
                Tensor::from_storage(Arc::new(packed), w.shape(), w.dtype(), w.device().clone())
            }
            None => w.clone(),
        })
    }

    fn id_out_of_range(
        &self,
        ids: &Tensor,
        vocab: usize,
        ignore: Option<i32>,
    ) -> Result<Option<i32>> {
        let valid = |&&id: &&i32| (id >= 0 && (id as usize) < vocab) || Some(id) == ignore;
        Ok(self.buffer(ids).as_i32().iter().find(|id| !valid(id)).copied())
    }

    fn add(&self, mut acc: Tensor, x: &Tensor) -> Result<Tensor> {
        let (level, x) = (self.level, self.real(x));
        let sum = self.buffer_mut(&mut acc)?;
        self.run(|| elementwise::add(level, x, sum));
        Ok(acc)
    }

    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (rows, inner, width) = (x.rows(), x.cols(), w.rows());
        let (level, pool, device) = (self.level, &self.pool, x.device());
        let (x, bias) = (self.real(x), bias.map(|bias| self.real(bias)));
        let packed = w.storage::<Packed>();
        let mut y = self.pool.take(rows * width)?;
        self.run(|| -> Result<()> {
            if rows <= EXACT_ROWS && inner > 0 {
                match packed {
                    Some(packed) => packed.multiply_thin(level, pool, x, bias, &mut y)?,
                    None => {
                        let w = Plain { data: self.real(w), inner };
                        multiply_thin(level, w, x, inner, bias, &mut y, width);
                    }
                }
                return Ok(());
            }
            if let Some(bias) = bias {
                y.chunks_exact_mut(width).for_each(|y| y.copy_from_slice(bias));
            } else if packed.is_some() {
                y.fill(0.0);
            }
            match packed {
                Some(packed) => packed.multiply(pool, x, &mut y)?,
                None => {
                    let b = Matrix::new(self.real(w), width, inner).t();
                    multiply(Matrix::new(x, rows, inner), b, &mut y, bias.is_some());
                }
            }
            Ok(())
        })?;
        Ok(self.tensor(y, [rows, width], device))
    }

    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let (rows, width, inner) = (dy.rows(), dy.cols(), w.cols());
        let a = Matrix::new(self.real(dy), rows, width);
        let b = Matrix::new(self.real(w), width, inner);
        self.sum_product(a, b, [rows, inner], acc, dy.device())
    }

    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let (rows, width, inner) = (dy.rows(), dy.cols(), x.cols());
        let a = Matrix::new(self.real(dy), rows, width).t();
        let b = Matrix::new(self.real(x), rows, inner);
        self.sum_product(a, b, [width, inner], acc, dy.device())
    }

    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let x = self.real(dy);
        self.accumulate(acc, [dy.cols()], dy.device(), |sum| add_column_sums(x, sum))
    }

    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (width, rows) = (table.cols(), ids.len());
        let (table_data, ids) = (self.real(table), self.buffer(ids).as_i32());
        self.produce([rows, width], table.device(), |y| {
            embedding::forward(table_data, ids, width, y);
        })
    }

    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let (width, data, ids) = (dy.cols(), self.real(dy), self.buffer(ids).as_i32());
        self.accumulate(acc, [vocab, width], dy.device(), |sum| {
            embedding::backward(data, ids, width, pad, sum);
            Ok(())
        })
    }

    fn add_rms_norm_fwd(
        &self,
        h: &Tensor,
        delta: Option<&Tensor>,
        w: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (level, pool) = (self.level, &self.pool);
        let (x, delta, weights) = (self.real(h), delta.map(|x| self.real(x)), self.real(w));
        let (sum, y, rstd) = self.run(|| norm::forward(level, pool, x, delta, weights, eps))?;
        let device = h.device();
        let sum = sum.map_or_else(|| h.clone(), |sum| self.tensor(sum, h.shape(), device));
        Ok((sum, self.tensor(y, h.shape(), device), self.tensor(rstd, [h.rows()], device)))
    }

    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dh_out: Option<Tensor>,
        h: &Tensor,
        w: &Tensor,
        rstd: &Tensor,
        dw_acc: Option<Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let (level, pool) = (self.level, &self.pool);
        let add = dh_out.is_some();
        let mut dh = match dh_out {
            Some(dh) => dh,
            None => dy.device().uninit(h.shape(), DType::F32)?,
        };
        let (dy, x, weights, stats) = (self.real(dy), self.real(h), self.real(w), self.real(rstd));
        let dx = self.buffer_mut(&mut dh)?;
        let dw = self.accumulate(dw_acc, w.shape(), h.device(), |dw| {
            norm::backward(level, pool, dy, x, weights, stats, add, dx, dw)
        })?;
        Ok((dh, dw))
    }

    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor> {
        let mut y = self.pool.zeros(inputs.u.len())?;
        self.run(|| heads::forward(self, inputs, spec, &mut y))?;
        Ok(self.tensor(y, inputs.u.shape(), inputs.u.device()))
    }

    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads> {
        self.run(|| heads::backward(self, dy, inputs, spec))
    }

    fn log_gate_fwd(
        &self,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
        rows: usize,
    ) -> Result<Tensor> {
        let Some(any) = z.or(bias) else {
            return Err(Error::argument("log_gate", "neither logits nor a bias"));
        };
        let heads = z.map_or(any.len(), Tensor::cols);
        let (z, bias) = (z.map(|x| self.real(x)), bias.map(|x| self.real(x)));
        self.produce([rows, heads], any.device(), |y| elementwise::log_gate_fwd(z, bias, heads, y))
    }

    fn log_gate_bwd(
        &self,
        dy: &Tensor,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (data, z, bias) = (self.real(dy), z.map(|x| self.real(x)), bias.map(|x| self.real(x)));
        self.produce(dy.shape(), dy.device(), |dz| {
            elementwise::log_gate_bwd(data, z, bias, dy.cols(), dz);
        })
    }

    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        self.run(|| attention::forward(self, inputs, spec))
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&LayerPages],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
        match spec.weights {
            AttentionWeights::Softmax => self.run(|| attention::paged_forward(self, q, keys, spec)),
            AttentionWeights::StickBreaking => fox_tensor::gathered_attention(q, keys, spec),
        }
    }

    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        lse: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        self.run(|| attention::backward(self, d_out, inputs, o, lse, spec))
    }

    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        self.run(|| attention::stick::forward(self, inputs, spec))
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        self.run(|| attention::stick::backward(self, d_out, inputs, o, spec))
    }

    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        self.produce(inputs.x.shape(), inputs.x.device(), |y| gated_norm::forward(self, inputs, y))
    }

    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<HeadGrads> {
        self.run(|| gated_norm::backward(self, dy, inputs))
    }

    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        let (level, inner, data) = (self.level, x.cols() / 2, self.real(x));
        self.produce([x.rows(), inner], x.device(), |y| {
            elementwise::glu_fwd(level, data, inner, act, y);
        })
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        let (level, inner) = (self.level, x.cols() / 2);
        let (dy, data) = (self.real(dy), self.real(x));
        self.produce(x.shape(), x.device(), |dx| {
            elementwise::glu_bwd(level, dy, data, inner, act, dx);
        })
    }

    fn linear_cross_entropy(
        &self,
        x: &Tensor,
        w: &Tensor,
        labels: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<LossOut> {
        let (level, pool, device) = (self.level, &self.pool, x.device());
        let (data, table, labels) = (self.real(x), self.real(w), self.buffer(labels).as_i32());
        let weights = weights.map(|weights| self.real(weights));
        let mut losses = self.pool.take(labels.len())?;
        let grads = self.run(|| {
            loss::linear_cross_entropy(level, pool, data, table, labels, weights, &mut losses)
        })?;
        Ok(LossOut {
            loss: self.tensor(losses, [labels.len()], device),
            grads: grads.map(|grads| {
                let dx = self.tensor(grads.dx, x.shape(), device);
                (dx, self.tensor(grads.dw, w.shape(), device))
            }),
        })
    }

    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        let level = self.level;
        Ok(tensors
            .iter()
            .map(|x| {
                let x = self.real(x);
                self.run(|| elementwise::sum_squares(level, x))
            })
            .sum())
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        let (level, grad) = (self.level, self.real(grad));
        let param = self.buffer_mut(param)?;
        let (m, v) = (self.buffer_mut(m)?, self.buffer_mut(v)?);
        self.run(|| elementwise::adamw(level, param, grad, m, v, step));
        Ok(())
    }

    fn baseline_ops(&self) -> Result<&dyn BaselineOps> {
        Ok(self)
    }
}

impl Cpu {
    /// `a b` on top of `acc`, or alone.
    fn sum_product(
        &self,
        a: Matrix<'_>,
        b: Matrix<'_>,
        shape: [usize; 2],
        acc: Option<Tensor>,
        device: &Device,
    ) -> Result<Tensor> {
        match acc {
            None => self.produce(shape, device, |c| multiply(a, b, c, false)),
            Some(mut acc) => {
                let sum = self.buffer_mut(&mut acc)?;
                self.run(|| multiply(a, b, sum, true));
                Ok(acc)
            }
        }
    }
}
