//! Attention over pages against the oracle, and the promise of eviction.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::sync::Arc;

use fox_cpu::simd::Level;
use fox_cpu::{Options, device_with};
use fox_tensor::cases::Rng;
use fox_tensor::{
    Device, KeyPages, PAGE, PageMeter, PagedSpec, Segment, Segments, Tape, Tensor, Var,
};

/// A batch of sequences with different lengths, gates and queries.
struct Case {
    spec: PagedSpec,
    /// Per sequence, keys and values `[k_len, H_kv * d]` and sums of the log gates `[H, k_len]`.
    sequences: Vec<(Vec<f64>, Vec<f64>, Vec<f64>)>,
    q: Vec<f64>,
    gated: bool,
}

impl Case {
    fn random(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let head_dim = rng.pick(&[8, 16, 24, 32, 64]);
        let (kv_heads, group) = (rng.between(1, 2), rng.between(1, 2));
        let (heads, gated) = (kv_heads * group, rng.chance(0.8));
        let strength = rng.pick(&[0.001, 0.05, 1.0]);
        let (mut sequences, mut segments, mut row, mut key) = (vec![], vec![], 0, 0);
        for _ in 0..rng.between(1, 3) {
            let k_len = rng.between(1, 300);
            let q_len = rng.pick(&[1, 3, 9, 70]).min(k_len);
            segments.push(Segment { q_start: row, q_len, k_start: key, k_len });
            (row, key) = (row + q_len, key + k_len);
            let mut sums = vec![0.0; heads * k_len];
            for h in 0..heads {
                let mut sum = -1e4;
                for j in 0..k_len {
                    sum -= strength * rng.normal().abs();
                    sums[h * k_len + j] = sum;
                }
            }
            let width = kv_heads * head_dim;
            sequences.push((rng.normals(k_len * width), rng.normals(k_len * width), sums));
        }
        let spec = PagedSpec {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: rng.chance(0.3).then(|| rng.between(1, 150)),
            thresholds: None,
            segments: Segments::new(segments).unwrap(),
        };
        Case { spec, sequences, q: rng.normals(row * heads * head_dim), gated }
    }

    /// Appended in two parts, as a cache grows.
    fn pages(&self, device: &Device) -> Vec<KeyPages> {
        let (d, kv_heads) = (self.spec.head_dim, self.spec.kv_heads);
        let group = self.spec.heads / kv_heads;
        let mut all = Vec::new();
        for (k, v, sums) in &self.sequences {
            let rows = k.len() / (kv_heads * d);
            let tensor = |x: &[f64]| device.from_f64(x, [rows, kv_heads * d]).unwrap();
            let (k, v) = (tensor(k), tensor(v));
            for h in 0..kv_heads {
                let gates = if self.gated { group } else { 0 };
                let mut pages = KeyPages::new(d, gates, &PageMeter::default());
                let mut done = 0;
                for count in [rows / 3, rows - rows / 3] {
                    let own = |g: usize| &sums[(h * group + g) * rows + done..][..count];
                    let part: Vec<f64> = (0..gates).flat_map(own).copied().collect();
                    pages.append((&k, &v), (done, h * d), count, &part, done).unwrap();
                    done += count;
                }
                all.push(pages);
            }
        }
        all
    }

    fn run(&self, device: &Device, pages: &[KeyPages], spec: &PagedSpec) -> Vec<f64> {
        let width = self.spec.heads * self.spec.head_dim;
        let q: Tensor = device.from_f64(&self.q, [self.q.len() / width, width]).unwrap();
        let keys: Vec<&KeyPages> = pages.iter().collect();
        let mut tape = Tape::inference(device);
        let o = tape.paged_attention(&Var::constant(q), &keys, spec).unwrap();
        o.value().to_f64().unwrap()
    }
}

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
            let case = Case::random(seed);
            let want = case.run(&naive, &case.pages(&naive), &case.spec);
            let got = case.run(&cpu, &case.pages(&cpu), &case.spec);
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
        let case = Case::random(seed);
        let norm = |x: &[f64]| {
            let rows = x.chunks(case.spec.head_dim);
            rows.map(|r| r.iter().map(|x| x * x).sum::<f64>().sqrt()).fold(0.0, f64::max)
        };
        let keys = case.sequences.iter().map(|(k, _, _)| norm(k)).fold(0.0, f64::max);
        let bound = norm(&case.q) * keys * f64::from(case.spec.scale);
        let threshold = -(2.0 * bound + 300f64.ln()) + log_tolerance;
        let mut pages = case.pages(&cpu);
        let full = case.run(&cpu, &pages, &case.spec);
        let kv_heads = case.spec.kv_heads;
        for (s, segment) in case.spec.segments.as_slice().iter().enumerate() {
            for h in 0..kv_heads {
                let pages = &mut pages[s * kv_heads + h];
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
        let pruned = case.run(&cpu, &pages, &spec);
        let values = case.sequences.iter().map(|(_, v, _)| norm(v)).fold(0.0, f64::max);
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
    let mut first = KeyPages::new(8, 0, &meter);
    first.append((&rows(1.0), &rows(1.0)), (0, 0), 100, &[], 0).unwrap();
    let page = meter.bytes() / 2;
    let mut second = first.clone();
    assert_eq!(meter.bytes(), 2 * page, "a clone shares");
    second.append((&rows(2.0), &rows(2.0)), (0, 0), 10, &[], 100).unwrap();
    assert_eq!(meter.bytes(), 3 * page, "the full page is still shared");
    let value =
        |pages: &KeyPages, slot: usize| pages.pages().nth(1).unwrap().k.to_f32().unwrap()[slot * 8];
    assert_eq!((value(&first, 36), value(&second, 36)), (0.0, 2.0));
    assert_eq!((value(&first, 35), value(&second, 35)), (1.0, 1.0));
    drop(first);
    assert_eq!(meter.bytes(), 2 * page);
    // A step that failed leaves rows behind; the next one writes over them.
    second.append((&rows(3.0), &rows(3.0)), (0, 0), 90, &[], 100).unwrap();
    second.append((&rows(4.0), &rows(4.0)), (0, 0), 1, &[], 100).unwrap();
    assert_eq!((second.len(), value(&second, 36)), (101, 4.0));
    drop(second);
    assert_eq!((meter.bytes(), meter.peak()), (0, 3 * page));
}
