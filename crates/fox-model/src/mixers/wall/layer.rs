//! One layer of Wall attention.
//!
//! ```text
//! q, k, v = x Wq^T, x Wk^T, x Wv^T               q, k = rms(q), rms(k) per head, with QK-norm
//! g = logsigmoid(x Wg^T + bg)   per channel      lf = logsigmoid(x Ws^T + bs)   per head, with a scalar gate
//! s_ij = sum_n q_in k_jn exp(sum_{j < t <= i} g_tn) / sqrt(d) + sum_{j < t <= i} lf_t
//! out = (softmax(s) v * sigmoid(x Wo_gate^T)) Wo^T
//! ```

use fox_cache::{BlockState, LayerState};
use fox_tensor::{
    Acp, Activation, AttentionSpec, HeadSpec, LogitBound, Mask, ParamId, Result, Segments, Tape,
    Tensor, Var, WallBlock, WallVars,
};

use super::WallConfig;
use crate::Pruning;
use crate::config::ModelConfig;
use crate::mixers::forgetting::{DecayTime, QK_NORM_EPS};
use crate::mixers::{LayerParams, Mixer, MixerContext, MixerOutput, SavedActivations};

/// One layer: its options and where its parameters are.
#[derive(Debug)]
pub(super) struct WallLayer {
    options: WallConfig,
    head_dim: usize,
    q: Projection,
    k: Projection,
    v: Projection,
    /// Decays per channel: weight and bias.
    g_proj: (ParamId, ParamId),
    /// Forget gate per head: weight and bias.
    gs_proj: Option<(ParamId, ParamId)>,
    o_gate: Option<ParamId>,
    o_proj: ParamId,
}

/// A projection, its bias and the norm of its heads.
#[derive(Debug)]
struct Projection {
    weight: ParamId,
    bias: Option<ParamId>,
    norm: Option<ParamId>,
    heads: usize,
}

impl WallLayer {
    /// Declares the layer's parameters.
    pub fn declare(
        config: &ModelConfig,
        options: &WallConfig,
        layer: &mut LayerParams<'_>,
    ) -> Self {
        let (width, std) = (config.hidden_size, config.initializer_range);
        let head_dim = width / options.heads;
        let mut projection = |name: &str, heads: usize, norm: Option<&str>| {
            let rows = heads * head_dim;
            Projection {
                weight: layer.matrix(name, (rows, width), std),
                bias: options.qkv_bias.then(|| layer.vector(&format!("{name}.bias"), rows, 0.0)),
                norm: norm
                    .filter(|_| options.qk_norm)
                    .map(|name| layer.vector(&format!("{name}.weight"), rows, 1.0)),
                heads,
            }
        };
        let q = projection("q_proj", options.heads, Some("q_norm"));
        let k = projection("k_proj", options.kv_heads, Some("k_norm"));
        let v = projection("v_proj", options.kv_heads, None);
        let start = options.gate_init_bias as f32;
        let mut gate = |name: &str, rows: usize| {
            let weight = layer.matrix(name, (rows, width), std);
            (weight, layer.vector(&format!("{name}.bias"), rows, start))
        };
        let g_proj = gate("g_proj", width);
        let gs_proj = options.scalar_gate.then(|| gate("gs_proj", options.heads));
        WallLayer {
            options: options.clone(),
            head_dim,
            q,
            k,
            v,
            g_proj,
            gs_proj,
            o_gate: options.output_gate.then(|| layer.matrix("o_gate_proj", (width, width), std)),
            o_proj: layer.matrix("o_proj", (width, width), std),
        }
    }
}

impl Mixer for WallLayer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> Result<MixerOutput> {
        let q = self.project(tape, x, &self.q, context)?;
        let k = self.project(tape, x, &self.k, context)?;
        let v = self.project(tape, x, &self.v, context)?;
        let log_decays = log_gates(tape, x, self.g_proj, context)?;
        let log_gates = self.gs_proj.map(|ids| log_gates(tape, x, ids, context)).transpose()?;
        let (o, tiles) = match state {
            Some(LayerState::Blocks(state)) => {
                let new = Rows { k, v, log_decays, log_gates };
                (self.decode(tape, &q, new, state, context)?, None)
            }
            _ => {
                let log_gates = log_gates.as_ref();
                let (k, v, log_decays) = (&k, &v, &log_decays);
                let vars = WallVars { q: &q, k, v, log_decays, log_gates };
                let spec = self.spec(context, context.segments);
                let (o, tiles) = tape.wall_attention(&vars, &[], &spec)?;
                (o, Some(tiles))
            }
        };
        let o = match self.o_gate {
            None => o,
            Some(id) => {
                let z = tape.linear(x, &context.params.var(id), None)?;
                tape.gated_norm(&o, None, Some(&z), 1, 0.0, Activation::Sigmoid)?
            }
        };
        let out = tape.linear(&o, &context.params.var(self.o_proj), None)?;
        Ok(MixerOutput { out, tiles })
    }

    fn saved_activations(&self) -> SavedActivations {
        let (heads, width) = (self.options.heads, self.options.heads * self.head_dim);
        let (mut kept, mut cheap) = (0, 0);
        for p in [&self.q, &self.k, &self.v] {
            let raw = p.heads * self.head_dim;
            let normed = if p.norm.is_some() { raw } else { 0 };
            kept += raw + normed;
            cheap += normed;
        }
        // Logits and logarithms of decays and gates.
        kept += 2 * width + if self.gs_proj.is_some() { 2 * heads } else { 0 };
        // The output and the statistic of every row; the output gate's logits and result.
        kept += width + heads;
        if self.o_gate.is_some() {
            kept += 2 * width;
            cheap += width;
        }
        SavedActivations { per_token: kept, cheap_per_token: cheap }
    }

    /// The heads' memory lengths, with a gate per head; otherwise those of the channels of every head.
    fn gate_biases(&self, time: DecayTime) -> Vec<(ParamId, Vec<f32>)> {
        match self.gs_proj {
            Some((_, bias)) => vec![(bias, time.gate_biases(self.options.heads))],
            None => {
                let channels = time.gate_biases(self.head_dim);
                vec![(self.g_proj.1, channels.repeat(self.options.heads))]
            }
        }
    }
}

