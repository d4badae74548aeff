//! Dropout with counter-based masks.
//!
//! The mask of an element is a hash of the seed and of the element's index in the whole batch, not a draw from a
//! generator with state. It is therefore the same in the forward and the backward pass, when activations are recomputed,
//! after a resumed run, and however the batch is divided into micro-batches or over ranks; nothing is saved.

use fox_base::random::SplitMix64;

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Naive, matrix};
use crate::tape::{Tape, Var};
use crate::{Backend, Result, Tensor};

/// Elements whose masks come from one hash: 16 bits each.
pub const DROPOUT_GROUP: u64 = 4;

/// Numbers of a tensor's rows in the whole batch: row `i` is number `first + (i / width) * stride + i % width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowNumbers {
    /// Number of the first row.
    pub first: u64,
    /// Rows that are consecutive in the batch: the tokens of a sequence that are in the tensor.
    pub width: usize,
    /// Distance of such runs of rows in the batch: the tokens of a sequence.
    pub stride: u64,
}

impl RowNumbers {
    /// Consecutive rows from `first` on.
    pub fn from(first: u64) -> Self {
        RowNumbers { first, width: usize::MAX, stride: 0 }
    }

    /// The number of row `i`.
    pub fn number(&self, i: usize) -> u64 {
        let run = (i / self.width) as u64;
        self.first.wrapping_add(run.wrapping_mul(self.stride)).wrapping_add((i % self.width) as u64)
    }
}

/// Sets elements to 0 with probability `rate` and divides the others by the probability that they are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of 0, in steps of 2^-16; at least 0 and below 1.
    pub rate: f32,
    /// Seed of the masks.
    pub seed: u64,
    /// The rows of the tensor in the whole batch.
    pub rows: RowNumbers,
}

impl Dropout {
    /// The same rate and rows with the masks of another tensor of the model.
    pub fn of_tensor(self, index: u64) -> Self {
        Dropout { seed: SplitMix64::new(self.seed).after(index).bits(), ..self }
    }

    /// 16-bit hashes below this number mean 0.
    pub fn threshold(&self) -> u16 {
        // Saturates, so that the scale is finite.
        (self.rate * 65536.0).round() as u16
    }

    /// Factor on elements that are kept.
    pub fn scale(&self) -> f32 {
        65536.0 / (65536.0 - f32::from(self.threshold()))
    }

    /// The 16-bit hashes of the elements of a group, the first in the lowest bits.
    #[inline]
    pub fn hashes(&self, group: u64) -> u64 {
        SplitMix64::new(self.seed).after(group).bits()
    }

    /// Whether the element of this index in the whole batch is kept.
    pub fn keeps(&self, index: u64) -> bool {
        let hashes = self.hashes(index / DROPOUT_GROUP);
        (hashes >> (16 * (index % DROPOUT_GROUP))) as u16 >= self.threshold()
    }
}

/// Dropout on a device.
pub trait DropoutOps {
    /// `x[R, C]` with dropout. The gradient of `x` is the same function of the gradient of the result.
    fn dropout(&self, x: &Tensor, dropout: &Dropout) -> Result<Tensor>;
}

/// Validates the operands of [`DropoutOps::dropout`].
pub fn check_dropout(backend: &dyn Backend, x: &Tensor, dropout: &Dropout) -> Result<()> {
    let operands = Operands::new("dropout", backend);
    operands.matrix("x", x)?;
    // NaN is in no range.
    operands.require((0.0..1.0).contains(&dropout.rate), || {
        format!("a rate of {} is not at least 0 and below 1", dropout.rate)
    })?;
    operands.require(dropout.rows.width > 0, || "rows have a width of 0".into())
}

impl Tape<'_> {
    /// `x[R, C]` with dropout.
    pub fn dropout(&mut self, x: &Var, dropout: &Dropout) -> Result<Var> {
        let y = self.device.backend().dropout(x.value(), dropout)?;
        let out = self.output(y, x.needs_grad());
        let (x_slot, out_slot) = (x.slot, out.slot);
        let (device, dropout) = (self.device.clone(), *dropout);
        self.push(move |flow| {
            let Some(dy) = flow.take(out_slot) else { return Ok(()) };
            flow.add(x_slot, device.backend().dropout(&dy, &dropout)?)
        });
        Ok(out)
    }
}

