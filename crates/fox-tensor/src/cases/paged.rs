//! Cases of attention over pages.

use super::Rng;
use crate::{
    AttentionWeights, Device, LayerPages, NewKeys, PageMeter, PagedSpec, Result, Segment, Segments,
    Tape, Var,
};

/// A batch of sequences with different lengths, gates and queries.
#[derive(Clone, Debug)]
pub struct PagedCase {
    /// What attention is asked for.
    pub spec: PagedSpec,
    /// The sequences.
    pub sequences: Vec<PagedKeys>,
    /// Queries `[R, H * d]`.
    pub q: Vec<f64>,
    gated: bool,
}

/// Keys of one sequence of a [`PagedCase`].
#[derive(Clone, Debug)]
pub struct PagedKeys {
    /// `[k_len, H_kv * d]`.
    pub k: Vec<f64>,
    /// `[k_len, H_kv * d]`.
    pub v: Vec<f64>,
    /// Sums of the log gates `[H, k_len]`.
    sums: Vec<f64>,
}

impl PagedCase {
    /// A case of its own for every seed.
    pub fn random(seed: u64) -> Result<Self> {
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
            let (k, v) = (rng.normals(k_len * width), rng.normals(k_len * width));
            sequences.push(PagedKeys { k, v, sums });
        }
        let kinds = [AttentionWeights::Softmax, AttentionWeights::StickBreaking];
        let spec = PagedSpec {
            weights: rng.pick(&kinds),
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: rng.chance(0.3).then(|| rng.between(1, 150)),
            thresholds: None,
            segments: Segments::new(segments)?,
        };
        Ok(PagedCase { spec, sequences, q: rng.normals(row * heads * head_dim), gated })
    }

    /// The pages of each sequence, appended in two parts, as a cache grows.
    pub fn pages(&self, device: &Device) -> Result<Vec<LayerPages>> {
        self.sequences.iter().map(|sequence| self.pages_of(sequence, device)).collect()
    }

    fn pages_of(&self, sequence: &PagedKeys, device: &Device) -> Result<LayerPages> {
        let PagedSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let rows = sequence.k.len() / (kv_heads * head_dim);
        let tensor = |x: &[f64]| device.from_f64(x, [rows, kv_heads * head_dim]);
        let (k, v) = (tensor(&sequence.k)?, tensor(&sequence.v)?);
        let sum = |t: usize, h: usize| sequence.sums[h * rows + t];
        let gate = |t: usize, h: usize| sum(t, h) - sum(t.saturating_sub(1), h);
        let gates: Vec<f64> = (0..rows).flat_map(|t| (0..heads).map(move |h| gate(t, h))).collect();
        let gates = device.from_f64(&gates, [rows, heads])?;
        let group = if self.gated { heads / kv_heads } else { 0 };
        let mut pages = LayerPages::new(kv_heads, head_dim, group, &PageMeter::default());
        let mut done = 0;
        for count in [rows / 3, rows - rows / 3] {
            let own = |h: usize| (done..done + count).map(move |t| sum(t, h));
            let sums: Vec<f64> = (0..heads).filter(|_| self.gated).flat_map(own).collect();
            let log_gates = self.gated.then_some(&gates);
            let new = NewKeys { k: &k, v: &v, log_gates, sums: &sums, row: done, count };
            pages.append(&new, done)?;
            done += count;
        }
        Ok(pages)
    }

    /// Attention over such pages `[R, H * d]`.
    pub fn run(&self, device: &Device, pages: &[LayerPages], spec: &PagedSpec) -> Result<Vec<f64>> {
        let width = self.spec.heads * self.spec.head_dim;
        let q = device.from_f64(&self.q, [self.q.len() / width, width])?;
        let keys: Vec<&LayerPages> = pages.iter().collect();
        let o = Tape::inference(device).paged_attention(&Var::constant(q), &keys, spec)?;
        o.value().to_f64()
    }
}
