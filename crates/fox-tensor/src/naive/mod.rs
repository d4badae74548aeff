//! The oracle: every op in f64 with obvious loops. It is the documentation of what an op computes
//! and the answer that faster backends are compared with. Nothing here is meant to be fast.

mod attention;
mod baseline;
mod heads;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod pointwise;
mod stick;
mod storage;

use std::sync::Arc;

use attention::Attention;
pub use attention::{BM, BN};
use heads::Heads;
use norm::Gated;
use pointwise::Act;
use stick::StickBreaking;
use storage::{Meter, Values, int, matrix, maybe_matrix, maybe_real, real, values, values_mut};

use crate::{
    Activation, AdamW, AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, Backend,
    BaselineOps, DType, Device, Error, GatedNormInputs, HeadGrads, HeadInputs, HeadSpec, LossOut,
    MemoryStats, Result, Shape, Storage, Tensor,
};

/// The f64 backend. Memory it has handed out is poisoned with NaN until it is written.
#[derive(Debug, Default)]
pub struct Naive {
    meter: Arc<Meter>,
    thrifty: bool,
}

impl Naive {
    /// One that prefers memory to time, as a GPU does: for tests of the tape.
    pub fn thrifty() -> Self {
        Naive { thrifty: true, ..Naive::default() }
    }

    fn tensor(&self, device: &Device, data: Vec<f64>, shape: impl Into<Shape>) -> Tensor {
        storage::tensor(&self.meter, device, data, shape)
    }

    /// A tensor of the shape of `like`.
    fn like(&self, like: &Tensor, data: Vec<f64>) -> Tensor {
        self.tensor(like.device(), data, like.shape())
    }

    /// A gradient, added to the one that exists already.
    fn plus(&self, acc: Option<Tensor>, grad: Tensor) -> Result<Tensor> {
        match acc {
            Some(acc) => self.add(acc, &grad),
            None => Ok(grad),
        }
    }

    fn attention_out(
        &self,
        out: attention::Forward,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> AttentionOut {
        let device = inputs.q.device();
        let blocks = self.meter.store(Values::Int(out.blocks));
        AttentionOut {
            o: self.like(inputs.q, out.o),
            lse: self.tensor(device, out.lse, [inputs.q.rows(), spec.heads]),
            blocks: Tensor::from_storage(blocks, [spec.heads, 2], DType::I32, device.clone()),
        }
    }

    fn attention_grads(
        &self,
        grads: attention::Backward,
        inputs: &AttentionInputs<'_>,
    ) -> AttentionGrads {
        AttentionGrads {
            dq: self.like(inputs.q, grads.dq),
            dk: self.like(inputs.k, grads.dk),
            dv: self.like(inputs.v, grads.dv),
            dlog_gates: inputs.log_gates.map(|lf| self.like(lf, grads.dlog_gates)),
        }
    }

    /// Makes sure that nobody else holds the storage of `x`.
    fn unshare(&self, x: &mut Tensor) -> Result<()> {
        if x.is_shared() {
            let copy = self.meter.store(values(x)?.clone());
            *x = Tensor::from_storage(copy, x.shape(), x.dtype(), x.device().clone());
        }
        Ok(())
    }
}

fn heads<'a>(inputs: &HeadInputs<'a>, spec: &'a HeadSpec) -> Result<Heads<'a>> {
    Ok(Heads {
        u: matrix(inputs.u)?,
        shift: maybe_matrix(inputs.shift)?,
        prev: maybe_matrix(inputs.prev)?,
        norm: maybe_real(inputs.norm)?,
        spec,
    })
}

fn gated<'a>(inputs: &GatedNormInputs<'a>) -> Result<Gated<'a>> {
    Ok(Gated {
        x: matrix(inputs.x)?,
        norm: maybe_real(inputs.norm)?,
        gate: maybe_matrix(inputs.gate)?,
        groups: inputs.groups,
        eps: f64::from(inputs.eps),
        act: Act(inputs.act),
    })
}

