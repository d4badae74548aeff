//! What can be said about a request before it runs: whether it makes sense, and what it needs at worst.

use fox_cache::{Budget, CacheMeter, SequenceCost};
use fox_model::Model;

use crate::{EngineOptions, Refusal, Request};

/// What can be said about requests without running them.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub vocab: usize,
    max_context: usize,
    pub budget: Budget,
}

impl Plan {
    /// For a model whose caches `meter` counts.
    pub fn new(model: &Model, options: &EngineOptions, meter: &CacheMeter) -> Plan {
        let config = model.config();
        let cost = SequenceCost::new(config.state_specs(), options.prefill_chunk, model.device());
        Plan {
            vocab: config.vocab_size,
            max_context: options.max_context,
            budget: Budget::new(options.cache_bytes, meter.clone(), cost),
        }
    }

    /// Whether the request can run at all.
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
        let (needed, budget) = (self.worst_case(request), self.budget.limit());
        if needed > budget {
            return Err(Refusal::NeverFits { needed, budget });
        }
        Ok(())
    }

    /// Bytes of cache the request may need from its beginning on.
    pub fn worst_case(&self, request: &Request) -> usize {
        self.budget.cost().worst_case(request.prompt.len() + request.max_tokens)
    }
}
