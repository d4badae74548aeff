//! Which tokens the filters of sampling leave, without sorting the vocabulary.
//!
//! In descending order of weight, the lowest id first among equals, every filter keeps a beginning. Its last
//! token, the [`Cut`], is found by adding up buckets of similar weights; only the bucket it lies in is sorted.

/// Bits of a weight below those that name its bucket: the exponent and four bits of the fraction remain.
const BUCKET_SHIFT: u32 = 19;
/// Buckets of the weights from 0 to 1.
const BUCKETS: usize = (1.0f32.to_bits() >> BUCKET_SHIFT) as usize + 1;
/// Weights that are added up at once when one is drawn.
const BLOCK: usize = 256;
/// Lanes of those sums.
const LANES: usize = 16;

/// The last token that is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cut {
    weight: f32,
    id: usize,
}

impl Cut {
    /// Everything that has a weight.
    pub const ALL: Cut = Cut { weight: f32::MIN_POSITIVE, id: usize::MAX };

    /// Everything from a weight on.
    pub fn from_weight(weight: f32) -> Cut {
        Cut { weight, ..Cut::ALL }
    }

    /// Whether a token is kept.
    #[inline]
    fn keeps(self, id: usize, weight: f32) -> bool {
        weight > self.weight || (weight == self.weight && id <= self.id)
    }

    /// What both keep.
    pub fn and(self, other: Cut) -> Cut {
        if self.keeps(other.id, other.weight) { other } else { self }
    }
}

/// Weights of all ids from 0 to 1, the likeliest having 1, in buckets.
pub(crate) struct Buckets<'a> {
    weights: &'a [f32],
    /// Number and sum of the weights of each bucket.
    sums: Vec<(usize, f64)>,
}

impl<'a> Buckets<'a> {
    pub fn new(weights: &'a [f32]) -> Self {
        let mut sums = vec![(0, 0.0); BUCKETS];
        for &weight in weights {
            let sum = &mut sums[bucket(weight)];
            *sum = (sum.0 + 1, sum.1 + f64::from(weight));
        }
        Buckets { weights, sums }
    }

    /// The `count` largest.
    pub fn largest(&self, count: usize) -> Cut {
        self.find(|number, _| number >= count).0
    }

    /// The largest until they have this share of what `cut` keeps.
    pub fn share(&self, share: f32, cut: Cut) -> Cut {
        let (_, whole) = self.find(|_, _| false);
        let kept = match cut {
            Cut::ALL => whole,
            cut => total(self.weights, cut),
        };
        let enough = f64::from(share) * kept;
        self.find(|_, sum| sum >= enough).0
    }

    /// The first token in descending order at which number and sum so far are enough, and that sum; all of
    /// them where they never are.
    fn find(&self, is_enough: impl Fn(usize, f64) -> bool) -> (Cut, f64) {
        let (mut number, mut sum) = (0, 0.0);
        for (at, &(more, weight)) in self.sums.iter().enumerate().skip(1).rev() {
            if is_enough(number + more, sum + weight) {
                let mut inside: Vec<(usize, f32)> = self.inside(at).collect();
                inside.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                for (id, weight) in inside {
                    (number, sum) = (number + 1, sum + f64::from(weight));
                    if is_enough(number, sum) {
                        return (Cut { weight, id }, sum);
                    }
                }
            } else {
                (number, sum) = (number + more, sum + weight);
            }
        }
        (Cut::ALL, sum)
    }

    fn inside(&self, at: usize) -> impl Iterator<Item = (usize, f32)> {
        let all = self.weights.iter().copied().enumerate();
        all.filter(move |(_, weight)| bucket(*weight) == at)
    }
}

fn bucket(weight: f32) -> usize {
    ((weight.to_bits() >> BUCKET_SHIFT) as usize).min(BUCKETS - 1)
}

/// The sum of the weights that are kept.
fn total(weights: &[f32], cut: Cut) -> f64 {
    block_sums(weights, cut).sum()
}

fn block_sums(weights: &[f32], cut: Cut) -> impl Iterator<Item = f64> {
    weights.chunks(BLOCK).enumerate().map(move |(block, weights)| {
        let mut sums = [0.0f32; LANES];
        for (part, weights) in weights.chunks(LANES).enumerate() {
            for (lane, (sum, &weight)) in sums.iter_mut().zip(weights).enumerate() {
                let id = block * BLOCK + part * LANES + lane;
                *sum += if cut.keeps(id, weight) { weight } else { 0.0 };
            }
        }
        f64::from(sums.iter().sum::<f32>())
    })
}

