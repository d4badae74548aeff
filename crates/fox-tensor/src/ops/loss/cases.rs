//! Losses with ignored labels, for every size of vocabulary.

use crate::cases::{Case, Data, Output, Rng, round};
use crate::{IGNORE_LABEL, LossInputs};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        [1, 2, 3, 17, 64, 257, 1000].into_iter().map(|vocab| loss(13, 24, vocab, 0.3)).collect();
    cases.extend([
        loss(1, 8, 5, 0.0),
        loss(113, 40, 203, 0.1),
        loss(799, 3, 65, 0.5),
        loss(7, 16, 33, 1.0),
    ]);
    // A thread of a GPU reads several pieces of a row, of one element or of eight: 4099 is odd, 8208 is not.
    cases.extend([loss(5, 16, 4099, 0.2), rising_loss(5, 16, 8208)]);
    cases.push(loss_twice());
    cases
}

fn loss_labels(rng: &mut Rng, rows: usize, vocab: usize, ignored: f64) -> Vec<i32> {
    (0..rows)
        .map(|_| {
            let label = rng.between(0, vocab - 1) as i32;
            if rng.chance(ignored) { IGNORE_LABEL } else { label }
        })
        .collect()
}

fn loss(rows: usize, width: usize, vocab: usize, ignored: f64) -> Case {
    let name = format!("linear_cross_entropy/ignored {ignored}/{rows}x{width}/v{vocab}");
    let case = Case::new(name, |tape, args| {
        let (x, w) = (args.var("x")?, args.var("w")?);
        let (labels, weights) = (args.tensor("labels")?, args.tensor("weights")?);
        let loss = tape.linear_cross_entropy(x, w, labels, weights)?;
        let inputs = LossInputs { x: x.value(), w: w.value(), labels, weights: None };
        let quiet = tape.device().backend().linear_cross_entropy(&inputs)?;
        Ok(vec![
            Output::Loss("loss", loss, weights.clone()),
            Output::Plain("loss without gradient", quiet.loss.to_f64()?),
        ])
    });
    let mut rng = case.stream("labels");
    let labels = loss_labels(&mut rng, rows, vocab, ignored);
    let weights = rng.normals(rows);
    case.normal("x", &[rows, width])
        .normal("w", &[vocab, width])
        .int("labels", &[rows], labels)
        .constant("weights", &[rows], weights)
}

/// Logits that rise along the vocabulary by 40: whoever sums exponentials in passing must scale the sum down again and
/// again.
fn rising_loss(rows: usize, width: usize, vocab: usize) -> Case {
    let mut case = loss(rows, width, vocab, 0.2);
    case.name = format!("linear_cross_entropy/rising/{rows}x{width}/v{vocab}");
    for input in &mut case.inputs {
        let Data::Real(values) = &mut input.data else { continue };
        match input.name {
            "x" => values.iter_mut().step_by(width).for_each(|x| *x = 4.0),
            "w" => {
                let first = values.iter_mut().step_by(width).enumerate();
                first.for_each(|(id, w)| *w = round(10.0 * id as f64 / vocab as f64));
            }
            _ => {}
        }
    }
    case
}

/// Two losses on one projection, as micro-batches accumulate.
fn loss_twice() -> Case {
    let case = Case::new("linear_cross_entropy/twice/65x16/v40", |tape, args| {
        let (x, w) = (args.var("x")?, args.var("w")?);
        let (labels, weights) = (args.tensor("labels")?, args.tensor("weights")?);
        let first = tape.linear_cross_entropy(x, w, labels, weights)?;
        let second = tape.linear_cross_entropy(x, w, labels, weights)?;
        Ok(vec![
            Output::Loss("first", first, weights.clone()),
            Output::Loss("second", second, weights.clone()),
        ])
    });
    let mut rng = case.stream("labels");
    let labels = loss_labels(&mut rng, 65, 40, 0.2);
    let weights = rng.normals(65);
    case.normal("x", &[65, 16]).normal("w", &[40, 16]).int("labels", &[65], labels).constant(
        "weights",
        &[65],
        weights,
    )
}
