//! The trait's methods, each handed to the file that knows how.

use std::sync::Arc;

use fox_tensor::{
    Activation, AdamW, AttentionGrads, AttentionInputs, AttentionOut, AttentionSpec, Backend,
    BaselineOps, DType, DecodeOut, DecodeStep, Error, GatedNormInputs, HeadGrads, HeadInputs,
    HeadSpec, LayerPages, LossOut, MemoryStats, NewKeys, OpTime, PagedSpec, ParamUpdate, Result,
    Storage, Tensor, WeightFormat,
};

use super::Cuda;

impl Backend for Cuda {
    fn name(&self) -> &str {
        self.name
    }

    fn description(&self) -> String {
        format!("{}, {}", self.gpu.name(), self.activations())
    }

    fn activation_type(&self) -> DType {
        self.activations()
    }

    fn has_page_kernels(&self) -> bool {
        true
    }

    fn decode_batch(&self) -> usize {
        super::thin::MAX_BATCH
    }

    fn prefers_memory(&self) -> bool {
        true
    }

    fn memory(&self) -> MemoryStats {
        self.gpu.memory()
    }

    fn free_memory(&self) -> Option<usize> {
        self.gpu.free_memory().ok()
    }

    fn reset_peak(&self) {
        self.gpu.reset_peak();
    }

    fn synchronize(&self) -> Result<()> {
        Ok(self.gpu.synchronize()?)
    }

