//! Steps: what they cost, and what they leave when they fail.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use common::{Toy, attention, recurrent};
use fox_cache::{Cache, FreeSlots, LayerState, PagePolicy, SlotSequence, StateSpec};
use fox_tensor::{Device, PAGE};

/// Layers of every kind, with different numbers of heads.
fn mixed() -> Vec<StateSpec> {
    vec![
        attention(4, 2, true, None),
        recurrent(),
        attention(2, 2, false, None),
        attention(3, 1, true, Some(90)),
    ]
}

fn toy(specs: Vec<StateSpec>, device: Device) -> Toy {
    let bounds: Vec<Option<Vec<f64>>> = specs.iter().map(|_| Some(vec![0.5; 8])).collect();
    let policy = PagePolicy::forgetting(&bounds, -2.0, 1000);
    Toy { specs, policy, device, decay: |head| [0.001, 0.4, 0.1, 0.2][head] }
}

/// Three sequences in steps of different lengths, joined and split on the way.
fn run(toy: &Toy) -> Cache {
    let mut caches: Vec<Cache> = (0..3).map(|_| toy.cache()).collect();
    toy.step(&mut caches[0], &[0], &[130]);
    toy.step(&mut caches[1], &[1], &[63]);
    let mut cache = Cache::join(caches).unwrap();
    for step in 0..40 {
        toy.step(&mut cache, &[0, 1, 2], &[1 + step % 3, step % 2, 1]);
    }
    cache
}

#[test]
fn step_downloads_once() {
    for layers in [1, 2, 7] {
        let specs = (0..layers).map(|_| attention(4, 2, true, None)).collect();
        let toy = toy(specs, Device::naive());
        let mut cache = Cache::join(vec![toy.cache(), toy.cache()]).unwrap();
        for counts in [[70, 3], [1, 1], [0, 5]] {
            let before = toy.device.downloads();
            toy.step(&mut cache, &[0, 1], &counts);
            assert_eq!(toy.device.downloads() - before, 1, "{layers} layers, {counts:?} tokens");
        }
    }
}

#[test]
fn sums_agree_between_devices() {
    // The oracle keeps gates in pages, the CPU does not.
    let (late, early) = (toy(mixed(), Device::naive()), toy(mixed(), fox_cpu::device()));
    let (mut a, mut b) = (run(&late), run(&early));
    let (late, early) = (late.contents(&mut a), early.contents(&mut b));
    assert_eq!(late.len(), early.len());
    for (late, early) in late.iter().zip(&early) {
        assert_eq!(late.len(), early.len());
        // Gates are added up page by page, or one after the other.
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * b.abs();
        assert!(late.iter().zip(early).all(close), "{late:?}\n{early:?}");
    }
    assert_eq!(a.pages(0), b.pages(0));
    let dropped: usize = a.pages(0).iter().flatten().map(|(_, dropped)| dropped).sum();
    assert!(dropped > 0, "{:?}", a.pages(0));
    assert_eq!(a.pages(0)[1], [(4, 0); 2], "without gates nothing goes");
}

/// Pages are reserved when the last one is full or before, and sealed then or when the next step has begun.
#[test]
fn slot_evicts_like_a_cache() {
    for (ahead, late) in [(0, 0), (20, 1)] {
        let specs = vec![attention(4, 2, true, None), attention(4, 2, false, Some(90))];
        let toy = toy(specs, Device::naive());
        let mut cache = toy.cache();
        toy.step(&mut cache, &[5], &[70]);
        let slot = FreeSlots::new(1).take().unwrap();
        let mut slot = SlotSequence::new(cache.clone(), slot).unwrap();
        assert_eq!(slot.past().len(), 2);
        let (mut sums, mut expected) = (Vec::new(), Vec::new());
        for len in 71..=320 + late {
            toy.step(&mut cache, &[5], &[1]);
            slot.advance();
            if (len + ahead) % PAGE == 0 {
                slot.reserve_page().unwrap();
            }
            if len % PAGE == 0 {
                // The device writes keys and gates into the pages and reports the sums of the gates.
                let own = cache.layers_mut().iter().flat_map(|layer| match layer {
                    LayerState::Paged(state) => state.sums()[0].to_vec(),
                    _ => Vec::new(),
                });
                sums = own.collect();
                let held = |(held, dropped): &(usize, usize)| (*held + 1, *dropped);
                let layers = cache.pages(0);
                let layers = layers.iter().map(|heads| heads.iter().map(held).collect());
                expected = layers.collect::<Vec<Vec<_>>>();
            }
            if len > PAGE + late && (len - late) % PAGE == 0 {
                slot.seal_page(&sums);
                assert_eq!(slot.page_counts(), expected, "{len} tokens, with a page reserved");
            }
        }
        assert_eq!((slot.len(), slot.usage().tokens), (320 + late, 320 + late));
        assert!(slot.page_counts()[0].iter().any(|(_, dropped)| *dropped > 0));
    }
}