/// One of the kept ids, each as likely as its weight says; `uniform` is from 0 to 1. `None` when none has a
/// weight.
pub(crate) fn draw(weights: &[f32], cut: Cut, uniform: f64) -> Option<usize> {
    let sums: Vec<f64> = block_sums(weights, cut).collect();
    let mut left = uniform * sums.iter().sum::<f64>();
    let mut last = None;
    for (block, sum) in sums.into_iter().enumerate() {
        if sum == 0.0 {
            continue;
        }
        if left >= sum {
            left -= sum;
            last = Some(block);
            continue;
        }
        let first = block * BLOCK;
        for (at, &weight) in weights[first..].iter().take(BLOCK).enumerate() {
            if cut.keeps(first + at, weight) {
                left -= f64::from(weight);
                if left < 0.0 {
                    return Some(first + at);
                }
            }
        }
        last = Some(block);
        break;
    }
    // What rounding left over: the last one that is kept.
    let first = last? * BLOCK;
    let ids = (first..weights.len().min(first + BLOCK)).rev();
    ids.into_iter().find(|&id| cut.keeps(id, weights[id]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_tensor::cases::Rng;

    /// Ids that top-k, then top-p, leave, by sorting everything.
    fn by_sorting(weights: &[f32], top_k: usize, top_p: f32, min_p: f32) -> Vec<usize> {
        let mut kept: Vec<(usize, f64)> =
            weights.iter().map(|w| f64::from(*w)).enumerate().filter(|(_, w)| *w > 0.0).collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if top_k > 0 {
            kept.truncate(top_k);
        }
        let enough = f64::from(top_p) * kept.iter().map(|(_, w)| w).sum::<f64>();
        let mut sum = 0.0;
        kept.retain(|(_, weight)| {
            let before = sum;
            sum += weight;
            before < enough
        });
        let mut ids: Vec<usize> =
            kept.iter().filter(|(_, w)| *w >= f64::from(min_p)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    fn by_cut(weights: &[f32], top_k: usize, top_p: f32, min_p: f32) -> Vec<usize> {
        let buckets = Buckets::new(weights);
        let mut cut = Cut::ALL;
        if top_k > 0 {
            cut = cut.and(buckets.largest(top_k));
        }
        if top_p < 1.0 {
            cut = cut.and(buckets.share(top_p, cut));
        }
        if min_p > 0.0 {
            cut = cut.and(Cut::from_weight(min_p));
        }
        (0..weights.len()).filter(|&id| cut.keeps(id, weights[id])).collect()
    }

    /// Random weights with ties and zeros, the largest being 1.
    fn weights(rng: &mut Rng, len: usize, spread: f64) -> Vec<f32> {
        let mut weights: Vec<f32> = (0..len)
            .map(|_| match rng.between(0, 9) {
                0 => 0.0,
                1 => 0.25,
                _ => (-spread * rng.uniform()).exp() as f32,
            })
            .collect();
        weights[rng.between(0, len - 1)] = 1.0;
        weights
    }

    #[test]
    fn cuts_keep_what_sorting_keeps() {
        let mut rng = Rng::new(5);
        for case in 0..300 {
            let len = rng.between(1, 3000);
            let spread = [0.01, 1.0, 20.0, 80.0][case % 4];
            let weights = weights(&mut rng, len, spread);
            for (top_k, top_p, min_p) in [
                (0, 0.9, 0.0),
                (0, 0.3, 0.0),
                (7, 1.0, 0.0),
                (40, 0.5, 0.0),
                (0, 1.0, 0.25),
                (40, 0.95, 0.1),
                (1, 0.1, 1.0),
                (5000, 0.999, 0.0),
            ] {
                let got = by_cut(&weights, top_k, top_p, min_p);
                let want = by_sorting(&weights, top_k, top_p, min_p);
                // Sums in another order may differ in the last bit, and with them one token at the border.
                let differ = got.iter().filter(|id| !want.contains(id)).count()
                    + want.iter().filter(|id| !got.contains(id)).count();
                assert!(differ <= 1, "case {case}: {top_k} {top_p} {min_p}: {differ}");
            }
        }
    }

    #[test]
    fn draws_follow_the_weights_that_are_kept() {
        let weights = [0.5, 0.0, 1.0, 0.25, 0.25];
        let cut = Buckets::new(&weights).largest(4);
        let cut = cut.and(Cut { weight: 0.25, id: 3 });
        let mut counts = [0; 5];
        for i in 0..7000 {
            counts[draw(&weights, cut, (f64::from(i) + 0.5) / 7000.0).unwrap()] += 1;
        }
        assert_eq!(counts, [2000, 0, 4000, 1000, 0]);
        assert_eq!(draw(&weights, cut, 1.0), Some(3), "rounding at the end");
        assert_eq!(draw(&[0.0; 300], Cut::ALL, 0.5), None);
        let mut long = vec![0.0; 1000];
        (long[3], long[999]) = (1.0, 1.0);
        assert_eq!((draw(&long, Cut::ALL, 0.4), draw(&long, Cut::ALL, 0.6)), (Some(3), Some(999)));
        assert_eq!(draw(&long, Cut::ALL, 1.0), Some(999));
    }
}
