//! Attention over pages against the oracle, and the promise of eviction.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::sync::Arc;

use fox_cpu::simd::Level;
use fox_cpu::{Options, device_with};
use fox_tensor::cases::PagedCase;
use fox_tensor::{Device, LayerPages, NewKeys, PAGE, PageMeter, PagedSpec};

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}

#[test]
fn random_cases_at_every_level() {
    let naive = Device::naive();
    for level in Level::available() {
        let options = Options { level: Some(level), poison: true, ..Options::default() };
        let cpu = device_with(options).unwrap();
        for seed in 0..60 {
            let case = PagedCase::random(seed).unwrap();
            let run = |device| case.run(device, &case.pages(device).unwrap(), &case.spec).unwrap();
            let (want, got) = (run(&naive), run(&cpu));
            let error = largest_difference(&got, &want);
            assert!(error < 2e-5, "{} seed {seed}: {error:e}", level.name());
        }
    }
}

#[test]
fn what_is_dropped_has_at_most_its_share() {
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
        let mut pages = case.pages(&cpu).unwrap();
        let full = case.run(&cpu, &pages, &case.spec).unwrap();
        for (s, segment) in case.spec.segments.as_slice().iter().enumerate() {
            for pages in pages[s].heads_mut() {
                let group = pages.group();
                // As seen by the first query; the later ones have forgotten more.
                let position = segment.k_len - segment.q_len;
                let now: Vec<f64> = (0..group)
                    .map(|g| {
                        let page = pages.pages().nth(position / PAGE).unwrap();
                        page.sums[g * PAGE + position % PAGE]
                    })
                    .collect();
                pages.drop_while(|first, page| {
                    let last = |g: usize| page.sums[g * PAGE + PAGE - 1];
                    first + PAGE <= position
                        && group > 0
                        && (0..group).all(|g| now[g] - last(g) < threshold)
                });
                dropped += pages.dropped();
            }
        }
        let thresholds: Arc<[f64]> = vec![threshold; case.spec.heads].into();
        let spec = PagedSpec { thresholds: Some(thresholds), ..case.spec.clone() };
        let pruned = case.run(&cpu, &pages, &spec).unwrap();
        let values = case.sequences.iter().map(|s| norm(&s.v)).fold(0.0, f64::max);
        let allowed = 2.0 * log_tolerance.exp() * values + 1e-5;
        let error = largest_difference(&full, &pruned);
        assert!(error < allowed, "seed {seed}: {error:e} {allowed:e}");
    }
    assert!(dropped > 20, "{dropped}");
}

#[test]
fn shared_pages_are_copied_before_they_are_written() {
    let device = fox_cpu::device();
    let meter = PageMeter::default();
    let rows = |x: f32| device.full([100, 8], x).unwrap();
    let append = |pages: &mut LayerPages, x: f32, count: usize, len: usize| {
        let rows = rows(x);
        let new = NewKeys { k: &rows, v: &rows, log_gates: None, sums: &[], row: 0, count };
        pages.append(&new, len).unwrap();
    };
    let mut first = LayerPages::new(1, 8, 0, &meter);
    append(&mut first, 1.0, 100, 0);
    let page = meter.bytes() / 2;
    let mut second = first.clone();
    assert_eq!(meter.bytes(), 2 * page, "a clone shares");
    append(&mut second, 2.0, 10, 100);
    assert_eq!(meter.bytes(), 3 * page, "the full page is still shared");
    let value = |pages: &LayerPages, slot: usize| {
        pages.heads()[0].page(1).unwrap().k.to_f32().unwrap()[slot * 8]
    };
    assert_eq!((value(&first, 36), value(&second, 36)), (0.0, 2.0));
    assert_eq!((value(&first, 35), value(&second, 35)), (1.0, 1.0));
    drop(first);
    assert_eq!(meter.bytes(), 2 * page);
    // A step that failed leaves rows behind; the next one writes over them.
    append(&mut second, 3.0, 90, 100);
    append(&mut second, 4.0, 1, 100);
    assert_eq!((second.heads()[0].len(), value(&second, 36)), (101, 4.0));
    drop(second);
    assert_eq!((meter.bytes(), meter.peak()), (0, 3 * page));
}
