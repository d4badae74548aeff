//! The FoX layer with all its options; the Transformer is the same layer with other options.
//!
//! ```text
//! q, uk, uv = x Wq^T, x Wk^T, x Wv^T                 a = sigmoid(x Wa^T) per head
//! k_t = norm(a_t uk_{t-1} + (1 - a_t) uk_t)          v_t the same, without a norm
//! log f = logsigmoid(x Wf^T + bf)                    c = cumsum(log f)
//! o_i = sum_j softmax_j(q_i . k_j / sqrt(d) + c_i - c_j) v_j
//! out = (rms(o) * sigmoid(x Wg^T)) Wo^T
//! ```
//!
//! In an encoder every position sees the whole sequence, and the bias is `-|c_i - c_j|`: the gates between two positions.
//!
//! With stick-breaking the weights are `b_ij prod_{j < l < i} (1 - b_il) exp(c_i - c_j)` over `j < i`, with
//! `b_ij = sigmoid(q_i . k_j / sqrt(d))`.

use std::sync::Arc;

use fox_cache::{LayerState, PagedState};
use fox_tensor::{
    Acp, Activation, AttentionSpec, AttentionWeights, DecodeMixer, LocalKeys, LogitBound,
    PagedSpec, ParamId, Result, Tape, Var,
};

use super::gate::Gate;
use super::projection::{Projection, rows_before};
use super::{DecayTime, ForgettingConfig, QkNorm};
use crate::Pruning;
use crate::config::ModelConfig;
use crate::mixers::{LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations};
use crate::observe::AttentionView;
use crate::params::Parameters;

/// One attention layer: its options and where its parameters are.
#[derive(Debug)]
pub struct ForgettingLayer {
    pub(super) options: ForgettingConfig,
    pub(super) head_dim: usize,
    pub(super) width: usize,
    pub(super) norm_eps: f32,
    pub(super) q: Projection,
    pub(super) k: Projection,
    pub(super) v: Projection,
    pub(super) gate: Gate,
    pub(super) output_gate: Option<ParamId>,
    pub(super) output_norm: Option<ParamId>,
    pub(super) sinks: Option<ParamId>,
    pub(super) o_proj: ParamId,
}

/// Projections of the input with one value per head, `[R, heads]`, where the layer has them.
struct HeadLogits {
    k_shift: Option<Var>,
    v_shift: Option<Var>,
    gate: Option<Var>,
}

impl ForgettingLayer {
    /// Declares the layer's parameters.
    pub(super) fn declare(
        config: &ModelConfig,
        options: &ForgettingConfig,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, std) = (config.hidden_size, config.initializer_range);
        let head_dim = options.head_width(width);
        let mut projection = |name: &str, heads: usize, shift: bool, norm: Option<&str>| {
            let dims = (heads * head_dim, width);
            let matrix = if shift { format!("{name}.linear") } else { name.to_string() };
            Projection {
                weight: layer.matrix(&matrix, dims, std),
                bias: options
                    .qkv_bias
                    .then(|| layer.vector(&format!("{matrix}.bias"), dims.0, 0.0)),
                shift: shift
                    .then(|| layer.matrix(&format!("{name}.shift_proj"), (heads, width), std)),
                norm: options.qk_norm.zip(norm).map(|(kind, name)| {
                    let len = match kind {
                        QkNorm::PerHead => dims.0,
                        QkNorm::Shared => head_dim,
                    };
                    layer.vector(&format!("{name}.weight"), len, 1.0)
                }),
                heads,
                rope: options.rope.is_some() && norm.is_some(),
            }
        };
        let q = projection("q_proj", options.heads, false, Some("q_norm"));
        let k = projection("k_proj", options.kv_heads, options.k_shift, Some("k_norm"));
        let v = projection("v_proj", options.kv_heads, options.v_shift, None);
        let gate = Gate::declare(options, width, std, layer);
        let inner = options.heads * head_dim;
        let output_gate =
            options.output_gate.map(|_| layer.matrix("ogate_proj", (inner, width), std));
        let o_proj = layer.matrix("o_proj", (width, inner), std);
        let output_norm =
            options.output_norm.then(|| layer.vector("output_norm.weight", inner, 1.0));
        let sinks = options.sink.then(|| layer.vector("sinks", options.heads, 0.0));
        ForgettingLayer {
            options: options.clone(),
            head_dim,
            width,
            norm_eps: config.norm_eps as f32,
            q,
            k,
            v,
            gate,
            output_gate,
            output_norm,
            sinks,
            o_proj,
        }
    }

    /// The options.
    pub fn options(&self) -> &ForgettingConfig {
        &self.options
    }

    /// The projections that make the logits.
    pub(crate) fn query_and_key(&self) -> (&Projection, &Projection) {
        (&self.q, &self.k)
    }
}

