//! The memory budget of decode states.
//!
//! Invariant: the bytes of all states plus the bytes promised to running sequences do not exceed the budget. An allocated
//! page moves from the second sum to the first; an evicted page leaves the first. A scheduler either promises a sequence
//! its worst case once, or asks before every step, which admits more sequences because most of them forget.

use fox_tensor::{Device, PAGE};

use crate::meter::CacheMeter;
use crate::spec::StateSpec;

/// The memory that sequences of a model may need.
#[derive(Clone, Debug)]
pub struct SequenceCost {
    fixed: usize,
    layers: Vec<LayerCost>,
}

/// Pages of one attention layer.
#[derive(Clone, Debug)]
struct LayerCost {
    kv_heads: usize,
    /// Bytes of one page of one head.
    page: usize,
    /// Largest number of pages of one head, if a window limits them.
    most: Option<usize>,
}

impl SequenceCost {
    /// The cost of a model with these layers and at most `step` new tokens per step.
    pub fn new(
        specs: impl IntoIterator<Item = StateSpec>,
        step: usize,
        device: &Device,
    ) -> SequenceCost {
        let mut cost = SequenceCost { fixed: 0, layers: Vec::new() };
        // The page that the window begins in, the one that it ends in, and those of the step.
        let most = |window: usize| window.saturating_add(step).div_ceil(PAGE) + 2;
        for spec in specs {
            match spec {
                StateSpec::Attention(spec) => {
                    cost.fixed += spec.last_bytes(device);
                    cost.layers.push(LayerCost {
                        kv_heads: spec.kv_heads,
                        page: spec.page_shape().page_bytes(device.backend()),
                        most: spec.window.map(most),
                    });
                }
                StateSpec::Recurrent(spec) => cost.fixed += spec.bytes(),
                StateSpec::Blocks(spec) => {
                    cost.fixed += spec.open_bytes();
                    let page = spec.block_bytes();
                    cost.layers.push(LayerCost { kv_heads: 1, page, most: spec.window.map(most) });
                }
            }
        }
        cost
    }

    /// Bytes per sequence apart from pages.
    pub fn fixed(&self) -> usize {
        self.fixed
    }

    /// Bytes that a sequence of `tokens` tokens may take, from its beginning on.
    pub fn worst_case(&self, tokens: usize) -> usize {
        let new = tokens.div_ceil(PAGE);
        let layer = |layer: &LayerCost| layer.kv_heads.saturating_mul(layer.future(new, 0));
        let pages = self.layers.iter().map(layer).fold(0, usize::saturating_add);
        self.fixed.saturating_add(pages)
    }

    /// Bytes that a sequence of `tokens` tokens takes even if it forgets all it can, when it is fed `step` tokens
    /// at a time: per head, the pages of a step and the two at its ends.
    pub fn least(&self, tokens: usize, step: usize) -> usize {
        let new = tokens.div_ceil(PAGE).min(step.div_ceil(PAGE) + 2);
        self.fixed.saturating_add(self.pages(new))
    }

    /// Bytes that the next `tokens` tokens of any sequence take at most, copies of shared pages included.
    pub fn step(&self, tokens: usize) -> usize {
        self.pages(tokens.div_ceil(PAGE) + 1)
    }

    /// Bytes of `count` pages of every head.
    fn pages(&self, count: usize) -> usize {
        let bytes = |layer: &LayerCost| layer.kv_heads.saturating_mul(layer.page);
        let page = self.layers.iter().map(bytes).fold(0, usize::saturating_add);
        page.saturating_mul(count)
    }

    /// Bytes of pages that a sequence of `len` tokens with these [page counts](crate::SequenceState::page_counts) may
    /// still take until it has `tokens` tokens. The last page counts again unless it is full: it is copied when it was
    /// shared.
    pub fn outstanding(&self, len: usize, pages: &[Vec<(usize, usize)>], tokens: usize) -> usize {
        let full = len / PAGE;
        let new = tokens.div_ceil(PAGE).saturating_sub(full);
        let layers = self.layers.iter().zip(pages);
        let heads = layers.flat_map(|(layer, heads)| heads.iter().map(move |head| (layer, head.0)));
        heads.map(|(layer, held)| layer.future(new, held)).fold(0, usize::saturating_add)
    }
}

impl LayerCost {
    /// Bytes of at most `new` pages of one head that holds `held`.
    fn future(&self, new: usize, held: usize) -> usize {
        let room = self.most.map_or(usize::MAX, |most| (most + 1).saturating_sub(held));
        self.page.saturating_mul(new.min(room))
    }
}

