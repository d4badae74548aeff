//! Query, key and value projections, and the preparation of their heads: token shift, norm, RoPE.

use fox_tensor::{HeadSpec, ParamId, PrecedingRows, Result, Rope, Tape, Var};

use super::layer::ForgettingLayer;
use crate::mixers::MixerContext;
use crate::params::Parameters;

/// A query, key or value projection and the preparation of its heads.
#[derive(Debug)]
pub(crate) struct Projection {
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    pub(super) shift: Option<ParamId>,
    pub norm: Option<ParamId>,
    pub heads: usize,
    pub(super) rope: bool,
}

impl Projection {
    pub(super) fn is_prepared(&self) -> bool {
        self.shift.is_some() || self.norm.is_some() || self.rope
    }
}

impl ForgettingLayer {
    /// A raw projection `[R, heads * d]`.
    pub(super) fn raw(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        p: &Projection,
        params: &Parameters,
    ) -> Result<Var> {
        tape.linear(x, &params.var(p.weight), p.bias.map(|id| params.var(id)).as_ref())
    }

    /// The heads of a raw projection, `[R, heads * d]`: shifted, from the rows `before`, and normalized.
    pub(super) fn prepare(
        &self,
        tape: &mut Tape<'_>,
        u: &Var,
        p: &Projection,
        context: &MixerContext<'_>,
        shift: Option<&Var>,
        before: Option<&Var>,
    ) -> Result<Var> {
        if !p.is_prepared() {
            return Ok(u.clone());
        }
        let faded = |rope: Rope| match context.rope_strength {
            Some(strength) => Rope { strength, ..rope },
            None => rope,
        };
        let rope = self.options.rope.filter(|_| p.rope).map(faded);
        let spec = HeadSpec {
            heads: p.heads,
            head_dim: self.head_dim,
            norm_eps: self.options.qk_norm_eps as f32,
            rope,
            segments: context.segments.clone(),
        };
        let norm = p.norm.map(|id| context.params.var(id));
        tape.prepare_heads(u, shift, before, norm.as_ref(), &spec)
    }
}

/// The rows of raw keys and values before the first one of every segment, which are on another rank, where they are
/// shifted. Both travel together.
pub(super) fn rows_before(
    tape: &mut Tape<'_>,
    earlier: &dyn PrecedingRows,
    raw: [(Option<&Var>, &Var); 2],
) -> Result<(Option<Var>, Option<Var>)> {
    let shifted: Vec<&Var> =
        raw.iter().filter(|(shift, _)| shift.is_some()).map(|(_, u)| *u).collect();
    if shifted.is_empty() {
        return Ok((None, None));
    }
    let mut rows = earlier.preceding_rows(tape, &shifted)?.into_iter();
    let [k, v] = raw.map(|(shift, _)| shift.and_then(|_| rows.next()));
    Ok((k, v))
}