impl Backend for Naive {
    fn name(&self) -> &str {
        "naive"
    }

    fn prefers_memory(&self) -> bool {
        self.thrifty
    }

    fn memory(&self) -> MemoryStats {
        self.meter.stats()
    }

    fn reset_peak(&self) {
        self.meter.reset_peak();
    }

    fn alloc(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(match dtype {
            DType::I32 => Values::Int(vec![i32::MIN; len]),
            DType::F32 | DType::Bf16 => Values::Real(vec![f64::NAN; len]),
        }))
    }

    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(Values::Real(data.iter().map(|&x| f64::from(x)).collect())))
    }

    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(Values::Real(data.to_vec())))
    }

    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        Ok(self.meter.store(Values::Int(data.to_vec())))
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        for (out, &x) in out.iter_mut().zip(real(x)?) {
            *out = x as f32;
        }
        Ok(())
    }

    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>> {
        Ok(real(x)?.to_vec())
    }

    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>> {
        Ok(int(x)?.to_vec())
    }

    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()> {
        self.unshare(x)?;
        match values_mut(x)? {
            Values::Real(x) => x.fill(f64::from(value)),
            Values::Int(x) => x.fill(value as i32),
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
        self.unshare(dst)?;
        let cols = dst.cols();
        let (from, to) = (src_row * cols, dst_row * cols);
        match (values(src)?, values_mut(dst)?) {
            (Values::Real(src), Values::Real(dst)) => {
                dst[to..][..count * cols].copy_from_slice(&src[from..][..count * cols]);
            }
            (Values::Int(src), Values::Int(dst)) => {
                dst[to..][..count * cols].copy_from_slice(&src[from..][..count * cols]);
            }
            _ => src.expect_type("copy_rows", "src", dst.dtype())?,
        }
        Ok(())
    }

    fn id_out_of_range(
        &self,
        ids: &Tensor,
        vocab: usize,
        ignore: Option<i32>,
    ) -> Result<Option<i32>> {
        let valid = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab) || ignore == Some(id);
        Ok(int(ids)?.iter().copied().find(|&id| !valid(id)))
    }

    fn add(&self, mut acc: Tensor, x: &Tensor) -> Result<Tensor> {
        let x = real(x)?;
        self.unshare(&mut acc)?;
        if let Values::Real(acc) = values_mut(&mut acc)? {
            linear::axpy(acc, 1.0, x);
        }
        Ok(acc)
    }

    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let y = linear::forward(matrix(x)?, matrix(w)?, maybe_real(bias)?);
        Ok(self.tensor(x.device(), y, [x.rows(), w.rows()]))
    }

    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let dx = linear::backward_input(matrix(dy)?, matrix(w)?);
        self.plus(acc, self.tensor(dy.device(), dx, [dy.rows(), w.cols()]))
    }

    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let dw = linear::backward_weight(matrix(dy)?, matrix(x)?);
        self.plus(acc, self.tensor(dy.device(), dw, [dy.cols(), x.cols()]))
    }

    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let db = linear::backward_bias(matrix(dy)?);
        self.plus(acc, self.tensor(dy.device(), db, [dy.cols()]))
    }

    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let y = linear::embedding_forward(matrix(table)?, int(ids)?);
        Ok(self.tensor(table.device(), y, [ids.len(), table.cols()]))
    }

    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let dtable = linear::embedding_backward(matrix(dy)?, int(ids)?, vocab, pad);
        self.plus(acc, self.tensor(dy.device(), dtable, [vocab, dy.cols()]))
    }

    fn add_rms_norm_fwd(
        &self,
        h: &Tensor,
        delta: Option<&Tensor>,
        w: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (sum, y, rstd) =
            norm::add_forward(matrix(h)?, maybe_matrix(delta)?, real(w)?, f64::from(eps));
        let sum = if delta.is_some() { self.like(h, sum) } else { h.clone() };
        Ok((sum, self.like(h, y), self.tensor(h.device(), rstd, [h.rows()])))
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
        let dh_out = maybe_matrix(dh_out.as_ref())?;
        let (dh, dw) = norm::add_backward(matrix(dy)?, dh_out, matrix(h)?, real(w)?, real(rstd)?);
        Ok((self.like(h, dh), self.plus(dw_acc, self.like(w, dw))?))
    }

    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor> {
        Ok(self.like(inputs.u, heads(inputs, spec)?.forward()))
    }

    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads> {
        let grads = heads(inputs, spec)?.backward(matrix(dy)?);
        Ok(HeadGrads {
            du: self.like(inputs.u, grads.du),
            dshift: inputs.shift.map(|z| self.like(z, grads.dshift)),
            dnorm: inputs.norm.map(|w| self.like(w, grads.dnorm)),
        })
    }

    fn log_gate_fwd(
        &self,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
        rows: usize,
    ) -> Result<Tensor> {
        let y = pointwise::log_gate_forward(maybe_matrix(z)?, maybe_real(bias)?, rows);
        let Some(like) = z.or(bias) else {
            return Err(Error::argument("log_gate", "neither logits nor a bias"));
        };
        let heads = z.map_or(like.len(), Tensor::cols);
        Ok(self.tensor(like.device(), y, [rows, heads]))
    }

    fn log_gate_bwd(
        &self,
        dy: &Tensor,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dz = pointwise::log_gate_backward(matrix(dy)?, maybe_matrix(z)?, maybe_real(bias)?);
        Ok(self.like(dy, dz))
    }

    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        let out = Attention::new(inputs, spec)?.forward();
        Ok(self.attention_out(out, inputs, spec))
    }

    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        lse: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        let grads = Attention::new(inputs, spec)?.backward(matrix(d_out)?, matrix(o)?, real(lse)?);
        Ok(self.attention_grads(grads, inputs))
    }

    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        let out = StickBreaking::new(inputs, spec)?.forward();
        Ok(self.attention_out(out, inputs, spec))
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        _o: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        let grads = StickBreaking::new(inputs, spec)?.backward(matrix(d_out)?);
        Ok(self.attention_grads(grads, inputs))
    }

    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        Ok(self.like(inputs.x, gated(inputs)?.forward()))
    }

    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<HeadGrads> {
        let (dx, dgate, dnorm) = gated(inputs)?.backward(matrix(dy)?);
        Ok(HeadGrads {
            du: self.like(inputs.x, dx),
            dshift: inputs.gate.map(|z| self.like(z, dgate)),
            dnorm: inputs.norm.map(|w| self.like(w, dnorm)),
        })
    }

    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        let y = pointwise::glu_forward(matrix(x)?, Act(act));
        Ok(self.tensor(x.device(), y, [x.rows(), x.cols() / 2]))
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        Ok(self.like(x, pointwise::glu_backward(matrix(dy)?, matrix(x)?, Act(act))))
    }

    fn linear_cross_entropy(
        &self,
        x: &Tensor,
        w: &Tensor,
        labels: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<LossOut> {
        let (loss, grads) =
            loss::linear_cross_entropy(matrix(x)?, matrix(w)?, int(labels)?, maybe_real(weights)?);
        Ok(LossOut {
            loss: self.tensor(x.device(), loss, [x.rows()]),
            grads: grads.map(|(dx, dw)| (self.like(x, dx), self.like(w, dw))),
        })
    }

    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        tensors.iter().map(|x| real(x).map(|x| linear::dot(x, x))).sum()
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        for x in [&mut *param, &mut *m, &mut *v] {
            self.unshare(x)?;
        }
        if let (Values::Real(p), Values::Real(m), Values::Real(v)) =
            (values_mut(param)?, values_mut(m)?, values_mut(v)?)
        {
            optimizer::adamw(p, real(grad)?, m, v, step);
        }
        Ok(())
    }

    fn baseline_ops(&self) -> Result<&dyn BaselineOps> {
        Ok(self)
    }
}
