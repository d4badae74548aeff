//! Validation of requests before they are queued.

use fox_cache::{Budget, CacheMeter, SequenceCost, StateSpec};
use fox_model::Model;

use crate::{EngineOptions, Refusal, Request};

/// Limits that every request is checked against.
#[derive(Clone, Debug)]
pub(crate) struct RequestLimits {
    pub vocab: usize,
    max_context: usize,
    pub budget: Budget,
    /// Tokens of a prefill chunk.
    pub prefill_chunk: usize,
    /// Whether the model evicts pages, so that sequences may need less than the full cache.
    evicts: bool,
}

impl RequestLimits {
    /// For a model whose caches `meter` counts.
    pub fn new(model: &Model, options: &EngineOptions, meter: &CacheMeter) -> RequestLimits {
        let config = model.config();
        let cost = SequenceCost::new(config.state_specs(), options.prefill_chunk, model.device());
        let gated = |spec: StateSpec| matches!(spec, StateSpec::Attention(spec) if spec.gated);
        RequestLimits {
            prefill_chunk: options.prefill_chunk,
            evicts: options.eviction.log_tolerance().is_some()
                && config.state_specs().into_iter().any(gated),
            vocab: config.vocab_size,
            max_context: options.max_context,
            budget: Budget::new(options.cache_bytes, meter.clone(), cost),
        }
    }

    /// Checks a request.
    pub fn check(&self, request: &Request) -> Result<(), Refusal> {
        let vocab = self.vocab;
        if request.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        let bad = |id: i32| usize::try_from(id).map_or(true, |id| id >= vocab);
        if let Some(position) = request.prompt.iter().position(|&id| bad(id)) {
            return Err(Refusal::UnknownToken { position, id: request.prompt[position], vocab });
        }
        let (prompt, max_tokens) = (request.prompt.len(), request.max_tokens);
        if prompt.saturating_add(max_tokens) > self.max_context {
            return Err(Refusal::TooLong { prompt, max_tokens, max_context: self.max_context });
        }
        request.sampling.check()?;
        if let Some((id, value)) = request.logit_bias.iter().find(|b| bad(b.0) || !b.1.is_finite())
        {
            let rule = format!("must be numbers for ids below {vocab}, not {value} for {id}");
            return Err(Refusal::Parameter { parameter: "logit_bias", rule });
        }
        let (needed, budget) = (self.least(request), self.budget.limit());
        if needed > budget {
            return Err(Refusal::NeverFits { needed, budget });
        }
        Ok(())
    }

    /// Lower bound on the cache bytes of the request.
    fn least(&self, request: &Request) -> usize {
        let (cost, tokens) = (self.budget.cost(), request.prompt.len() + request.max_tokens);
        if self.evicts { cost.least(tokens, self.prefill_chunk) } else { cost.worst_case(tokens) }
    }
}
