//! Cases of the loss with ignored labels, for every size of vocabulary.

use crate::cases::{Case, Data, Output, Rng, round};
use crate::naive::{dot, logsumexp};
use crate::{IGNORE_LABEL, LossInputs, Result, Teacher, Tensor};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        [1, 2, 3, 17, 64, 257, 1000].into_iter().map(|vocab| loss(13, 24, vocab, 0.3)).collect();
    cases.extend([
        loss(1, 8, 5, 0.0),
        loss(113, 40, 203, 0.1),
        loss(799, 3, 65, 0.5),
        loss(7, 16, 33, 1.0),
    ]);
    // A GPU thread reads several vectors of a row, of one element or of eight: 4099 is odd, 8208 is not.
    cases.extend([loss(5, 16, 4099, 0.2), rising_loss(5, 16, 8208)]);
    cases.push(loss_twice());
    for vocab in [1, 3, 64, 1000, 8208] {
        cases.push(taught(13, (24, 40), vocab, 0.25));
    }
    cases.extend([taught(113, (40, 16), 203, 1.0), taught(65, (16, 16), 257, 0.0)]);
    cases
}

/// Distillation from a teacher of another width.
fn taught(rows: usize, (width, other): (usize, usize), vocab: usize, weight: f32) -> Case {
    let name = format!("linear_cross_entropy/taught {weight}/{rows}x{width}:{other}/v{vocab}");
    let case = Case::new(name, move |tape, args| {
        let (x, w) = (args.var("x")?, args.var("w")?);
        let (labels, weights) = (args.tensor("labels")?, args.tensor("weights")?);
        let teacher = Teacher { x: args.tensor("tx")?, w: args.tensor("tw")?, weight };
        let loss = tape.distillation_cross_entropy(x, w, labels, weights, Some(teacher))?;
        let divergences = divergences([x.value(), w.value(), teacher.x, teacher.w], labels)?;
        let a = f64::from(weight);
        let both = loss.to_f64()?.into_iter().zip(divergences);
        let objective: Vec<f64> = both.map(|(loss, kl)| (1.0 - a) * loss + a * kl).collect();
        let objective = tape.device().from_f64(&objective, loss.shape())?;
        Ok(vec![
            Output::Plain("loss", loss.to_f64()?),
            Output::Loss("objective", objective, weights.clone()),
        ])
    });
    let mut rng = case.rng("labels");
    let labels = loss_labels(&mut rng, rows, vocab, 0.2);
    let weights = rng.normals(rows);
    let (tx, tw) = (rng.normals(rows * other), rng.normals(vocab * other));
    case.normal("x", &[rows, width])
        .normal("w", &[vocab, width])
        .int("labels", &[rows], labels)
        .constant("weights", &[rows], weights)
        .constant("tx", &[rows, other], tx)
        .constant("tw", &[vocab, other], tw)
}

/// `KL(teacher_r || student_r)` of the labelled rows, on the host; the student's states and projection, then those of
/// the teacher.
fn divergences(tensors: [&Tensor; 4], labels: &Tensor) -> Result<Vec<f64>> {
    let [x, w, tx, tw] = tensors;
    let probabilities = |x: &Tensor, w: &Tensor| -> Result<Vec<Vec<f64>>> {
        let (width, x, w) = (x.cols(), x.to_f64()?, w.to_f64()?);
        let row = |x: &[f64]| {
            let logits: Vec<f64> = w.chunks(width).map(|w| dot(x, w)).collect();
            let lse = logsumexp(&logits);
            logits.iter().map(|logit| (logit - lse).exp()).collect()
        };
        Ok(x.chunks(width).map(row).collect())
    };
    let both = probabilities(tx, tw)?.into_iter().zip(probabilities(x, w)?);
    let divergence = |(p, q): (Vec<f64>, Vec<f64>)| -> f64 {
        p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum()
    };
    let labelled = labels.to_i32()?.into_iter().map(|label| label != IGNORE_LABEL);
    Ok(both.zip(labelled).map(|(pair, on)| if on { divergence(pair) } else { 0.0 }).collect())
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
        let (x, w) = (x.value(), w.value());
        let inputs = LossInputs { x, w, labels, weights: None, teacher: None };
        let quiet = tape.device().backend().linear_cross_entropy(&inputs)?;
        Ok(vec![
            Output::Loss("loss", loss, weights.clone()),
            Output::Plain("loss without gradient", quiet.loss.to_f64()?),
        ])
    });
    let mut rng = case.rng("labels");
    let labels = loss_labels(&mut rng, rows, vocab, ignored);
    let weights = rng.normals(rows);
    case.normal("x", &[rows, width])
        .normal("w", &[vocab, width])
        .int("labels", &[rows], labels)
        .constant("weights", &[rows], weights)
}

/// Logits that rise along the vocabulary by 40: an online softmax rescales its sum many times.
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
    let mut rng = case.rng("labels");
    let labels = loss_labels(&mut rng, 65, 40, 0.2);
    let weights = rng.normals(65);
    case.normal("x", &[65, 16]).normal("w", &[40, 16]).int("labels", &[65], labels).constant(
        "weights",
        &[65],
        weights,
    )
}