impl Mixer for ForgettingLayer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let (params, segments) = (context.params, context.segments);
        let (prev_k, prev_v) = match &state {
            Some(state) => state.last()?,
            None => (None, None),
        };
        let (prev_k, prev_v) = (prev_k.map(Var::constant), prev_v.map(Var::constant));
        let earlier = tape.preceding_rows().filter(|_| state.is_none());
        let logits = self.head_logits(tape, x, params)?;
        let uq = self.raw(tape, x, &self.q, params)?;
        let q = self.prepare(tape, &uq, &self.q, context, None, None)?;
        let uk = self.raw(tape, x, &self.k, params)?;
        let uv = self.raw(tape, x, &self.v, params)?;
        let (shift_k, shift_v) = (logits.k_shift.as_ref(), logits.v_shift.as_ref());
        let (before_k, before_v) = match &earlier {
            None => (prev_k, prev_v),
            Some(earlier) => rows_before(tape, &**earlier, [(shift_k, &uk), (shift_v, &uv)])?,
        };
        let mut k = self.prepare(tape, &uk, &self.k, context, shift_k, before_k.as_ref())?;
        let mut v = self.prepare(tape, &uv, &self.v, context, shift_v, before_v.as_ref())?;
        k = self.gate.scale_keys(tape, k, segments, params)?;
        let mut log_gates = self.gate.log_gates(tape, x, logits.gate.as_ref(), params)?;
        let new = (k.value(), v.value());
        let (gates, raw) = (log_gates.as_ref().map(Var::value), (uk.value(), uv.value()));
        match state {
            Some(LayerState::Paged(state)) => {
                state.append(new, gates, raw, segments)?;
                let o = self.attend_pages(tape, &q, state, context)?;
                let z = self.output_logits(tape, x, params)?;
                let y = self.gate_output(tape, o, z.as_ref(), params)?;
                let out = tape.linear(&y, &params.var(self.o_proj), None)?;
                return Ok(MixerOutput { out, tiles: None });
            }
            Some(LayerState::Rows(state)) => {
                state.append(new, gates, raw, segments)?;
                k = Var::constant(state.keys().clone());
                v = Var::constant(state.values().clone());
                log_gates = state.log_gates().cloned().map(Var::constant);
            }
            Some(LayerState::Recurrent(_) | LayerState::Blocks(_)) | None => {}
        }
        let weights = self.options.weights;
        let mut spec = AttentionSpec {
            heads: self.options.heads,
            kv_heads: self.options.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            mask: self.options.mask,
            window: self.options.window,
            acp: self.pruning(context),
            segments: segments.clone(),
            full_sequence: None,
        };
        let mut gate_logits = None;
        if let Some(earlier) = earlier {
            let (bound, q) = (&self.logit_bound(context), q.value());
            let own =
                LocalKeys { q, k: &k, v: &v, log_gates: log_gates.as_ref(), spec: &spec, bound };
            let pending = earlier.begin_keys(tape, &own)?;
            // Keys travel meanwhile.
            gate_logits = self.output_logits(tape, x, params)?;
            let with = pending(tape)?;
            (k, v, log_gates, spec) = (with.k, with.v, with.log_gates, with.spec);
        }
        let gates = log_gates.as_ref();
        let (o, tiles) = match self.sinks {
            None => tape.attend(weights, &q, &k, &v, gates, &spec)?,
            Some(id) => tape.sink_attention([&q, &k, &v], gates, &params.var(id), &spec)?,
        };
        if let Some((observer, layer)) = context.observer {
            let log_gates = log_gates.as_ref().map(Var::value);
            let (q, k, tiles) = (q.value(), k.value(), &tiles);
            let view = AttentionView { layer, weights, q, k, log_gates, spec: &spec, tiles };
            observer.attention(&view)?;
        }
        if gate_logits.is_none() {
            gate_logits = self.output_logits(tape, x, params)?;
        }
        let y = self.gate_output(tape, o, gate_logits.as_ref(), params)?;
        let out = tape.linear(&y, &params.var(self.o_proj), None)?;
        Ok(MixerOutput { out, tiles: Some(tiles) })
    }

    fn saved_activations(&self) -> SavedActivations {
        let (heads, width) = (self.options.heads, self.options.heads * self.head_dim);
        let (mut kept, mut cheap) = (0, 0);
        for p in [&self.q, &self.k, &self.v] {
            let raw = p.heads * self.head_dim;
            let shift = if p.shift.is_some() { p.heads } else { 0 };
            kept += raw + if p.is_prepared() { raw + shift } else { 0 };
            cheap += if p.is_prepared() { raw } else { 0 };
        }
        kept += match self.gate {
            Gate::None => 0,
            Gate::Projected { .. } => 2 * heads,
            Gate::Shared { .. } => 1 + 2 * heads,
            Gate::Constant { .. } => heads,
            // Products, their sums per head and channel, and scaled keys.
            Gate::KeyScale { heads, head_dim, .. } => heads + 3 * heads * head_dim,
        };
        // The output and the statistic of every row.
        kept += width + heads;
        if self.output_gate.is_some() {
            kept += width;
        }
        if self.output_gate.is_some() || self.output_norm.is_some() {
            kept += width;
            cheap += width;
        }
        SavedActivations { per_token: kept, cheap_per_token: cheap }
    }

    fn decode_weights(
        &self,
        params: &Parameters,
        thresholds: Option<Arc<[f64]>>,
    ) -> Option<DecodeMixer> {
        self.slot_weights(params, thresholds)
    }

    fn gate_biases(&self, time: DecayTime) -> Vec<(ParamId, Vec<f32>)> {
        match self.gate {
            Gate::Projected { bias, .. } => vec![(bias, time.gate_biases(self.options.heads))],
            Gate::Shared { bias, .. } => vec![(bias, time.gate_biases(1))],
            Gate::None | Gate::Constant { .. } | Gate::KeyScale { .. } => Vec::new(),
        }
    }

    fn attention(&self) -> Option<&ForgettingLayer> {
        Some(self)
    }
}

