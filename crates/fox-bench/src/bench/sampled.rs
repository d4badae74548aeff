//! Attention at its full size against the oracle's formulas, on rows drawn at random: a whole comparison would take hours
//! where the device takes milliseconds.
//!
//! For some queries of every head, `o`, `lse` and `dq` are recomputed in f64 from the operands alone. For some keys of
//! every key head, `dk` and `dv` are: the sums over all queries take `lse` and `o` from the device, which the queries
//! have judged. The gradient of a gate is a sum over all pairs on either side of it, too many to recompute; but
//! neighbours differ only by the pairs of one position, and at the first position it is zero. So the differences at the
//! same positions are recomputed, and the first gradients of all sequences compared with zero.

use std::thread;

use anyhow::{Result, bail};
use fox_tensor::cases::Rng;
use fox_tensor::{Acp, AttentionSpec, Mask, clamp_log_gate};

/// Queries of each head and keys of each key head that are recomputed.
const QUERIES: usize = 32;
const KEYS: usize = 8;

/// What the device was given and what came out, row by row, on the host.
pub(super) struct SampledAttention<'a> {
    pub spec: &'a AttentionSpec,
    /// Sequences and tokens of each.
    pub batch: usize,
    pub seq: usize,
    /// `[R, H * d]`.
    pub q: Vec<f32>,
    /// `[R, H_kv * d]`.
    pub k: Vec<f32>,
    /// `[R, H_kv * d]`.
    pub v: Vec<f32>,
    /// `[R, H]`, or nothing.
    pub log_gates: Option<Vec<f32>>,
    /// `[R, H * d]`.
    pub d_out: Vec<f32>,
    /// `[R, H * d]`.
    pub o: Vec<f32>,
    /// `[R, H]`.
    pub lse: Vec<f32>,
    /// `[R, H * d]`.
    pub dq: Vec<f32>,
    /// `[R, H_kv * d]`.
    pub dk: Vec<f32>,
    /// `[R, H_kv * d]`.
    pub dv: Vec<f32>,
    /// `[R, H]`, or nothing.
    pub dlog_gates: Option<Vec<f32>>,
}

/// Squares of the error and of what should be there, by result.
#[derive(Clone, Copy, Default)]
struct Sums {
    error: f64,
    size: f64,
}

impl Sums {
    fn add(&mut self, got: impl IntoIterator<Item = f32>, want: &[f64]) {
        for (got, want) in got.into_iter().zip(want) {
            self.error += (f64::from(got) - want).powi(2);
            self.size += want * want;
        }
    }

    fn relative(&self) -> f64 {
        (self.error / self.size.max(f64::MIN_POSITIVE)).sqrt()
    }
}

const NAMES: [&str; 6] = ["o", "lse", "dq", "dk", "dv", "dlog_gates"];
/// The gradient of the gates has the errors of two scores, and of the output in between.
const FACTORS: [f64; 6] = [1.0, 1.0, 1.0, 1.0, 1.0, 3.0];

/// The worst relative error, by norm, of the sampled rows of all results; an error where one is above `tolerance`.
pub(super) fn check(run: &SampledAttention<'_>, tolerance: f64) -> Result<f64> {
    // Dropping a fraction of e^LN of every softmax changes a row of probabilities by at most twice that in sum; gradients
    // are sums of products with it.
    let pruned = match &run.spec.acp {
        Acp::Off => 0.0,
        Acp::On { log_tolerance, .. } => 10.0 * f64::from(*log_tolerance).exp(),
    };
    let (heads, kv_heads) = (run.spec.heads, run.spec.kv_heads);
    let workers = thread::available_parallelism().map_or(1, usize::from).min(kv_heads);
    let work = |worker: usize| {
        let mut sums = [Sums::default(); NAMES.len()];
        for kv_head in (worker..kv_heads).step_by(workers) {
            run.check_group(kv_head, &mut sums);
        }
        sums
    };
    let parts: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|n| scope.spawn(move || work(n))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut sums = [Sums::default(); NAMES.len()];
    for part in parts {
        let Ok(part) = part else { bail!("a thread that recomputes attention has failed") };
        for (sum, part) in sums.iter_mut().zip(part) {
            (sum.error, sum.size) = (sum.error + part.error, sum.size + part.size);
        }
    }
    let mut worst = 0.0f64;
    for ((name, factor), sum) in NAMES.iter().zip(FACTORS).zip(sums) {
        let (error, allowed) = (sum.relative(), factor * tolerance + pruned);
        if error.is_nan() || error > allowed {
            bail!(
                "{name} of {heads} heads x {} tokens is off by {error:.1e} in rows drawn at random ({allowed:.1e} is allowed); not timed, because the result is wrong",
                run.seq
            );
        }
        worst = worst.max(error);
    }
    if let Some(first) = run.first_gates() {
        let allowed = 3.0 * tolerance + pruned;
        if first.is_nan() || first > allowed {
            bail!(
                "dlog_gates at the first of {} tokens is {first:.1e} of the others' size and should be 0 ({allowed:.1e} is allowed); not timed, because the result is wrong",
                run.seq
            );
        }
    }
    Ok(worst)
}

