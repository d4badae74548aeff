//! The decode state of a model and its eviction policy.

use fox_cache::bound::{Source, logit_bounds};
use fox_cache::{AttentionStateSpec, Cache, PagePolicy, StateSpec};
use fox_tensor::{Error as TensorError, ParamId, Result as TensorResult};

use crate::mixers::forgetting::{ForgettingLayer, Projection};
use crate::params::Parameters;
use crate::{Error, Model, Result};

impl Model {
    /// An error for encoders, which have no decode state.
    pub(crate) fn check_causal(&self) -> Result<()> {
        if self.config().is_encoder() { Err(Error::Encoder) } else { Ok(()) }
    }

    /// An empty decode state for `batch` sequences with room for `capacity` tokens each.
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<Cache> {
        self.check_causal()?;
        Ok(Cache::new(self.config().state_specs(), batch, capacity, self.device())?)
    }

    /// An empty decode state of one sequence in pages; see [`Model::page_policy`].
    pub fn new_paged_cache(&self, policy: &PagePolicy) -> Result<Cache> {
        self.check_causal()?;
        Ok(Cache::paged(self.config().state_specs(), policy, self.device())?)
    }

    /// The eviction policy of this model's paged caches: none, or keys with at most a fraction of `e^log_tolerance` of any
    /// later softmax over at most `max_context` keys.
    pub fn page_policy(
        &self,
        log_tolerance: Option<f32>,
        max_context: usize,
    ) -> Result<PagePolicy> {
        let Some(log_tolerance) = log_tolerance else { return Ok(PagePolicy::keep_all()) };
        if log_tolerance.is_nan() || log_tolerance >= 0.0 {
            let detail = format!("log_tolerance is {log_tolerance}, but must be below 0");
            return Err(TensorError::argument("page_policy", detail).into());
        }
        let bounds = self
            .mixers()
            .zip(self.config().state_specs())
            .map(|(layer, spec)| match (layer, spec) {
                ((mixer, norm), StateSpec::Attention(shape)) => {
                    mixer.logit_bounds(&shape, self.params(), norm)
                }
                _ => Ok(None),
            })
            .collect::<TensorResult<Vec<_>>>()?;
        Ok(PagePolicy::forgetting(&bounds, f64::from(log_tolerance), max_context))
    }
}

impl ForgettingLayer {
    /// Per query head, what no `|q . k| / sqrt(d)` exceeds. `norm` are the weights of the block's norm.
    pub(crate) fn logit_bounds(
        &self,
        shape: &AttentionStateSpec,
        params: &Parameters,
        norm: ParamId,
    ) -> TensorResult<Option<Vec<f64>>> {
        let source = |p: &Projection| match p.norm {
            Some(id) => Source::Norm(params.value(id)),
            None => Source::Projection {
                weight: params.value(p.weight),
                bias: p.bias.map(|id| params.value(id)),
                norm: params.value(norm),
            },
        };
        let (q, k) = self.query_and_key();
        logit_bounds(shape, source(q), source(k))
    }
}
