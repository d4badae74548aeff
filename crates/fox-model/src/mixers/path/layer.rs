//! One layer of PaTH attention.
//!
//! ```text
//! q, k, v = x Wq^T, x Wk^T, x Wv^T                  w = l2(silu(conv(x Ww^T)))         b = 2 sigmoid(x Wb^T + bb)
//! M_t = I - b_t w_t w_t^T                           log f = logsigmoid(x Wf^T + bf)    c = cumsum(log f)
//! s_ij = (q_i^T M_i M_{i-1} ... M_{j+1} k_j + c_i - c_j) / sqrt(d)
//! out = (sum_j softmax_j(s_ij) v_j) Wo^T
//! ```
//!
//! The forget gate is inside the scale, unlike that of FoX. The log gates that the ops and the KV cache see are those of
//! the scores, `log f / sqrt(d)`.

use fox_cache::bound::{Source, logit_bounds};
use fox_cache::{AttentionStateSpec, LayerState, PagedState};
use fox_tensor::{
    Acp, AttentionSpec, AttentionWeights, HeadSpec, LogitBound, Mask, PagedSpec, ParamId, PathVars,
    Result, Tape, Var,
};

use super::PathConfig;
use crate::Pruning;
use crate::config::ModelConfig;
use crate::mixers::forgetting::{DecayTime, QK_NORM_EPS};
use crate::mixers::{LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations, ShortConv};
use crate::params::{Init, Parameters};

/// Inside the square root of the norm of reflections.
const L2_EPS: f32 = 1e-6;

/// Rank of the projection of reflections.
const RANK: usize = 32;

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct PathLayer {
    options: PathConfig,
    head_dim: usize,
    q_proj: ParamId,
    k_proj: ParamId,
    v_proj: ParamId,
    /// One matrix, or two factors of one of low rank.
    w_proj: Vec<ParamId>,
    w_conv: Option<ShortConv>,
    /// Weight and bias of the strengths of reflections.
    strength: (ParamId, ParamId),
    /// Weight and bias.
    gate: Option<(ParamId, ParamId)>,
    /// Weights `[d]` of queries and keys.
    norms: Option<(ParamId, ParamId)>,
    o_proj: ParamId,
}