/// The byte budget of all decode states.
#[derive(Clone, Debug)]
pub struct Budget {
    limit: usize,
    meter: CacheMeter,
    cost: SequenceCost,
}

impl Budget {
    /// Of `limit` bytes, counted by `meter`, for sequences of one model.
    pub fn new(limit: usize, meter: CacheMeter, cost: SequenceCost) -> Budget {
        Budget { limit, meter, cost }
    }

    /// Bytes in all.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// What sequences take.
    pub fn cost(&self) -> &SequenceCost {
        &self.cost
    }

    /// Whether `bytes` more may be taken or promised beside the outstanding bytes of the running sequences. As long
    /// as they do not fit, `release` is called to free something; it returns whether it did.
    pub fn make_room(
        &self,
        outstanding: impl Iterator<Item = usize>,
        bytes: usize,
        mut release: impl FnMut() -> bool,
    ) -> bool {
        let wanted = outstanding.fold(bytes, usize::saturating_add);
        loop {
            if self.meter.bytes().saturating_add(wanted) <= self.limit {
                return true;
            }
            if !release() {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{AttentionStateSpec, RecurrentStateSpec};
    use fox_tensor::AttentionWeights;

    fn attention(window: Option<usize>) -> StateSpec {
        StateSpec::Attention(AttentionStateSpec {
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            gated: true,
            k_shift: true,
            v_shift: false,
            window,
            weights: AttentionWeights::Softmax,
            transition: 0,
            conv: None,
        })
    }

    /// Bytes of a page of one head on the CPU: keys and values, and the sums of two gates.
    const CPU_PAGE: usize = 64 * (2 * 8 * 4 + 2 * 8);

    #[test]
    fn worst_case_is_limited_by_the_window() {
        let device = fox_cpu::device();
        let recurrent = StateSpec::Recurrent(RecurrentStateSpec { convs: Vec::new(), scan: 10 });
        let specs = [attention(None), attention(Some(100)), recurrent];
        let cost = SequenceCost::new(specs, 28, &device);
        // The last raw keys of two layers, and the scan.
        assert_eq!(cost.fixed(), 2 * 16 * 4 + 40);
        assert_eq!(cost.worst_case(0), cost.fixed());
        assert_eq!(cost.worst_case(65), cost.fixed() + (2 + 2) * 2 * CPU_PAGE);
        // 128 keys of window and step lie in two pages and the two at the ends; one may be a copy.
        assert_eq!(cost.worst_case(6400), cost.fixed() + (100 + 5) * 2 * CPU_PAGE);
        assert_eq!(cost.worst_case(usize::MAX), usize::MAX);
    }

    #[test]
    fn least_case_has_the_pages_of_a_step() {
        let cost = SequenceCost::new([attention(None)], 64, &fox_cpu::device());
        assert_eq!(cost.least(40, 64), cost.fixed() + 2 * CPU_PAGE, "it has one page per head");
        assert_eq!(cost.least(64_000, 64), cost.fixed() + 3 * 2 * CPU_PAGE);
        assert_eq!(cost.least(64_000, 65), cost.fixed() + 4 * 2 * CPU_PAGE);
        assert_eq!((cost.step(1), cost.step(65)), (2 * 2 * CPU_PAGE, 3 * 2 * CPU_PAGE));
    }

    #[test]
    fn promises_count_beside_what_is_held() {
        let device = fox_cpu::device();
        let cost = SequenceCost::new([attention(None)], 64, &device);
        let meter = CacheMeter::default();
        let policy = crate::PagePolicy::keep_all();
        let pages = crate::Cache::paged([attention(None)], &policy, &device).unwrap().pages(0);
        let outstanding = cost.outstanding(0, &pages, 65);
        assert_eq!(outstanding, 4 * CPU_PAGE);
        let budget = Budget::new(10 * CPU_PAGE, meter.clone(), cost);
        let mut held = vec![meter.lease(CPU_PAGE), meter.lease(2 * CPU_PAGE)];
        let running = || std::iter::once(outstanding);
        let fits = |bytes: usize| budget.make_room(running(), bytes, || false);
        assert!(fits(3 * CPU_PAGE), "3 held, 4 promised, 3 new");
        assert!(!fits(3 * CPU_PAGE + 1));
        assert!(!fits(usize::MAX));
        // Something is released, one at a time, only as long as it is needed.
        assert!(budget.make_room(running(), 5 * CPU_PAGE, || held.pop().is_some()));
        assert_eq!(meter.bytes(), CPU_PAGE);
        assert!(!budget.make_room(running(), 7 * CPU_PAGE, || held.pop().is_some()));
        assert_eq!(meter.bytes(), 0);
    }
}
