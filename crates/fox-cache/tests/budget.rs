//! The budget: admitted sequences can run to the end, and the limit is never exceeded.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use common::{Toy, attention, recurrent};
use fox_cache::{Budget, Cache, PagePolicy, SequenceCost, StateSpec};
use fox_tensor::Device;
use proptest::prelude::*;

/// Tokens that a step brings, at most.
const STEP: usize = 40;

fn toy(specs: Vec<StateSpec>) -> Toy {
    let bounds: Vec<Option<Vec<f64>>> = specs.iter().map(|_| Some(vec![0.5; 4])).collect();
    let policy = PagePolicy::forgetting(&bounds, -2.0, 1000);
    // The first head forgets within a page, the last one nothing.
    Toy { specs, policy, device: Device::naive(), decay: |head| [0.5, 0.1, 0.02, 0.0][head] }
}

/// A sequence that may get to `total` tokens.
struct Running {
    id: usize,
    cache: Cache,
    total: usize,
}

impl Running {
    fn outstanding(&self, budget: &Budget) -> usize {
        budget.cost().outstanding(self.cache.lens()[0], &self.cache.pages(0), self.total)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn limit_is_never_exceeded(
        // Tokens, and whether a kept state is continued.
        wanted in prop::collection::vec((1usize..600, prop::bool::ANY), 1..12),
        window in prop::option::of(30usize..200),
        gated in prop::bool::ANY,
        limit in 20usize..60,
    ) {
        let toy = toy(vec![attention(4, 4, gated, window), recurrent(), attention(4, 1, true, None)]);
        let cost = SequenceCost::new(toy.specs.clone(), STEP, &toy.device);
        let page = cost.worst_case(1) - cost.fixed();
        let meter = toy.policy.meter().clone();
        let budget = Budget::new(limit * page / 4, meter.clone(), cost);
        let (mut running, mut kept): (Vec<Running>, Vec<(usize, Cache)>) = (vec![], vec![]);
        let mut wanted = wanted.into_iter().enumerate().peekable();
        while wanted.peek().is_some() || !running.is_empty() {
            while let Some(&(id, (tokens, shares))) = wanted.peek() {
                let demand = running.iter().map(|r: &Running| r.outstanding(&budget));
                let worst = budget.cost().worst_case(tokens);
                if !budget.make_room(demand, worst, || kept.pop().is_some()) {
                    // With nothing running and nothing cached it can never fit.
                    if running.is_empty() {
                        prop_assert!(worst > budget.limit());
                        wanted.next();
                        continue;
                    }
                    break;
                }
                wanted.next();
                let shared = kept.iter().rfind(|(_, c)| shares && c.lens()[0] < tokens);
                let (id, cache) = match shared {
                    Some((id, cache)) => (*id, cache.clone()),
                    None => (id, toy.cache()),
                };
                running.push(Running { id, cache, total: tokens });
            }
            for r in &mut running {
                let left = r.total - r.cache.lens()[0];
                toy.step(&mut r.cache, &[r.id], &[left.min(1 + r.id * 7 % STEP)]);
                prop_assert!(meter.bytes() <= budget.limit());
            }
            // A state is kept at some point if there is room for what is not shared.
            if let Some(r) = running.iter().find(|r| r.cache.lens()[0] % 3 == 0) {
                let demand = running.iter().map(|r| r.outstanding(&budget));
                let fixed = budget.cost().fixed();
                if budget.make_room(demand, fixed, || kept.pop().is_some()) {
                    kept.push((r.id, r.cache.clone()));
                }
            }
            running.retain(|r| r.cache.lens()[0] < r.total);
        }
        prop_assert!(meter.peak() <= budget.limit());
        drop(kept);
        prop_assert_eq!(meter.bytes(), 0);
    }
}

#[test]
fn window_bounds_outstanding_pages() {
    // The first head drops its pages at once, the others keep those of the window.
    let toy = toy(vec![attention(4, 4, true, Some(128))]);
    let cost = SequenceCost::new(toy.specs.clone(), STEP, &toy.device);
    let page = (cost.worst_case(1) - cost.fixed()) / 4;
    let mut cache = toy.cache();
    while cache.lens()[0] < 640 {
        toy.step(&mut cache, &[0], &[STEP]);
    }
    let held: Vec<usize> = cache.pages(0)[0].iter().map(|(held, _)| *held).collect();
    assert!(held[0] < held[3], "{held:?}");
    // 168 keys of window and step: three pages, two at the ends, and one that may be a copy.
    let want: usize = held.iter().map(|held| (6 - held) * page).sum();
    assert_eq!(cost.outstanding(640, &cache.pages(0), 100_000), want);
}