/// Keys of a step.
struct Rows {
    k: Var,
    v: Var,
    log_decays: Var,
    log_gates: Option<Var>,
}

/// `logsigmoid(x W^T + b)`.
fn log_gates(
    tape: &mut Tape<'_>,
    x: &Var,
    (weight, bias): (ParamId, ParamId),
    context: &MixerContext<'_>,
) -> Result<Var> {
    let z = tape.linear(x, &context.params.var(weight), None)?;
    tape.log_gate(Some(&z), Some(&context.params.var(bias)), x.value().rows())
}

impl WallLayer {
    /// `[R, heads * d]`, normalised where the layer does.
    fn project(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        p: &Projection,
        context: &MixerContext<'_>,
    ) -> Result<Var> {
        let var = |id: ParamId| context.params.var(id);
        let u = tape.linear(x, &var(p.weight), p.bias.map(var).as_ref())?;
        let Some(norm) = p.norm else { return Ok(u) };
        let spec = HeadSpec {
            heads: p.heads,
            head_dim: self.head_dim,
            norm_eps: QK_NORM_EPS as f32,
            rope: None,
            segments: context.segments.clone(),
        };
        tape.prepare_heads(&u, None, None, Some(&var(norm)), &spec)
    }

    fn spec(&self, context: &MixerContext<'_>, segments: &Segments) -> AttentionSpec {
        let on = |log_tolerance| Acp::On { log_tolerance, bound: self.logit_bound(context) };
        AttentionSpec {
            heads: self.options.heads,
            kv_heads: self.options.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            mask: Mask::Causal,
            window: self.options.window,
            acp: match context.pruning {
                Pruning::Off | Pruning::Config => Acp::Off,
                Pruning::Auto => Acp::auto(),
                Pruning::Tolerance(tolerance) => on(tolerance),
            },
            segments: segments.clone(),
            full_sequence: None,
        }
    }

    /// Decays only shrink a logit, so the bounds of plain attention hold.
    fn logit_bound(&self, context: &MixerContext<'_>) -> LogitBound {
        let value = |id: ParamId| context.params.value(id).clone();
        match (self.q.norm, self.k.norm) {
            (Some(q), Some(k)) => LogitBound::QkNorm { q: value(q), k: value(k) },
            _ => LogitBound::Norms,
        }
    }

    /// Attention over closed blocks and the rows after them; closes the blocks that the step fills.
    fn decode(
        &self,
        tape: &mut Tape<'_>,
        q: &Var,
        new: Rows,
        state: &mut BlockState,
        context: &MixerContext<'_>,
    ) -> Result<Var> {
        let mut rows = vec![new.k.value(), new.v.value(), new.log_decays.value()];
        rows.extend(new.log_gates.as_ref().map(Var::value));
        let open = state.append(&rows, context.segments)?;
        let constant = |index: usize| Var::constant(open.tensors[index].clone());
        let spec = AttentionSpec { acp: Acp::Off, ..self.spec(context, &open.segments) };
        let o = {
            let closed = state.closed();
            let past: Vec<Vec<WallBlock<'_>>> = closed
                .iter()
                .map(|blocks| blocks.iter().copied().filter_map(block_of).collect())
                .collect();
            let (k, v, log_decays) = (constant(0), constant(1), constant(2));
            let log_gates = new.log_gates.is_some().then(|| constant(3));
            let (k, v, log_decays, log_gates) = (&k, &v, &log_decays, log_gates.as_ref());
            let vars = WallVars { q, k, v, log_decays, log_gates };
            tape.wall_attention(&vars, &past, &spec)?.0
        };
        let device = tape.device().clone();
        state.stage(&open, |rows| {
            let (closed, decay) =
                device.backend().wall_close_block(&rows[0], &rows[2], self.head_dim)?;
            let mut tensors = vec![closed, rows[1].clone(), decay];
            tensors.extend(rows.get(3).cloned());
            Ok(tensors)
        })?;
        Ok(o)
    }
}

/// A closed block, as [`WallLayer::decode`] stages it.
fn block_of(tensors: &[Tensor]) -> Option<WallBlock<'_>> {
    let [k, v, decay, rest @ ..] = tensors else { return None };
    Some(WallBlock { k, v, decay, log_gates: rest.first() })
}
