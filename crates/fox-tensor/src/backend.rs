//! What a device must be able to do: memory, and the fused ops as forward / backward pairs.
//!
//! Backends may assume that shapes, types and segments were checked: the [`Tape`](crate::Tape) does
//! that once for all of them. `R` is a number of rows, `C` a width, as in [`crate::AttentionSpec`].
//!
//! A gradient that may add to one that exists already takes `acc: Option<Tensor>` and returns the
//! sum: the backend writes in place when nobody else holds `acc`.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::paged::copy_to_pages;
use crate::paged_attention::gathered_attention;
use crate::{
    Activation, AdamW, AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, BaselineOps,
    DType, DecodeOut, DecodeStep, Error, GatedNormInputs, HeadGrads, HeadInputs, HeadSpec,
    LayerPages, LossOut, MemoryStats, NewKeys, OpTime, PagedSpec, ParamUpdate, Result, Tensor,
};

/// Memory that belongs to a backend.
pub trait Storage: Any + Send + Sync {
    /// For looking at it as the backend's own type.
    fn as_any(&self) -> &dyn Any;
    /// For writing to it as the backend's own type.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// The label that is not predicted: its row has loss 0 and no gradient.
pub const IGNORE_LABEL: i32 = -100;

/// What a device without it says it lacks.
const STICK_BREAKING: &str = "stick-breaking attention";
const LINEAR_GROUP: &str = "groups of linear layers";

/// With at most this many rows, a row of a linear layer's result should depend on its own row of the
/// input alone, to the bit, not on the number of rows; the oracle and the CPU keep this.
pub const EXACT_ROWS: usize = 64;

/// How a weight matrix is kept for inference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// As it is.
    #[default]
    F32,
    /// Rounded to bfloat16: half the memory, and half the time where memory is the limit.
    Bf16,
    /// Rounded to 8 bits with a scale for every [`INT8_BLOCK`] values: about a quarter.
    Int8,
}

impl WeightFormat {
    /// Bytes per value, scales included.
    pub fn bytes_per_value(self) -> f64 {
        match self {
            WeightFormat::F32 => 4.0,
            WeightFormat::Bf16 => 2.0,
            WeightFormat::Int8 => 1.0 + 4.0 / INT8_BLOCK as f64,
        }
    }
}

/// Values of [`WeightFormat::Int8`] that share a scale.
pub const INT8_BLOCK: usize = 64;