impl SampledAttention<'_> {
    fn check_group(&self, kv_head: usize, sums: &mut [Sums; NAMES.len()]) {
        let group = self.spec.heads / self.spec.kv_heads;
        let mut rng = Rng::new(7 + kv_head as u64);
        for head in kv_head * group..(kv_head + 1) * group {
            for n in 0..QUERIES.min(self.seq) {
                let sequence = n % self.batch;
                let query = rng.between(0, self.seq - 1);
                self.check_query(sequence, query, head, &self.prefix(sequence, head), sums);
            }
        }
        for n in 0..KEYS.min(self.seq) {
            let (sequence, key) = (n % self.batch, rng.between(0, self.seq - 1));
            self.check_key(sequence, key, kv_head, sums);
            for head in kv_head * group..(kv_head + 1) * group {
                self.check_gate(sequence, key, head, sums);
            }
        }
    }

    /// The largest gradient of a first gate, relative to the root mean square of all: every pair is on one side of it.
    fn first_gates(&self) -> Option<f64> {
        let (grads, heads) = (self.dlog_gates.as_ref()?, self.spec.heads);
        let squares: f64 = grads.iter().map(|g| f64::from(*g).powi(2)).sum();
        let size = (squares / grads.len() as f64).sqrt().max(f64::MIN_POSITIVE);
        let first = |b: usize| &grads[b * self.seq * heads..][..heads];
        // As a sum of squares, so that a NaN is not passed over.
        let worst = |b: usize| first(b).iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        Some((0..self.batch).map(worst).sum::<f64>() / size)
    }

    /// Sums of the log gates of a sequence and head; zeros without gates.
    fn prefix(&self, sequence: usize, head: usize) -> Vec<f64> {
        let mut sum = 0.0;
        let mut next = |t: usize| {
            let at = (sequence * self.seq + t) * self.spec.heads + head;
            sum += self.log_gates.as_ref().map_or(0.0, |x| clamp_log_gate(f64::from(x[at])));
            sum
        };
        (0..self.seq).map(&mut next).collect()
    }

    /// A head's part of a row.
    fn part<'x>(
        &self,
        x: &'x [f32],
        heads: usize,
        sequence: usize,
        t: usize,
        head: usize,
    ) -> &'x [f32] {
        let d = self.spec.head_dim;
        &x[((sequence * self.seq + t) * heads + head) * d..][..d]
    }

    /// Keys that position `t` may see, or queries that may see it.
    fn near(&self, t: usize, queries: bool) -> std::ops::Range<usize> {
        let window = self.spec.window.unwrap_or(self.seq);
        let (low, high) = ((t + 1).saturating_sub(window), (t + window).min(self.seq));
        match (self.spec.mask, queries) {
            (Mask::Bidirectional, _) => low..high,
            (Mask::Causal, false) => low..t + 1,
            (Mask::Causal, true) => t..high,
        }
    }

    /// `-|c_i - c_j|`, which is `c_i - c_j` for `j <= i`.
    fn bias(c: &[f64], i: usize, j: usize) -> f64 {
        c[i.max(j)] - c[i.min(j)]
    }

    /// `o`, `lse` and `dq` of one query.
    fn check_query(
        &self,
        b: usize,
        i: usize,
        head: usize,
        c: &[f64],
        sums: &mut [Sums; NAMES.len()],
    ) {
        let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *self.spec;
        let (scale, kv_head) = (f64::from(scale), head / (heads / kv_heads));
        let own = |x| self.part(x, heads, b, i, head);
        let (q, d_out) = (own(&self.q), own(&self.d_out));
        let keys = self.near(i, false);
        let key = |j: usize| self.part(&self.k, kv_heads, b, j, kv_head);
        let value = |j: usize| self.part(&self.v, kv_heads, b, j, kv_head);
        let mut p: Vec<f64> =
            keys.clone().map(|j| scale * dot(q, key(j)) + Self::bias(c, i, j)).collect();
        let top = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        p.iter_mut().for_each(|x| *x = (*x - top).exp());
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|x| *x /= sum);
        let (mut o, mut dq) = (vec![0.0; head_dim], vec![0.0; head_dim]);
        keys.clone().zip(&p).for_each(|(j, p)| add(&mut o, *p, value(j)));
        let delta: f64 = d_out.iter().zip(&o).map(|(d, o)| f64::from(*d) * o).sum();
        for (j, p) in keys.zip(&p) {
            add(&mut dq, scale * p * (dot(d_out, value(j)) - delta), key(j));
        }
        let lse = self.lse[(b * self.seq + i) * heads + head];
        sums[0].add(own(&self.o).iter().copied(), &o);
        sums[1].add([lse], &[top + sum.ln()]);
        sums[2].add(own(&self.dq).iter().copied(), &dq);
    }

    /// `dk` and `dv` of one key.
    fn check_key(&self, b: usize, j: usize, kv_head: usize, sums: &mut [Sums; NAMES.len()]) {
        let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *self.spec;
        let (scale, group) = (f64::from(scale), heads / kv_heads);
        let own = |x| self.part(x, kv_heads, b, j, kv_head);
        let (k, v) = (own(&self.k), own(&self.v));
        let (mut dk, mut dv) = (vec![0.0; head_dim], vec![0.0; head_dim]);
        for head in kv_head * group..(kv_head + 1) * group {
            let c = self.prefix(b, head);
            for i in self.near(j, true) {
                let of = |x| self.part(x, heads, b, i, head);
                let (q, d_out, o) = (of(&self.q), of(&self.d_out), of(&self.o));
                let lse = f64::from(self.lse[(b * self.seq + i) * heads + head]);
                let p = (scale * dot(q, k) + Self::bias(&c, i, j) - lse).exp();
                add(&mut dv, p, d_out);
                add(&mut dk, scale * p * (dot(d_out, v) - dot(d_out, o)), q);
            }
        }
        sums[3].add(own(&self.dk).iter().copied(), &dk);
        sums[4].add(own(&self.dv).iter().copied(), &dv);
    }

    /// What the gradient of the gate at `t` has more than that of the next gate: the pairs that end at `t` less those that
    /// begin there.
    fn check_gate(&self, b: usize, t: usize, head: usize, sums: &mut [Sums; NAMES.len()]) {
        let Some(grads) = &self.dlog_gates else { return };
        let AttentionSpec { heads, kv_heads, scale, .. } = *self.spec;
        let (scale, kv_head) = (f64::from(scale), head / (heads / kv_heads));
        let c = self.prefix(b, head);
        let d_score = |i: usize, j: usize| {
            let of = |x| self.part(x, heads, b, i, head);
            let key = |x| self.part(x, kv_heads, b, j, kv_head);
            let (d_out, lse) = (of(&self.d_out), self.lse[(b * self.seq + i) * heads + head]);
            let score = scale * dot(of(&self.q), key(&self.k)) + Self::bias(&c, i, j);
            (score - f64::from(lse)).exp() * (dot(d_out, key(&self.v)) - dot(d_out, of(&self.o)))
        };
        // A pair counts for the later position, and against the earlier one.
        let signed = |other: usize, d: f64| match other.cmp(&t) {
            std::cmp::Ordering::Less => d,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => -d,
        };
        let as_query: f64 = self.near(t, false).map(|j| signed(j, d_score(t, j))).sum();
        let as_key: f64 = self.near(t, true).map(|i| signed(i, d_score(i, t))).sum();
        let grad = |t: usize| match t < self.seq {
            true => f64::from(grads[(b * self.seq + t) * heads + head]),
            false => 0.0,
        };
        sums[5].add([(grad(t) - grad(t + 1)) as f32], &[as_query + as_key]);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn add(sum: &mut [f64], factor: f64, x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * f64::from(*x));
}