impl DropoutOps for Naive {
    fn dropout(&self, x: &Tensor, dropout: &Dropout) -> Result<Tensor> {
        check_dropout(self, x, dropout)?;
        let (data, scale) = (matrix(x)?, f64::from(dropout.scale()));
        let mut y = Vec::with_capacity(data.data.len());
        for r in 0..data.rows {
            let first = dropout.rows.number(r).wrapping_mul(data.cols as u64);
            let kept = |(c, x): (usize, &f64)| match dropout.keeps(first.wrapping_add(c as u64)) {
                true => x * scale,
                false => 0.0,
            };
            y.extend(data.row(r).iter().enumerate().map(kept));
        }
        Ok(self.like(x, y))
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let columns = RowNumbers { first: 1 << 33, width: 5, stride: 16 };
    vec![
        case("all", [1, 1], 0.5, RowNumbers::from(0)),
        case("odd", [113, 101], 0.1, RowNumbers::from(7)),
        case("wide", [65, 64], 0.25, RowNumbers::from(3)),
        case("columns", [40, 24], 0.3, columns),
        case("zero", [9, 8], 0.0, RowNumbers::from(0)),
        // The most that a rate is rounded to: few elements, of large values.
        case("nearly one", [64, 64], 0.99, RowNumbers::from(u64::MAX - 8)),
    ]
}

fn case(name: &str, [rows, width]: [usize; 2], rate: f32, numbers: RowNumbers) -> Case {
    let dropout = Dropout { rate, seed: 29, rows: numbers };
    let case = Case::new(format!("dropout/{name}/{rows}x{width}"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.dropout(args.var("x")?, &dropout)?)])
    });
    case.normal("x", &[rows, width])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    fn ones(rows: usize, dropout: &Dropout) -> Vec<f32> {
        let device = Device::naive();
        let x = device.full([rows, 64], 1.0).unwrap();
        device.backend().dropout(&x, dropout).unwrap().to_f32().unwrap()
    }

    #[test]
    fn kept_fraction_is_one_minus_rate() {
        for rate in [0.0, 0.1, 0.5, 0.9] {
            let y = ones(2048, &Dropout { rate, seed: 5, rows: RowNumbers::from(0) });
            let n = y.len() as f64;
            let kept = y.iter().filter(|y| **y != 0.0).count() as f64 / n;
            let (want, rate) = (1.0 - f64::from(rate), f64::from(rate));
            // Four standard deviations.
            let bound = 4.0 * (rate * want / n).sqrt() + 1e-5;
            assert!((kept - want).abs() < bound, "{kept} of {want}");
            let mean = y.iter().map(|y| f64::from(*y)).sum::<f64>() / n;
            assert!((mean - 1.0).abs() < bound / want + 1e-5, "{mean}");
        }
    }

    #[test]
    fn masks_follow_the_rows_of_the_batch() {
        let rows = RowNumbers::from(0);
        let all = Dropout { rate: 0.5, seed: 1, rows };
        let whole = ones(12, &all);
        assert_eq!(ones(5, &Dropout { rows: RowNumbers::from(7), ..all }), whole[7 * 64..]);
        // The second half of three sequences of four tokens.
        let rows = RowNumbers { first: 2, width: 2, stride: 4 };
        let halves: Vec<f32> =
            whole.chunks(64 * 4).flat_map(|sequence| &sequence[64 * 2..]).copied().collect();
        assert_eq!(ones(6, &Dropout { rows, ..all }), halves);
        // Other tensors and other seeds have other masks.
        let others = [all.of_tensor(0), all.of_tensor(1), Dropout { seed: 2, ..all }];
        for (i, other) in others.iter().enumerate() {
            let y = ones(12, other);
            let equal = y.iter().zip(&whole).filter(|(a, b)| a == b).count();
            assert!((250..520).contains(&equal), "{i}: {equal} of {} are equal", y.len());
        }
    }
}