/// A device's memory and ops.
pub trait Backend: Send + Sync + Debug {
    /// Short name for messages, e.g. `cpu`.
    fn name(&self) -> &str;
    /// The machine behind it in words, e.g. the GPU's name.
    fn description(&self) -> String {
        self.name().to_string()
    }
    /// The type of activations: what a decode state is kept in.
    fn activation_type(&self) -> DType {
        DType::F32
    }
    /// Whether a tape should compute cheap ops (norms, gated units) again in the backward rather than keep
    /// their results.
    fn prefers_memory(&self) -> bool {
        false
    }
    /// Waits until everything that was asked for is done. For measurements: ops that hand values to the
    /// host wait by themselves.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    /// Begins or ends noting the time of every op, where the device can tell.
    fn profile(&self, _on: bool) {}
    /// What was noted since the last call, the longest first; nothing where the device cannot tell.
    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(Vec::new())
    }
    /// Memory counters.
    fn memory(&self) -> MemoryStats;
    /// Bytes that can still be taken, where the device knows.
    fn free_memory(&self) -> Option<usize> {
        None
    }
    /// Lets the peak start again from what is in use now.
    fn reset_peak(&self);

    /// Room for `len` elements, contents unspecified.
    fn alloc(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>>;
    /// Host values to the device.
    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>>;
    /// Host values to the device, rounded to what it computes in.
    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>>;
    /// Host integers to the device.
    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>>;
    /// Real values to the host; `out` has the tensor's length.
    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()>;
    /// Real values to the host, in full precision.
    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>>;
    /// Integers to the host.
    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>>;
    /// Sets every element. A shared tensor gets storage of its own first.
    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()>;
    /// Copies `count` rows of equal width. A shared `dst` gets storage of its own first.
    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()>;

    /// Copies columns `column .. column + d` of `count` rows from `(row, column)` on into rows of `dst`
    /// `[.., d]`, where `d` divides `column` and the width of `src`. A shared `dst` gets storage of its
    /// own first.
    fn copy_columns(
        &self,
        src: &Tensor,
        (row, column): (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        let d = dst.cols();
        let parts = src.cols() / d;
        let src = src.reshape([src.rows() * parts, d])?;
        for r in 0..count {
            self.copy_rows(&src, (row + r) * parts + column / d, dst, dst_row + r, 1)?;
        }
        Ok(())
    }

    /// The first id that is neither in `0..vocab` nor equal to `ignore`.
    fn id_out_of_range(
        &self,
        ids: &Tensor,
        vocab: usize,
        ignore: Option<i32>,
    ) -> Result<Option<i32>>;

    /// `acc + x`, in place when `acc` is not shared.
    fn add(&self, acc: Tensor, x: &Tensor) -> Result<Tensor>;

    /// The weights `[N, K]` of linear layers in another format: for `linear_fwd` and downloads alone, but in
    /// F32 for everything, kept as the device likes it best.
    fn pack_weight(&self, w: &Tensor, format: WeightFormat) -> Result<Tensor> {
        match format {
            WeightFormat::F32 => Ok(w.clone()),
            _ => {
                let what = "weights in fewer bits";
                Err(Error::Unsupported { device: self.name().to_string(), what })
            }
        }
    }

    /// `y[R, N] = x[R, K] w[N, K]^T + bias[N]`; see [`EXACT_ROWS`].
    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;
    /// `dx[R, K] = dy[R, N] w[N, K] + acc`.
    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `dw[N, K] = dy[R, N]^T x[R, K] + acc`.
    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;
    /// `db[N] = sum_r dy[r] + acc`.
    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor>;

    /// `y_i[R, N_i] = x[R, K] w_i[N_i, K]^T` for several narrow weights, where the device does them faster
    /// together; `None` where they are better done one by one.
    fn linear_group_fwd(&self, _x: &Tensor, _weights: &[&Tensor]) -> Result<Option<Vec<Tensor>>> {
        Ok(None)
    }
    /// Of what `linear_group_fwd` did: `dx[R, K] = sum_i dy_i w_i + acc`, over at least one `i`.
    fn linear_group_bwd_input(
        &self,
        _dys: &[&Tensor],
        _weights: &[&Tensor],
        _acc: Option<Tensor>,
    ) -> Result<Tensor> {
        Err(Error::Unsupported { device: self.name().to_string(), what: LINEAR_GROUP })
    }
    /// Of what `linear_group_fwd` did: `dw_i[N_i, K] = dy_i^T x + acc_i`, at least one.
    fn linear_group_bwd_weight(
        &self,
        _dys: &[&Tensor],
        _x: &Tensor,
        _accs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        Err(Error::Unsupported { device: self.name().to_string(), what: LINEAR_GROUP })
    }

    /// Rows of `table[V, C]` for `ids[R]`; every id was checked to be in range.
    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor>;
    /// `dtable[V, C] = sum over rows r with ids[r] = v of dy[r]`, plus `acc`. Row `pad`, if given,
    /// gets no gradient.
    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor>;

    /// `h' = h + delta`, `y = h' / sqrt(mean(h'^2) + eps) * w`; all `[R, C]`, `w[C]`.
    /// Returns `(h', y, rstd[R])`; without `delta`, `h'` is `h` itself.
    fn add_rms_norm_fwd(
        &self,
        h: &Tensor,
        delta: Option<&Tensor>,
        w: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Tensor, Tensor)>;
    /// `(dh, dw)`: `dh` is the gradient of `h` and of `delta` alike, `dy` through the norm plus `dh_out`.
    fn add_rms_norm_bwd(
        &self,
        dy: &Tensor,
        dh_out: Option<Tensor>,
        h: &Tensor,
        w: &Tensor,
        rstd: &Tensor,
        dw_acc: Option<Tensor>,
    ) -> Result<(Tensor, Tensor)>;

    /// `add_rms_norm_bwd` that also gives `y` once more: `(dh, dw, y)`.
    fn add_rms_norm_bwd_again(
        &self,
        dy: &Tensor,
        dh_out: Option<Tensor>,
        (h, eps): (&Tensor, f32),
        w: &Tensor,
        rstd: &Tensor,
        dw_acc: Option<Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (_, y, _) = self.add_rms_norm_fwd(h, None, w, eps)?;
        let (dh, dw) = self.add_rms_norm_bwd(dy, dh_out, h, w, rstd, dw_acc)?;
        Ok((dh, dw, y))
    }

    /// Token shift, per-head RMS norm, RoPE: `[R, H * d]`.
    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor>;
    /// Gradients of `prepare_heads_fwd`; everything is recomputed from the inputs.
    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads>;

    /// `logsigmoid(z[R, H] + bias[H])`; without `z` the bias alone, repeated for `rows` rows.
    fn log_gate_fwd(
        &self,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
        rows: usize,
    ) -> Result<Tensor>;
    /// `dz[R, H]`, the gradient before the sum over rows that gives the bias its own.
    fn log_gate_bwd(
        &self,
        dy: &Tensor,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Tensor>;

    /// Softmax attention with forget gates; see [`AttentionSpec`].
    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut>;
    /// Gradients of `attention_fwd`, from its output and row statistics.
    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        lse: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads>;

    /// Stick-breaking attention, `o_i = sum_{j < i} w_ij v_j` over the keys that `i` sees but
    /// itself, with `w_ij = b_ij prod_{j < l < i} (1 - b_il) exp(c_i - c_j)` and
    /// `b_ij = sigmoid(q_i . k_j * scale)`. The weights of a row add up to at most 1 and are not
    /// normalised. The mask is causal. Blocks of keys are visited from the newest to the oldest; a
    /// block of queries stops where [`AttentionSpec::stick_tolerance`] lets all its rows.
    fn stick_breaking_fwd(
        &self,
        _inputs: &AttentionInputs<'_>,
        _spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        Err(Error::Unsupported { device: self.name().to_string(), what: STICK_BREAKING })
    }
    /// Gradients of `stick_breaking_fwd`, from its output.
    fn stick_breaking_bwd(
        &self,
        _d_out: &Tensor,
        _inputs: &AttentionInputs<'_>,
        _o: &Tensor,
        _spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        Err(Error::Unsupported { device: self.name().to_string(), what: STICK_BREAKING })
    }

    /// Whether attention over pages has kernels of its own: then pages hold the log gates, too, and nothing
    /// of a page is read that was not written.
    fn has_page_kernels(&self) -> bool {
        false
    }

    /// Writes new keys, values and gates into pages from position `len` on; there is room for them that
    /// nobody shares.
    fn write_pages(&self, new: &NewKeys<'_>, pages: &mut LayerPages, len: usize) -> Result<()> {
        copy_to_pages(new, pages, len)
    }

    /// Attention of `q: [R, H * d]` over pages: `keys[s]` belongs to segment `s`. A sequence's result depends
    /// on its own rows and pages alone, to the bit.
    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&LayerPages],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
        gathered_attention(q, keys, spec)
    }

    /// `rms_groups(x; norm) * act(gate)`, either part optional.
    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor>;
    /// Gradients of `gated_norm_fwd`.
    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<HeadGrads>;

    /// `gated_norm_bwd` that also gives the output once more, in place of `dy` where nobody else holds it.
    fn gated_norm_bwd_again(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<(HeadGrads, Tensor)> {
        Ok((self.gated_norm_bwd(&dy, inputs)?, self.gated_norm_fwd(inputs)?))
    }

    /// `act(g) * u` for `x = [g | u]` of shape `[R, 2 I]`.
    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor>;
    /// `dx[R, 2 I]`.
    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor>;
    /// `glu_bwd` that also gives the output once more: `(dx, y)`, in place of `x` and `dy` where nobody else
    /// holds them.
    fn glu_bwd_again(&self, dy: Tensor, x: Tensor, act: Activation) -> Result<(Tensor, Tensor)> {
        Ok((self.glu_bwd(&dy, &x, act)?, self.glu_fwd(&x, act)?))
    }

    /// Cross-entropy of `softmax(x[R, C] w[V, C]^T)` against `labels[R]`, never holding all logits.
    /// A label is a valid index or [`IGNORE_LABEL`]. With `weights[R]`, also the gradient of the
    /// weighted sum of losses.
    fn linear_cross_entropy(
        &self,
        x: &Tensor,
        w: &Tensor,
        labels: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<LossOut>;

    /// Sequences that a decode step takes at once, at most.
    fn decode_batch(&self) -> usize {
        EXACT_ROWS
    }

    /// One decode step of a whole model, where the device has a faster way than op by op; `None` where it
    /// has not, with nothing changed.
    fn decode_step(&self, _step: DecodeStep<'_>) -> Result<Option<DecodeOut>> {
        Ok(None)
    }

    /// Sum of squares over all tensors, in f64 and in fixed order.
    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64>;
    /// One AdamW update of `param` and its moments.
    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()>;

    /// `adamw` of many parameters, in one launch where the device counts launches.
    fn adamw_all(&self, updates: &mut [ParamUpdate<'_>]) -> Result<()> {
        for u in updates {
            self.adamw(u.param, u.grad, u.m, u.v, &u.step)?;
        }
        Ok(())
    }

    /// The ops that only the baselines need; an error on a device without them.
    fn baseline_ops(&self) -> Result<&dyn BaselineOps> {
        let what = "the recurrent models";
        Err(Error::Unsupported { device: self.name().to_string(), what })
    }
}