impl ForgettingLayer {
    /// Attention over the pages of the cache, `[R, H * d]`.
    fn attend_pages(
        &self,
        tape: &mut Tape<'_>,
        q: &Var,
        state: &PagedState,
        context: &MixerContext<'_>,
    ) -> Result<Var> {
        let spec = PagedSpec {
            weights: self.options.weights,
            heads: self.options.heads,
            kv_heads: self.options.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.options.window,
            thresholds: state.thresholds(),
            sinks: self.sinks.map(|id| context.params.value(id).clone()),
            reflected: false,
            segments: context.segments.clone(),
        };
        tape.paged_attention(q, &state.pages(), &spec)
    }

    /// The projections that have one value per head, as one group.
    fn head_logits(&self, tape: &mut Tape<'_>, x: &Var, params: &Parameters) -> Result<HeadLogits> {
        let gate = match self.gate {
            Gate::Projected { weight, .. } => Some(weight),
            _ => None,
        };
        let ids = [self.k.shift, self.v.shift, gate];
        let weights: Vec<Var> = ids.iter().flatten().map(|id| params.var(*id)).collect();
        let mut outs = match weights.is_empty() {
            true => Vec::new(),
            false => tape.linear_group(x, &weights)?,
        }
        .into_iter();
        let [k_shift, v_shift, gate] = ids.map(|id| id.and_then(|_| outs.next()));
        Ok(HeadLogits { k_shift, v_shift, gate })
    }

    /// The projection of the output gate `[R, H * d]`, where there is one.
    fn output_logits(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        params: &Parameters,
    ) -> Result<Option<Var>> {
        self.output_gate.map(|id| tape.linear(x, &params.var(id), None)).transpose()
    }

    /// `rms(o) * act(z)`, each factor when the layer has it.
    fn gate_output(
        &self,
        tape: &mut Tape<'_>,
        o: Var,
        z: Option<&Var>,
        params: &Parameters,
    ) -> Result<Var> {
        if self.output_norm.is_none() && z.is_none() {
            return Ok(o);
        }
        let norm = self.output_norm.map(|id| params.var(id));
        let act = self.options.output_gate.unwrap_or(Activation::Sigmoid);
        tape.gated_norm(&o, norm.as_ref(), z, self.options.heads, self.norm_eps, act)
    }

    fn pruning(&self, context: &MixerContext<'_>) -> Acp {
        let stick = self.options.weights == AttentionWeights::StickBreaking;
        let tolerance = match context.pruning {
            // Softmax without gates: nothing decays, so there is nothing to prune.
            _ if !self.options.gate.forgets() && !stick => return Acp::Off,
            Pruning::Off => return Acp::Off,
            Pruning::Auto => return Acp::auto(),
            Pruning::Tolerance(tolerance) => tolerance,
            Pruning::Config => match self.options.log_pruning_tolerance {
                Some(tolerance) => tolerance as f32,
                None => return Acp::Off,
            },
        };
        // A stick needs no bound on the logits.
        let bound = if stick { LogitBound::Norms } else { self.logit_bound(context) };
        Acp::On { log_tolerance: tolerance, bound }
    }

    fn logit_bound(&self, context: &MixerContext<'_>) -> LogitBound {
        match (self.q.norm, self.k.norm) {
            (Some(q), Some(k)) => LogitBound::QkNorm {
                q: context.params.value(q).clone(),
                k: context.params.value(k).clone(),
            },
            _ => LogitBound::Norms,
        }
    }
}
