//! Pages: sharing, counting, and the promise of eviction.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::sync::Arc;

use fox_base::difference::largest_error;
use fox_cache::{CacheMeter, EvictionRule, LayerPages};
use fox_tensor::cases::{PagedCase, PagedSequence};
use fox_tensor::naive::Naive;
use fox_tensor::{Device, NewKeys, PAGE, PageShape, PagedKeys, PagedSpec, write_pages};

/// The pages of one sequence of a case.
fn pages_of(case: &PagedCase, sequence: &PagedSequence, device: &Device) -> LayerPages {
    let mut pages = LayerPages::new(case.shape(), &CacheMeter::default());
    let (k, v, gates) = case.tensors(sequence, device).unwrap();
    let new = NewKeys {
        k: &k,
        v: &v,
        transitions: None,
        log_gates: gates.as_ref(),
        row: 0,
        count: k.rows(),
    };
    pages.append(&new, 0).unwrap();
    if gates.is_some() {
        pages.write_sums(0, k.rows(), &sequence.sums);
    }
    pages
}

#[test]
fn evicted_keys_have_at_most_the_tolerance() {
    let cpu = fox_cpu::device();
    let (mut dropped, log_tolerance) = (0, -5.0f64);
    for seed in 100..200 {
        let case = PagedCase::random(seed).unwrap();
        let norm = |x: &[f64]| {
            let rows = x.chunks(case.spec.head_dim);
            rows.map(|r| r.iter().map(|x| x * x).sum::<f64>().sqrt()).fold(0.0, f64::max)
        };
        let keys = case.sequences.iter().map(|s| norm(&s.k)).fold(0.0, f64::max);
        let bound = norm(&case.q) * keys * f64::from(case.spec.scale);
        let threshold = -(2.0 * bound + 300f64.ln()) + log_tolerance;
        let thresholds: Arc<[f64]> = vec![threshold; case.spec.heads].into();
        let mut pages: Vec<LayerPages> =
            case.sequences.iter().map(|sequence| pages_of(&case, sequence, &cpu)).collect();
        let full = case.run(&cpu, &pages, &case.spec).unwrap();
        let group = case.shape().group;
        let rule = EvictionRule {
            window: case.spec.window,
            thresholds: (group > 0).then(|| thresholds.clone()),
        };
        for (s, segment) in case.spec.segments.as_slice().iter().enumerate() {
            let sums = &case.sequences[s].sums;
            // As seen by the first query; the later ones have forgotten more.
            let position = segment.k_len - segment.q_len;
            for head in 0..case.spec.kv_heads {
                let now: Vec<f64> = (0..group)
                    .map(|g| sums[(head * group + g) * segment.k_len + position])
                    .collect();
                pages[s].drop_while(head, |first, end| {
                    first + PAGE <= position && rule.forgets(head, (first, end), position, &now)
                });
                dropped += pages[s].dropped(head);
            }
        }
        let spec = PagedSpec { thresholds: Some(thresholds), ..case.spec.clone() };
        let pruned = case.run(&cpu, &pages, &spec).unwrap();
        let values = case.sequences.iter().map(|s| norm(&s.v)).fold(0.0, f64::max);
        let allowed = 2.0 * log_tolerance.exp() * values + 1e-5;
        let error = largest_error(&full, &pruned);
        assert!(error < allowed, "seed {seed}: {error:e} {allowed:e}");
    }
    assert!(dropped > 20, "{dropped}");
}

#[test]
fn shared_pages_are_copied_before_they_are_written() {
    let device = fox_cpu::device();
    let meter = CacheMeter::default();
    let rows = |x: f32| device.full([100, 8], x).unwrap();
    let append = |pages: &mut LayerPages, x: f32, count: usize, len: usize| {
        let rows = rows(x);
        let new = NewKeys { k: &rows, v: &rows, transitions: None, log_gates: None, row: 0, count };
        pages.append(&new, len).unwrap();
    };
    let mut first =
        LayerPages::new(PageShape { kv_heads: 1, head_dim: 8, group: 0, transition: 0 }, &meter);
    append(&mut first, 1.0, 100, 0);
    let page = meter.bytes() / 2;
    let mut second = first.clone();
    assert_eq!(meter.bytes(), 2 * page, "a clone shares");
    append(&mut second, 2.0, 10, 100);
    assert_eq!(meter.bytes(), 3 * page, "the full page is still shared");
    let value = |pages: &LayerPages, slot: usize| {
        pages.page(0, 1).unwrap().slab.k.to_f32().unwrap()[slot * 8]
    };
    assert_eq!((value(&first, 36), value(&second, 36)), (0.0, 2.0));
    assert_eq!((value(&first, 35), value(&second, 35)), (1.0, 1.0));
    drop(first);
    assert_eq!(meter.bytes(), 2 * page);
    // A step that failed leaves rows behind; the next one writes over them.
    append(&mut second, 3.0, 90, 100);
    append(&mut second, 4.0, 1, 100);
    assert_eq!((second.seen(), value(&second, 36)), (101, 4.0));
    drop(second);
    assert_eq!((meter.bytes(), meter.peak()), (0, 3 * page));
}

#[test]
fn shared_pages_are_not_written() {
    let device = Device::naive();
    let meter = CacheMeter::default();
    let shape = PageShape { kv_heads: 1, head_dim: 8, group: 0, transition: 0 };
    let mut pages = LayerPages::new(shape, &meter);
    let rows = device.full([1, 8], 1.0).unwrap();
    let new = NewKeys { k: &rows, v: &rows, transitions: None, log_gates: None, row: 0, count: 1 };
    pages.append(&new, 0).unwrap();
    let _other = pages.clone();
    // Without `reserve`, which would have made a copy.
    let error = write_pages(&new, &mut pages, 0).unwrap_err();
    assert!(error.to_string().contains("page 0 is missing or shared"), "{error}");
}

#[test]
fn free_pages_are_reused() {
    let shape = PageShape { kv_heads: 2, head_dim: 8, group: 1, transition: 0 };
    for (device, again) in
        [(Device::new(Naive::with_optional_ops()), true), (Device::naive(), false)]
    {
        let meter = CacheMeter::default();
        let mut pages = LayerPages::new(shape, &meter);
        pages.reserve(0, 3 * PAGE, &device).unwrap();
        let all = device.memory().in_use;
        let shared = pages.clone();
        // What a clone holds is not free.
        drop(pages);
        let mut more = LayerPages::new(shape, &meter);
        more.reserve(0, PAGE, &device).unwrap();
        assert_eq!(device.memory().in_use, all / 3 * 4);
        drop((shared, more));
        assert_eq!(meter.bytes(), 0, "what is free is not counted");
        let left = device.memory().in_use;
        assert_eq!(left, if again { all / 3 * 4 } else { 0 });
        let mut pages = LayerPages::new(shape, &meter);
        pages.reserve(0, 4 * PAGE, &device).unwrap();
        assert_eq!(device.memory().in_use, all / 3 * 4);
        // Another shape has other pages.
        let mut wide = LayerPages::new(PageShape { head_dim: 16, ..shape }, &meter);
        pages.truncate(0);
        wide.reserve(0, PAGE, &device).unwrap();
        assert_eq!(wide.page(0, 0).unwrap().slab.k.cols(), 16);
    }
}
