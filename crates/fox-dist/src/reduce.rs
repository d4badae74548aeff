//! Reduction of tensors to the rank that owns them, and broadcast from it.

use fox_tensor::Tensor;

use crate::{Error, Group, Result};

/// A tensor that all ranks have, and the rank that it belongs to.
#[derive(Debug)]
pub struct Owned<'a> {
    /// The rank.
    pub owner: usize,
    /// This rank's copy, in f32, of the same shape everywhere.
    pub tensor: &'a mut Tensor,
}

/// Which rank owns which of these tensors: the largest first, each to the rank with the fewest elements so far.
pub fn owners(sizes: &[usize], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(sizes[i]), i));
    let mut loads = vec![0usize; ranks.max(1)];
    let mut owners = vec![0; sizes.len()];
    for i in order {
        let lightest = (0..loads.len()).min_by_key(|&r| (loads[r], r)).unwrap_or(0);
        owners[i] = lightest;
        loads[lightest] += sizes[i];
    }
    owners
}

/// The sum of several lists of equal length, as a binary tree whose left half is the largest power of two:
/// the lists may then be sums of such trees themselves. Four lists are `(a + b) + (c + d)`, whether two ranks have two
/// each or four ranks one each.
pub fn tree_sum(mut lists: Vec<Vec<f32>>) -> Vec<f32> {
    if lists.len() <= 1 {
        return lists.pop().unwrap_or_default();
    }
    let right = lists.split_off(lists.len().next_power_of_two() / 2);
    let (mut sum, right) = (tree_sum(lists), tree_sum(right));
    for (a, b) in sum.iter_mut().zip(right) {
        *a += b;
    }
    sum
}

impl Group {
    /// Replaces every tensor, at the rank that owns it, by the sum of all ranks' tensors in the order of
    /// [`tree_sum`]. Elsewhere it stays as it is.
    pub fn reduce_to_owners(&self, tensors: &mut [Owned<'_>]) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        self.begin_reduce(tensors)?;
        self.finish_reduce()
    }

    pub(crate) fn reduce_by_host(&self, tensors: &mut [Owned<'_>]) -> Result<()> {
        self.collective(|links| {
            for Owned { owner, tensor } in tensors.iter().filter(|t| t.owner != self.rank()) {
                links.send(*owner, bytemuck::cast_slice(&tensor.to_f32()?));
            }
            for Owned { tensor, .. } in tensors.iter_mut().filter(|t| t.owner == self.rank()) {
                let mut parts = Vec::with_capacity(self.size());
                for rank in 0..self.size() {
                    parts.push(if rank == self.rank() {
                        tensor.to_f32()?
                    } else {
                        values(self.rank(), rank, &links.receive(rank)?, tensor.len())?
                    });
                }
                set(tensor, &tree_sum(parts))?;
            }
            Ok(())
        })
    }

    /// Replaces every tensor by that of the rank that owns it. Weights must be packed in the same way everywhere, and
    /// stay so.
    pub fn share(&self, tensors: &mut [Owned<'_>]) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        if let Some(device) = self.connected() {
            return self.broadcast_by_devices(device, tensors);
        }
        self.collective(|links| {
            for Owned { tensor, .. } in tensors.iter().filter(|t| t.owner == self.rank()) {
                let values = tensor.to_f32()?;
                for other in links.others() {
                    links.send(other, bytemuck::cast_slice(&values));
                }
            }
            for Owned { owner, tensor } in tensors.iter_mut().filter(|t| t.owner != self.rank()) {
                let bytes = links.receive(*owner)?;
                set(tensor, &values(self.rank(), *owner, &bytes, tensor.len())?)?;
            }
            Ok(())
        })
    }
}

pub(crate) fn values(rank: usize, other: usize, bytes: &[u8], len: usize) -> Result<Vec<f32>> {
    let expected = len * size_of::<f32>();
    if bytes.len() != expected {
        return Err(Error::Size { rank, other, found: bytes.len(), expected });
    }
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn set(tensor: &mut Tensor, values: &[f32]) -> Result<()> {
    *tensor = tensor.device().clone().from_f32(values, tensor.shape())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ownership_is_balanced() {
        let sizes = [100, 3, 50, 50, 1, 7, 90];
        for ranks in 1..=4 {
            let owners = owners(&sizes, ranks);
            let load = |r| -> usize {
                (0..sizes.len()).filter(|&i| owners[i] == r).map(|i| sizes[i]).sum()
            };
            let loads: Vec<usize> = (0..ranks).map(load).collect();
            assert_eq!(loads.iter().sum::<usize>(), 301);
            assert!(
                *loads.iter().max().unwrap() <= 301usize.div_ceil(ranks).max(100) + 7,
                "{loads:?}"
            );
        }
        assert_eq!(owners(&[5], 4), [0]);
        assert!(owners(&[], 2).is_empty());
    }

    /// The left subtree is the largest power of two, so that ranks with complete subtrees add in the same order.
    #[test]
    fn tree_splits_at_power_of_two() {
        let leaves = [1e8f32, 3.0, 3.0, -1e8, 5.0, 6.0, 7.0];
        let [a, b, c, d, e, f, g] = leaves;
        let four = (a + b) + (c + d);
        for (count, want) in
            [(3, (a + b) + c), (5, four + e), (6, four + (e + f)), (7, four + ((e + f) + g))]
        {
            let sum = tree_sum(leaves[..count].iter().map(|&x| vec![x]).collect());
            assert_eq!(sum, [want], "{count} lists");
        }
        // The numbers distinguish a split in the middle.
        assert_ne!((a + b) + c, a + (b + c));
        assert_ne!(four + e, (a + b) + ((c + d) + e));
    }

    /// Sums of halves are halves of sums, to the bit, whatever the numbers.
    #[test]
    fn tree_sums_compose() {
        let mut random = fox_base::random::SplitMix64::new(3);
        let mut list = || -> Vec<f32> {
            (0..50)
                .map(|_| (random.uniform() as f32 - 0.5) * 10f32.powi(random.below(9) as i32))
                .collect()
        };
        let leaves: Vec<Vec<f32>> = (0..8).map(|_| list()).collect();
        let whole = tree_sum(leaves.clone());
        for ranks in [1, 2, 4, 8] {
            let parts = leaves.chunks(8 / ranks).map(|part| tree_sum(part.to_vec())).collect();
            assert_eq!(tree_sum(parts), whole, "{ranks}");
        }
        let in_a_row = leaves.iter().skip(1).fold(leaves[0].clone(), |sum, leaf| {
            sum.iter().zip(leaf).map(|(a, b)| a + b).collect()
        });
        assert_ne!(in_a_row, whole, "the numbers distinguish orders");
    }
}
