//! Blocks that a head visits: gate prefix sums, mask and pruning.

use std::ops::Range;
use std::sync::Arc;

use fox_tensor::{Mask, Result, Segment, clamp_log_gate};

use super::BLOCK;
use crate::pool::{Buffer, Pool};

/// Visible keys of a query, by position from the segment's first key.
#[derive(Clone, Copy)]
pub struct View {
    pub mask: Mask,
    /// Whether a query attends to its own position, with the causal mask.
    pub own: bool,
    pub window: Option<usize>,
    pub k_len: usize,
}

impl View {
    /// Keys that are visible from at least one of the positions `first..=last`.
    pub fn keys(&self, first: usize, last: usize) -> Range<usize> {
        let reach = self.window.map_or(usize::MAX, |w| w - 1);
        if !self.own && reach == 0 {
            return 0..0;
        }
        let end = match self.mask {
            Mask::Causal => last + usize::from(self.own),
            Mask::Bidirectional => last.saturating_add(reach).saturating_add(1),
        };
        first.saturating_sub(reach)..end.min(self.k_len)
    }

    /// Of the `n` positions from `first` on, those that attend to key `j`, counted from `first`.
    pub fn lanes(&self, j: usize, first: usize, n: usize) -> Range<usize> {
        if j >= self.k_len {
            return 0..0;
        }
        let reach = self.window.map_or(usize::MAX, |w| w - 1);
        let low = match self.mask {
            Mask::Causal => j + usize::from(!self.own),
            Mask::Bidirectional => j.saturating_sub(reach),
        };
        let high = j.saturating_add(reach).saturating_add(1);
        let (low, high) = (low.saturating_sub(first).min(n), high.saturating_sub(first).min(n));
        low..high.max(low)
    }

    /// Whether every position of `first..=last` attends to every key of `keys`.
    pub fn sees_all(&self, keys: Range<usize>, first: usize, last: usize) -> bool {
        let before = match self.mask {
            Mask::Causal => keys.end <= first + usize::from(self.own),
            Mask::Bidirectional => true,
        };
        let near = self.window.is_none_or(|w| {
            last < keys.start.saturating_add(w) && keys.end <= first.saturating_add(w)
        });
        before && near && keys.end <= self.k_len
    }
}

/// Prefix sums of the log gates, `c_j` for every key, as pairs of f32 (`high + low`).
///
/// The pair carries 48 bits, so a difference `c_i - c_j` is right to f32 rounding after millions of
/// tokens: `(high_i - high_j) + (low_i - low_j)`, the first difference being exact where it matters.
pub struct Prefix {
    memory: Buffer,
    len: usize,
}

impl Prefix {
    /// Sums column `head` of `log_gates[R, heads]` over the rows of a segment, on top of `before`. Padded by two
    /// blocks, so that whole vectors can be read past the end.
    pub fn new(
        pool: &Arc<Pool>,
        log_gates: &[f32],
        heads: usize,
        head: usize,
        segment: &Segment,
        before: f64,
    ) -> Result<Self> {
        let len = segment.k_len + 2 * BLOCK;
        let mut memory = pool.take(2 * len)?;
        let (high, low) = memory.split_at_mut(len);
        let mut sum = before;
        for j in 0..len {
            if j < segment.k_len {
                sum += clamp_log_gate(log_gates[(segment.k_start + j) * heads + head] as f64);
            }
            high[j] = sum as f32;
            low[j] = (sum - high[j] as f64) as f32;
        }
        Ok(Prefix { memory, len })
    }

    /// From given sums of the first `keys` keys.
    pub fn from_sums(
        pool: &Arc<Pool>,
        sums: impl Iterator<Item = f64>,
        keys: usize,
    ) -> Result<Self> {
        let len = keys + 2 * BLOCK;
        let mut memory = pool.take(2 * len)?;
        let (high, low) = memory.split_at_mut(len);
        let mut sums = sums.take(keys);
        let mut sum = 0.0f64;
        for j in 0..len {
            sum = sums.next().unwrap_or(sum);
            high[j] = sum as f32;
            low[j] = (sum - high[j] as f64) as f32;
        }
        Ok(Prefix { memory, len })
    }

    pub fn high(&self) -> &[f32] {
        &self.memory[..self.len]
    }

    pub fn low(&self) -> &[f32] {
        &self.memory[self.len..]
    }

    /// `c_j`.
    pub fn at(&self, j: usize) -> f64 {
        self.high()[j] as f64 + self.low()[j] as f64
    }
}

/// The key blocks that each query block visits.
pub struct Visits {
    /// Per query block, the visited key blocks.
    pub ranges: Vec<Range<usize>>,
    /// Number of visited tiles.
    pub visited: usize,
    /// Number of tiles with mask and window but without pruning.
    pub total: usize,
}

impl Visits {
    /// Applies the mask and, where `threshold` is given, the pruning rule: a block is skipped when
    /// the decay across it is below the threshold even for its nearest pair of positions.
    ///
    /// `c` never increases, so both borders move one way and are found by two pointers.
    pub fn new(
        segment: &Segment,
        view: &View,
        prefix: Option<&Prefix>,
        threshold: Option<f64>,
    ) -> Self {
        let (offset, n) = (segment.offset(), segment.k_len);
        let mut visits = Visits {
            ranges: Vec::with_capacity(segment.q_len.div_ceil(BLOCK)),
            visited: 0,
            total: 0,
        };
        let (mut start, mut end) = (0, 0);
        for m in (0..segment.q_len).step_by(BLOCK) {
            let (first, last) = (offset + m, offset + (m + BLOCK).min(segment.q_len) - 1);
            let keys = view.keys(first, last);
            let all = keys.start / BLOCK..keys.end.div_ceil(BLOCK);
            let mut range = all.clone();
            if let (Some(c), Some(threshold)) = (prefix, threshold) {
                let last_key = |block: usize| (block * BLOCK + BLOCK - 1).min(n - 1);
                while start * BLOCK < n && c.at(first) - c.at(last_key(start)) < threshold {
                    start += 1;
                }
                end = end.max(last / BLOCK + 1);
                while end * BLOCK < n && c.at(end * BLOCK) - c.at(last) >= threshold {
                    end += 1;
                }
                let end = range.end.min(end);
                range = range.start.max(start).min(end)..end;
            }
            visits.visited += range.len();
            visits.total += all.len();
            visits.ranges.push(range);
        }
        visits
    }