impl PathLayer {
    /// Declares the layer's parameters.
    pub fn declare(
        config: &ModelConfig,
        options: &PathConfig,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, d, std) =
            (config.hidden_size, options.head_dim(config), config.initializer_range);
        let (heads, kv_width) = (options.heads, options.kv_heads * d);
        let q_proj = layer.matrix("q_proj", (heads * d, width), std);
        let k_proj = layer.matrix("k_proj", (kv_width, width), std);
        let v_proj = layer.matrix("v_proj", (kv_width, width), std);
        let w_proj = match options.low_rank {
            true => vec![
                layer.matrix("w_proj.0", (RANK, width), std),
                layer.matrix("w_proj.1", (kv_width, RANK), std),
            ],
            false => vec![layer.matrix("w_proj", (kv_width, width), std)],
        };
        let w_conv = options.conv.map(|conv| {
            let init = Init::Normal { std, zero_row: None };
            let bias = conv.bias.then_some(Init::Constant(0.0));
            ShortConv::declare_with("w_conv1d", (kv_width, conv.taps), (init, bias), None, 0, layer)
        });
        let mut biased = |name: &str, rows: usize| {
            let weight = layer.matrix(name, (rows, width), std);
            (weight, layer.vector(&format!("{name}.bias"), rows, 0.0))
        };
        let strength = biased("bt_proj", options.kv_heads);
        let gate = options.forget_gate.then(|| biased("g_proj", heads));
        let mut norm = |name: &str| layer.vector(name, d, 1.0);
        let norms =
            options.qk_norm.then(|| (norm("maybe_q_norm.weight"), norm("maybe_k_norm.weight")));
        PathLayer {
            options: options.clone(),
            head_dim: d,
            q_proj,
            k_proj,
            v_proj,
            w_proj,
            w_conv,
            strength,
            gate,
            norms,
            o_proj: layer.matrix("o_proj", (width, heads * d), std),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Reflections `[R, H_kv * d]`.
    fn reflections(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<Var> {
        let var = |id: ParamId| context.params.var(id);
        let mut y = x.clone();
        for id in &self.w_proj {
            y = tape.linear(&y, &var(*id), None)?;
        }
        if let Some(conv) = &self.w_conv {
            y = conv.forward(tape, &y, context, state.and_then(LayerState::recurrent))?;
        }
        let (weight, bias) = self.strength;
        let z = tape.linear(x, &var(weight), Some(&var(bias)))?;
        tape.reflection(&y, &z, L2_EPS)
    }

    /// A projection, and its norm by heads.
    fn project(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        (weight, norm): (ParamId, Option<ParamId>),
        heads: usize,
        context: &MixerContext<'_>,
    ) -> Result<Var> {
        let raw = tape.linear(x, &context.params.var(weight), None)?;
        let Some(norm) = norm else { return Ok(raw) };
        let spec = HeadSpec {
            heads,
            head_dim: self.head_dim,
            norm_eps: QK_NORM_EPS as f32,
            rope: None,
            segments: context.segments.clone(),
        };
        tape.prepare_heads(&raw, None, None, Some(&context.params.var(norm)), &spec)
    }

    /// Attention over the pages of the cache, `[R, H * d]`.
    fn attend_pages(
        &self,
        tape: &mut Tape<'_>,
        q: &Var,
        state: &PagedState,
        context: &MixerContext<'_>,
    ) -> Result<Var> {
        let spec = PagedSpec {
            weights: AttentionWeights::Softmax,
            heads: self.options.heads,
            kv_heads: self.options.kv_heads,
            head_dim: self.head_dim,
            scale: self.scale(),
            window: None,
            thresholds: state.thresholds(),
            sinks: None,
            reflected: true,
            segments: context.segments.clone(),
        };
        tape.paged_attention(q, &state.pages(), &spec)
    }

    fn pruning(&self, context: &MixerContext<'_>) -> Acp {
        let log_tolerance = match context.pruning {
            // Without gates no key loses its weight, so there is nothing to prune.
            _ if self.gate.is_none() => return Acp::Off,
            Pruning::Off => return Acp::Off,
            Pruning::Auto => return Acp::auto(),
            Pruning::Tolerance(tolerance) => tolerance,
            Pruning::Config => match self.options.log_pruning_tolerance {
                Some(tolerance) => tolerance as f32,
                None => return Acp::Off,
            },
        };
        let value = |id: ParamId| context.params.value(id).clone();
        let bound = match self.norms {
            Some((q, k)) => LogitBound::QkNorm { q: value(q), k: value(k) },
            None => LogitBound::Norms,
        };
        Acp::On { log_tolerance, bound }
    }
}

impl Mixer for PathLayer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        mut state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let (params, segments) = (context.params, context.segments);
        let (heads, kv_heads) = (self.options.heads, self.options.kv_heads);
        let (q_norm, k_norm) = self.norms.unzip();
        let q = self.project(tape, x, (self.q_proj, q_norm), heads, context)?;
        let mut k = self.project(tape, x, (self.k_proj, k_norm), kv_heads, context)?;
        let mut v = tape.linear(x, &params.var(self.v_proj), None)?;
        let mut u = self.reflections(tape, x, context, state.as_deref_mut())?;
        let mut log_gates = None;
        if let Some((weight, bias)) = self.gate {
            let (z, rows) = (tape.linear(x, &params.var(weight), None)?, x.value().rows());
            let bias = params.var(bias);
            log_gates = Some(tape.scaled_log_gate(Some(&z), Some(&bias), rows, self.scale())?);
        }
        let (new, gates) = ((k.value(), v.value()), log_gates.as_ref().map(Var::value));
        match state {
            Some(LayerState::Paged(state)) => {
                state.append_with(new, u.value(), gates, segments)?;
                let o = self.attend_pages(tape, &q, state, context)?;
                return Ok(tape.linear(&o, &params.var(self.o_proj), None)?.into());
            }
            Some(LayerState::Rows(state)) => {
                state.append_with(new, u.value(), gates, segments)?;
                k = Var::constant(state.keys().clone());
                v = Var::constant(state.values().clone());
                u = state.transitions().map_or(u, |all| Var::constant(all.clone()));
                log_gates = state.log_gates().cloned().map(Var::constant);
            }
            Some(LayerState::Recurrent(_) | LayerState::Blocks(_)) | None => {}
        }
        let spec = AttentionSpec {
            heads,
            kv_heads,
            head_dim: self.head_dim,
            scale: self.scale(),
            mask: Mask::Causal,
            window: None,
            acp: self.pruning(context),
            segments: segments.clone(),
            full_sequence: None,
        };
        let vars = PathVars { q: &q, k: &k, v: &v, u: &u, log_gates: log_gates.as_ref() };
        let (o, tiles) = tape.path_attention(&vars, &spec)?;
        let out = tape.linear(&o, &params.var(self.o_proj), None)?;
        Ok(MixerOutput { out, tiles: Some(tiles) })
    }

    fn saved_activations(&self) -> SavedActivations {
        let (heads, kv_heads, d) = (self.options.heads, self.options.kv_heads, self.head_dim);
        let (width, kv_width) = (heads * d, kv_heads * d);
        let (mut kept, mut cheap) = (width + 2 * kv_width, 0);
        if self.norms.is_some() {
            kept += width + kv_width;
            cheap += width + kv_width;
        }
        // Raw and convolved directions, their strengths, the reflections in f32.
        kept += if self.options.low_rank { RANK } else { 0 };
        kept += kv_width * if self.w_conv.is_some() { 2 } else { 1 } + kv_heads + 2 * kv_width;
        kept += if self.gate.is_some() { 2 * heads } else { 0 };
        // The output and the statistic of every row.
        SavedActivations { per_token: kept + width + heads, cheap_per_token: cheap }
    }

    /// A memory of T tokens forgets 1 / T nat per token after the scale.
    fn gate_biases(&self, time: DecayTime) -> Vec<(ParamId, Vec<f32>)> {
        let scale = f64::from(self.scale());
        let raw = DecayTime { min: time.min * scale, max: time.max * scale };
        self.gate.map(|(_, id)| (id, raw.gate_biases(self.options.heads))).into_iter().collect()
    }

    /// Reflections make neither queries nor keys longer, so the bound is that of plain attention.
    fn logit_bounds(
        &self,
        shape: &AttentionStateSpec,
        params: &Parameters,
        norm: ParamId,
    ) -> Result<Option<Vec<f64>>> {
        let source = |weight: ParamId, own: Option<ParamId>| match own {
            Some(id) => Source::Norm(params.value(id)),
            None => Source::Projection {
                weight: params.value(weight),
                bias: None,
                norm: params.value(norm),
            },
        };
        let (q_norm, k_norm) = self.norms.unzip();
        logit_bounds(shape, source(self.q_proj, q_norm), source(self.k_proj, k_norm))
    }
}