    fn profile(&self, on: bool) {
        self.set_profiling(on);
    }

    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(self.op_times()?)
    }

    fn alloc(&self, len: usize, dtype: DType) -> Result<Arc<dyn Storage>> {
        Ok(self.alloc_storage(len, dtype)?)
    }

    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        Ok(self.upload_f32(data)?)
    }

    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>> {
        let data: Vec<f32> = data.iter().map(|&x| x as f32).collect();
        Ok(self.upload_f32(&data)?)
    }

    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        Ok(self.upload_ints(data)?)
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        Ok(self.download_into(x, out)?)
    }

    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>> {
        Ok(self.download_f32(x)?.into_iter().map(f64::from).collect())
    }

    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>> {
        Ok(self.ints(x)?.to_vec())
    }

    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()> {
        Ok(self.timed("fill", || self.fill_with(x, value))?)
    }

    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        Ok(self.timed("copy_rows", || self.copy_some_rows(src, src_row, dst, dst_row, count))?)
    }

    fn id_out_of_range(
        &self,
        ids: &Tensor,
        vocab: usize,
        ignore: Option<i32>,
    ) -> Result<Option<i32>> {
        Ok(self.bad_id(ids, vocab, ignore)?)
    }

    fn add(&self, acc: Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(self.timed("add", || self.add_to(acc, x))?)
    }

    fn pack_weight(&self, w: &Tensor, format: WeightFormat) -> Result<Tensor> {
        match format {
            WeightFormat::F32 => Ok(self.in_halves(w)?),
            _ => Err(Error::Unsupported {
                device: self.name.to_string(),
                what: "weights in fewer bits",
            }),
        }
    }

    fn linear_fwd(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let op = if w.rows() <= 64 { "narrow linear fwd" } else { "linear fwd" };
        Ok(self.timed(op, || self.linear(x, w, bias))?)
    }

    fn linear_bwd_input(&self, dy: &Tensor, w: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let op = if w.rows() <= 64 { "narrow linear bwd input" } else { "linear bwd input" };
        Ok(self.timed(op, || self.linear_input_gradient(dy, w, acc))?)
    }

    fn linear_bwd_weight(&self, dy: &Tensor, x: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        let op = if dy.cols() <= 64 { "narrow linear bwd weight" } else { "linear bwd weight" };
        Ok(self.timed(op, || self.linear_weight_gradient(dy, x, acc))?)
    }

    fn linear_bwd_bias(&self, dy: &Tensor, acc: Option<Tensor>) -> Result<Tensor> {
        Ok(self.timed("linear bwd bias", || self.bias_gradient(dy, acc))?)
    }

    fn linear_group_fwd(&self, x: &Tensor, weights: &[&Tensor]) -> Result<Option<Vec<Tensor>>> {
        if !self.is_group(x, weights) {
            return Ok(None);
        }
        Ok(Some(self.timed("narrow linear fwd", || self.group_forward(x, weights))?))
    }

    fn linear_group_bwd_input(
        &self,
        dys: &[&Tensor],
        weights: &[&Tensor],
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        let work = || self.group_input_gradient(dys, weights, acc);
        Ok(self.timed("narrow linear bwd input", work)?)
    }

    fn linear_group_bwd_weight(
        &self,
        dys: &[&Tensor],
        x: &Tensor,
        accs: Vec<Option<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let work = || self.group_weight_gradients(dys, x, accs);
        Ok(self.timed("narrow linear bwd weight", work)?)
    }

    fn embedding_fwd(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        Ok(self.timed("embedding fwd", || self.look_up(table, ids))?)
    }

    fn embedding_bwd(
        &self,
        dy: &Tensor,
        ids: &Tensor,
        vocab: usize,
        pad: Option<usize>,
        acc: Option<Tensor>,
    ) -> Result<Tensor> {
        Ok(self.timed("embedding bwd", || self.look_up_gradient(dy, ids, vocab, pad, acc))?)
    }

    fn add_rms_norm_fwd(
        &self,
        h: &Tensor,
        delta: Option<&Tensor>,
        w: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        Ok(self.timed("add_rms_norm fwd", || self.norm_forward(h, delta, w, eps))?)
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
        let work = || self.norm_backward(dy, dh_out, h, w, rstd, dw_acc, None);
        Ok(self.timed("add_rms_norm bwd", work)?)
    }

    fn add_rms_norm_bwd_again(
        &self,
        dy: &Tensor,
        dh_out: Option<Tensor>,
        (h, _): (&Tensor, f32),
        w: &Tensor,
        rstd: &Tensor,
        dw_acc: Option<Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let y = self.uninit(h.shape(), self.activations(), h.device())?;
        let work = || self.norm_backward(dy, dh_out, h, w, rstd, dw_acc, Some(&y));
        let (dh, dw) = self.timed("add_rms_norm bwd", work)?;
        Ok((dh, dw, y))
    }

    fn prepare_heads_fwd(&self, inputs: &HeadInputs<'_>, spec: &HeadSpec) -> Result<Tensor> {
        Ok(self.timed("prepare_heads fwd", || self.prepare_forward(inputs, spec))?)
    }

    fn prepare_heads_bwd(
        &self,
        dy: &Tensor,
        inputs: &HeadInputs<'_>,
        spec: &HeadSpec,
    ) -> Result<HeadGrads> {
        let op = match inputs.shift {
            Some(_) => "prepare_heads bwd, shifted",
            None => "prepare_heads bwd",
        };
        Ok(self.timed(op, || self.prepare_backward(dy, inputs, spec))?)
    }

    fn log_gate_fwd(
        &self,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
        rows: usize,
    ) -> Result<Tensor> {
        Ok(self.timed("log_gate fwd", || self.gate_forward(z, bias, rows))?)
    }

    fn log_gate_bwd(
        &self,
        dy: &Tensor,
        z: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        Ok(self.timed("log_gate bwd", || self.gate_backward(dy, z, bias))?)
    }

    fn attention_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        Ok(self.timed("attention fwd", || self.attend(inputs, spec))?)
    }

    fn write_pages(&self, new: &NewKeys<'_>, pages: &mut LayerPages, len: usize) -> Result<()> {
        Ok(self.timed("write_pages", || self.append_to_pages(new, pages, len))?)
    }

    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&LayerPages],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
        Ok(self.timed("paged_attention", || self.attend_pages(q, keys, spec))?)
    }

    fn attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        o: &Tensor,
        lse: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        Ok(self.timed("attention bwd", || self.attend_gradients(d_out, inputs, o, lse, spec))?)
    }

    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        Ok(self.timed("stick-breaking fwd", || self.break_sticks(inputs, spec))?)
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        _o: &Tensor,
        spec: &AttentionSpec,
    ) -> Result<AttentionGrads> {
        Ok(self.timed("stick-breaking bwd", || self.stick_gradients(d_out, inputs, spec))?)
    }

    fn gated_norm_fwd(&self, inputs: &GatedNormInputs<'_>) -> Result<Tensor> {
        Ok(self.timed("gated_norm fwd", || self.gated_forward(inputs))?)
    }

    fn gated_norm_bwd(&self, dy: &Tensor, inputs: &GatedNormInputs<'_>) -> Result<HeadGrads> {
        Ok(self.timed("gated_norm bwd", || self.gated_backward(dy, inputs))?)
    }

    fn gated_norm_bwd_again(
        &self,
        dy: Tensor,
        inputs: &GatedNormInputs<'_>,
    ) -> Result<(HeadGrads, Tensor)> {
        Ok(self.timed("gated_norm bwd", || self.gated_backward_again(dy, inputs))?)
    }

    fn glu_fwd(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        Ok(self.timed("glu fwd", || self.glu_forward(x, act))?)
    }

    fn glu_bwd(&self, dy: &Tensor, x: &Tensor, act: Activation) -> Result<Tensor> {
        Ok(self.timed("glu bwd", || self.glu_backward(dy, x, act))?)
    }

    fn glu_bwd_again(&self, dy: Tensor, x: Tensor, act: Activation) -> Result<(Tensor, Tensor)> {
        Ok(self.timed("glu bwd", || self.glu_backward_again(dy, x, act))?)
    }

    fn linear_cross_entropy(
        &self,
        x: &Tensor,
        w: &Tensor,
        labels: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<LossOut> {
        Ok(self.timed("cross-entropy", || self.cross_entropy(x, w, labels, weights))?)
    }

    fn decode_step(&self, step: DecodeStep<'_>) -> Result<Option<DecodeOut>> {
        Ok(self.timed("decode step", || self.decode(step))?)
    }

    fn sum_squares(&self, tensors: &[&Tensor]) -> Result<f64> {
        Ok(self.timed("sum_squares", || self.squares(tensors))?)
    }

    fn adamw(
        &self,
        param: &mut Tensor,
        grad: &Tensor,
        m: &mut Tensor,
        v: &mut Tensor,
        step: &AdamW,
    ) -> Result<()> {
        self.adamw_all(&mut [ParamUpdate { param, grad, m, v, step: *step }])
    }

    fn adamw_all(&self, updates: &mut [ParamUpdate<'_>]) -> Result<()> {
        Ok(self.timed("adamw", || self.adamw_steps(updates))?)
    }

    fn baseline_ops(&self) -> Result<&dyn BaselineOps> {
        Ok(self)
    }
}