    /// Splits the key blocks into at most `count` ranges of about equally many visits. Depends on the visits alone, not
    /// on the number of threads.
    pub fn split_keys(&self, key_blocks: usize, count: usize) -> Vec<Range<usize>> {
        let mut weight = vec![0isize; key_blocks + 1];
        for range in &self.ranges {
            weight[range.start] += 1;
            weight[range.end] -= 1;
        }
        let target = self.visited.div_ceil(count).max(1);
        let (mut ranges, mut from, mut load, mut height) = (Vec::new(), 0, 0, 0isize);
        for (block, step) in weight[..key_blocks].iter().enumerate() {
            height += step;
            load += height as usize;
            if load >= target {
                ranges.push(from..block + 1);
                (from, load) = (block + 1, 0);
            }
        }
        if from < key_blocks {
            ranges.push(from..key_blocks);
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use fox_base::difference::largest;

    use super::*;

    fn segment(q_len: usize, k_len: usize) -> Segment {
        Segment { q_start: 0, q_len, k_start: 0, k_len }
    }

    #[test]
    fn prefix_sums_are_accurate_after_2m_tokens() {
        // A gate whose sum drifts far from zero in a way that f32 sums cannot follow.
        let n = 2_000_000;
        let gates: Vec<f32> = (0..n).map(|t| -0.3 - ((t * 7919) % 1000) as f32 * 1e-4).collect();
        let pool = Pool::new(false);
        let prefix = Prefix::new(&pool, &gates, 1, 0, &segment(1, n), 0.0).unwrap();
        let (mut exact, mut worst) = (0.0f64, 0.0f64);
        for j in (n - 200..n - 1).rev() {
            exact += gates[j + 1] as f64;
            let i = n - 1;
            let bias = (prefix.high()[i] - prefix.high()[j]) + (prefix.low()[i] - prefix.low()[j]);
            worst = largest([worst, (bias as f64 - exact).abs()]);
        }
        assert!(worst < 1e-5, "{worst}");
    }

    #[test]
    fn causal_mask_visits_the_lower_triangle() {
        let view = View { mask: Mask::Causal, own: true, window: None, k_len: 200 };
        let visits = Visits::new(&segment(200, 200), &view, None, None);
        assert_eq!(visits.ranges, vec![0..1, 0..2, 0..3, 0..4]);
        assert_eq!((visits.visited, visits.total), (10, 10));
    }

    #[test]
    fn excluding_the_diagonal_shifts_block_borders() {
        let view = View { mask: Mask::Causal, own: false, window: None, k_len: 65 };
        assert_eq!(Visits::new(&segment(1, 65), &view, None, None).ranges, vec![0..1]);
        assert_eq!(Visits::new(&segment(1, 1), &view, None, None).visited, 0);
        assert_eq!((view.lanes(3, 0, 16), view.keys(0, 15)), (4..16, 0..15));
        let narrow = View { window: Some(1), ..view };
        assert_eq!(Visits::new(&segment(65, 65), &narrow, None, None).visited, 0);
    }

    #[test]
    fn window_limits_visited_blocks() {
        let view = View { mask: Mask::Causal, own: true, window: Some(65), k_len: 320 };
        let visits = Visits::new(&segment(320, 320), &view, None, None);
        assert_eq!(visits.ranges, vec![0..1, 0..2, 1..3, 2..4, 3..5]);
    }

    #[test]
    fn strong_gates_prune_all_but_the_diagonal() {
        let gates = vec![-1.0; 640];
        let pool = Pool::new(false);
        let segment = segment(640, 640);
        let prefix = Prefix::new(&pool, &gates, 1, 0, &segment, 0.0).unwrap();
        for (mask, threshold, width) in
            [(Mask::Causal, -60.0, 2), (Mask::Causal, -1.0, 2), (Mask::Causal, -70.0, 3)]
        {
            let view = View { mask, own: true, window: None, k_len: 640 };
            let visits = Visits::new(&segment, &view, Some(&prefix), Some(threshold));
            assert!(visits.ranges[3..].iter().all(|r| r.len() == width), "{:?}", visits.ranges);
            assert_eq!(visits.total, 55);
        }
        let view = View { mask: Mask::Bidirectional, own: true, window: None, k_len: 640 };
        let visits = Visits::new(&segment, &view, Some(&prefix), Some(-60.0));
        assert_eq!(visits.ranges[5], 4..7);
        assert_eq!(visits.ranges[9], 8..10);
    }

    #[test]
    fn key_ranges_partition_the_blocks() {
        let view = View { mask: Mask::Causal, own: true, window: None, k_len: 1000 };
        let visits = Visits::new(&segment(1000, 1000), &view, None, None);
        for count in 1..20 {
            let ranges = visits.split_keys(16, count);
            assert!(ranges.len() <= count);
            let covered: Vec<usize> = ranges.into_iter().flatten().collect();
            assert_eq!(covered, (0..16).collect::<Vec<_>>());
        }
    }
}
