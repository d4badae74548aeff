//! What a request needs, at worst, before it runs and while it runs.

use fox_model::{Model, paged_cache_bytes};
use fox_tensor::PAGE;

use crate::{EngineOptions, Refusal, Request};

/// What can be said about requests without running them.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub vocab: usize,
    max_context: usize,
    pub budget: usize,
    /// Bytes per sequence apart from pages.
    pub fixed: usize,
    /// Bytes of one page of every layer and key head; 0 in recurrent models.
    pub page: usize,
    /// The most pages of one head at any time, when a window limits them.
    most_pages: usize,
}

impl Plan {
    pub fn new(model: &Model, options: &EngineOptions) -> Plan {
        let config = model.config();
        let device = model.device();
        let bytes =
            |tokens: usize| paged_cache_bytes(config, device, tokens, options.prefill_chunk);
        let (fixed, page) = (bytes(0), bytes(1) - bytes(0));
        let most = bytes(usize::MAX / PAGE) - fixed;
        Plan {
            vocab: config.vocab_size,
            max_context: options.max_context,
            budget: options.cache_bytes,
            fixed,
            page,
            most_pages: most.checked_div(page).unwrap_or(0),
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
        let (needed, budget) = (self.worst_case(request), self.budget);
        if needed > budget {
            return Err(Refusal::NeverFits { needed, budget });
        }
        Ok(())
    }

    /// Bytes of cache the request may need from its beginning on.
    pub fn worst_case(&self, request: &Request) -> usize {
        self.fixed + self.future(request, 0, 0)
    }

    /// Bytes of pages that the request may still take after `len` tokens, of which the fullest head holds
    /// `held` pages. The last page counts again unless it is full: it is copied when it was shared.
    pub fn future(&self, request: &Request, len: usize, held: usize) -> usize {
        let total = request.prompt.len() + request.max_tokens;
        let new = total.div_ceil(PAGE) - (len / PAGE).min(total.div_ceil(PAGE));
        let room = (self.most_pages + 1).saturating_sub(held);
        self.page.saturating_mul(new.min(room))
    }
}