#[test]
fn slot_rejects_batches_and_contiguous_caches() {
    let toy = toy(vec![attention(4, 2, true, None)], Device::naive());
    let error = |cache: Cache| {
        SlotSequence::new(cache, FreeSlots::new(1).take().unwrap()).unwrap_err().to_string()
    };
    let two = Cache::join(vec![toy.cache(), toy.cache()]).unwrap();
    assert_eq!(error(two), "a step has 1 sequences, but the cache has 2");
    let rows = Cache::new(toy.specs.clone(), 1, 8, &toy.device).unwrap();
    let expected = "only paged states can be put into a slot; make them with `Cache::paged`";
    assert_eq!(error(rows), expected);
}

#[test]
fn unfinished_step_changes_nothing() {
    for device in [Device::naive(), fox_cpu::device()] {
        let toy = toy(mixed(), device);
        let mut calm = run(&toy);
        let bytes = toy.policy.meter().bytes();
        let mut disturbed = run(&toy);
        let held = toy.policy.meter().bytes() - bytes;
        // A later layer failed: this step has no end.
        toy.layers(&mut disturbed, &[0, 1, 2], &[200, 1, 7]).unwrap();
        assert!(toy.policy.meter().bytes() > bytes + held, "pages were taken");
        // The first sequence has no new tokens now, so nothing writes over what was noted for it.
        for cache in [&mut calm, &mut disturbed] {
            toy.step(cache, &[0, 1, 2], &[0, 1, 1]);
        }
        assert!(toy.contents(&mut calm) == toy.contents(&mut disturbed));
        drop(calm);
        assert_eq!(toy.policy.meter().bytes(), held, "its pages went");
    }
}

#[test]
fn failed_commit_changes_nothing() {
    let toy = toy(vec![attention(4, 2, true, None)], Device::naive());
    let (mut calm, mut disturbed) = (toy.cache(), toy.cache());
    for cache in [&mut calm, &mut disturbed] {
        toy.step(cache, &[0], &[70]);
    }
    toy.layers(&mut disturbed, &[0], &[3]).unwrap();
    // The layers have written 3 tokens, not 9.
    assert!(disturbed.commit(&Toy::segments(&[9])).is_err());
    assert_eq!(disturbed.lens(), [70]);
    for cache in [&mut calm, &mut disturbed] {
        toy.step(cache, &[0], &[2]);
    }
    assert!(toy.contents(&mut calm) == toy.contents(&mut disturbed));
}

#[test]
fn rejects_mismatched_states() {
    let toy = toy(mixed(), Device::naive());
    let device = &toy.device;
    let words = |error: fox_cache::Error| error.to_string();
    let refuse = |batch, capacity| Cache::new(toy.specs.clone(), batch, capacity, device);
    assert_eq!(words(refuse(0, 1).unwrap_err()), "a cache needs at least one sequence");
    let huge = words(refuse(2, usize::MAX / 2).unwrap_err());
    assert!(huge.contains("is too large; ask for less"), "{huge}");
    let mut rows = refuse(2, 8).unwrap();
    let error = words(rows.begin(&Toy::segments(&[1])).unwrap_err());
    assert_eq!(error, "a step has 1 sequences, but the cache has 2");
    let error = words(Cache::join(vec![rows.clone(), rows.clone()]).unwrap_err());
    assert_eq!(error, "only paged states can be joined; make them with `Cache::paged`");
    assert!(rows.split().is_err());
    let shorter = Cache::paged(mixed()[..2].to_vec(), &toy.policy, device).unwrap();
    let error = words(Cache::join(vec![toy.cache(), shorter]).unwrap_err());
    assert!(error.starts_with("states with 4 and 2 layers"), "{error}");
}

#[test]
fn usage_equals_the_meter() {
    let toy = toy(mixed(), fox_cpu::device());
    let cache = run(&toy);
    let usage: Vec<_> = (0..3).map(|b| cache.usage(b)).collect();
    let bytes: usize = usage.iter().map(|usage| usage.bytes).sum();
    assert_eq!(bytes, toy.policy.meter().bytes());
    assert_eq!(usage[0].tokens, cache.lens()[0]);
    assert!(usage[0].full_bytes > usage[0].bytes);
}
