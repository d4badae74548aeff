//! Drawing without replacement.

use fox_base::random::SplitMix64;

/// `count` different numbers of `from..to`, in random order; there must be as many.
pub(super) fn distinct(count: usize, from: u32, to: u32, random: &mut SplitMix64) -> Vec<u32> {
    let mut taken = vec![false; (to - from) as usize];
    let mut drawn = Vec::with_capacity(count);
    // The last of many would be met by chance too late.
    if 2 * count > taken.len() {
        let mut all: Vec<u32> = (from..to).collect();
        shuffle(&mut all, random);
        all.truncate(count);
        return all;
    }
    while drawn.len() < count {
        let at = random.below(taken.len() as u64) as usize;
        if !std::mem::replace(&mut taken[at], true) {
            drawn.push(from + at as u32);
        }
    }
    drawn
}

/// Puts items into random order.
pub(super) fn shuffle<T>(items: &mut [T], random: &mut SplitMix64) {
    for i in (1..items.len()).rev() {
        items.swap(i, random.below(i as u64 + 1) as usize);
    }
}

/// `count` different slots of `0..slots`, slot `k` with a weight of `1 / (k + 1)`; there must be as many.
pub(super) fn near_slots(count: usize, slots: usize, random: &mut SplitMix64) -> Vec<usize> {
    // Whole numbers, so that every machine draws the same.
    let mut weights: Vec<u64> = (1..=slots as u64).map(|k| (1 << 32) / k).collect();
    let mut total: u64 = weights.iter().sum();
    let mut drawn = Vec::with_capacity(count);
    while drawn.len() < count {
        let mut left = random.below(total);
        let at = weights.iter().position(|weight| match left.checked_sub(*weight) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        });
        let Some(at) = at else { break };
        total -= std::mem::take(&mut weights[at]);
        drawn.push(at);
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_without_replacement() {
        let mut random = SplitMix64::new(3);
        for (count, to) in [(3, 100), (60, 100), (95, 100)] {
            let mut drawn = distinct(count, 5, to, &mut random);
            assert!(drawn.iter().all(|x| (5..to).contains(x)));
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn.len(), count);
        }
        let mut slots = near_slots(64, 64, &mut random);
        slots.sort_unstable();
        assert!(slots.into_iter().eq(0..64));
    }

    #[test]
    fn near_slots_follow_their_distribution() {
        let mut random = SplitMix64::new(4);
        let mut counts = [0u32; 8];
        for _ in 0..20_000 {
            counts[near_slots(1, 8, &mut random)[0]] += 1;
        }
        let harmonic: f64 = (1..=8).map(|k| 1.0 / f64::from(k)).sum();
        for (k, count) in counts.iter().enumerate() {
            let expected = 20_000.0 / harmonic / (k + 1) as f64;
            assert!((f64::from(*count) - expected).abs() < 5.0 * expected.sqrt(), "{counts:?}");
        }
    }
}
