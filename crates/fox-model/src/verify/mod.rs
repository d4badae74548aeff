//! Verification against a reference dump: the same weights and tokens must give the same logits, losses,
//! gradients and greedy continuation, computed in full and through the cache.

mod dump;
mod greedy;

use std::collections::BTreeMap;
use std::path::Path;

use fox_base::difference::relative_error;
use fox_tensor::{Device, Gradients, Tape, Tensor};

use crate::checkpoint::CheckpointReader;
use crate::{Error, ForwardOptions, Model, ModelType, Result};
use dump::Dump;

/// The largest errors that still count as equal: norm-wise relative, per tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    /// Of the logits.
    pub logits: f64,
    /// Of the loss per token and its mean.
    pub loss: f64,
    /// Of each gradient.
    pub grad: f64,
}

impl Default for Tolerances {
    /// For a float32 implementation.
    fn default() -> Self {
        Tolerances { logits: 5e-6, loss: 2e-6, grad: 2e-5 }
    }
}

/// One comparison.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct VerifyCheck {
    /// The compared values.
    pub name: String,
    /// Norm-wise relative error, or the number of tokens that differ.
    pub error: f64,
    /// The largest error that passes.
    pub tolerance: f64,
}

impl VerifyCheck {
    /// Whether it is within tolerance; an error that is not a number is not.
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// All comparisons of a dump.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// In the order they were made.
    pub checks: Vec<VerifyCheck>,
    /// Number of elements of all parameters.
    pub parameters: usize,
    /// The format of the checkpoint.
    pub model_type: ModelType,
}

impl VerifyReport {
    /// Whether every comparison is within tolerance.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(VerifyCheck::passed)
    }
}

/// Recomputes everything in the dump folder `dir` on `device` and compares.
pub fn verify_dump(dir: &Path, device: &Device, tolerances: &Tolerances) -> Result<VerifyReport> {
    let mut reader = CheckpointReader::open(dir)?;
    let model = Model::from_reader(&mut reader, device)?;
    let dump = Dump::open(&dir.join("io.safetensors"), model.config().vocab_size)?;
    let mut checks = Vec::new();
    let mut check = |name: &str, error: f64, tolerance: f64| {
        checks.push(VerifyCheck { name: name.to_string(), error, tolerance });
    };
    check(
        "logits",
        relative_error(&full_logits(&model, &dump)?, &dump.logits, 0.0),
        tolerances.logits,
    );
    for (name, chunk) in [("logits, cached token by token", 1), ("logits, cached in chunks", 16)] {
        let (got, want) = greedy::cached_logits(&model, &dump, chunk)?;
        check(name, relative_error(&got, &want, 0.0), tolerances.logits);
    }
    let mut gradients = Gradients::default();
    let losses = losses(&model, &dump, &mut gradients)?;
    check("loss per token", relative_error(&losses, &dump.loss, 0.0), tolerances.loss);
    let mean: f64 = losses.iter().zip(&dump.weights).map(|(l, w)| l * f64::from(*w)).sum();
    check("mean loss", relative_error(&[mean], &[dump.mean_loss], 0.0), tolerances.loss);
    for (name, error) in gradient_errors(&model, &gradients, &dump, reader.model_type())? {
        check(&name, error, tolerances.grad);
    }
    for (name, method) in greedy::METHODS {
        let tokens = greedy::continuation(&model, &dump, method)?;
        let differing = tokens.iter().zip(&dump.greedy).filter(|(a, b)| a != b).count();
        check(name, differing as f64, 0.0);
    }
    let (parameters, model_type) = (model.params().count(), reader.model_type());
    Ok(VerifyReport { checks, parameters, model_type })
}

fn full_logits(model: &Model, dump: &Dump) -> Result<Vec<f64>> {
    let device = model.device();
    let tokens = device.from_i32(&dump.input_ids, [dump.rows()])?;
    let mut tape = Tape::inference(device);
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &tokens, &dump.segments()?, None, &options)?;
    Ok(model.logits(&mut tape, &hidden.states)?.value().to_f64()?)
}

/// The loss of every token; their weighted gradients are added to `gradients`.
fn losses(model: &Model, dump: &Dump, gradients: &mut Gradients) -> Result<Vec<f64>> {
    let device = model.device();
    let rows = dump.rows();
    let tokens = device.from_i32(&dump.input_ids, [rows])?;
    let labels = device.from_i32(&dump.labels, [rows])?;
    let weights = device.from_f32(&dump.weights, [rows])?;
    let mut tape = Tape::recording(device);
    let options = ForwardOptions::default();
    let loss = model.loss(&mut tape, &tokens, &labels, &weights, &dump.segments()?, &options)?;
    tape.backward(gradients)?;
    Ok(loss.per_token.to_f64()?)
}

/// The error of every gradient under its name in the file. The dump and the model must have
/// gradients for exactly the same tensors.
fn gradient_errors(
    model: &Model,
    gradients: &Gradients,
    dump: &Dump,
    model_type: ModelType,
) -> Result<Vec<(String, f64)>> {
    let mut wanted: BTreeMap<&str, &Vec<f32>> =
        dump.gradients.iter().map(|(name, values)| (name.as_str(), values)).collect();
    let (mut errors, mut disagreements) = (Vec::new(), Vec::new());
    for (id, spec, _) in model.params().iter().filter(|(_, spec, _)| spec.trainable) {
        let values = match gradients.get(id).map(Tensor::to_f64) {
            Some(values) => values?,
            None => vec![0.0; spec.count()],
        };
        for tensor in model_type.file_tensors(id, spec) {
            let got = &values[tensor.start..][..tensor.count()];
            match wanted.remove(tensor.name.as_str()) {
                Some(want) => {
                    errors.push((format!("grad.{}", tensor.name), relative_error(got, want, 0.0)));
                }
                None => disagreements.push(format!("no gradient of {}", tensor.name)),
            }
        }
    }
    disagreements.extend(wanted.keys().map(|name| format!("a gradient of {name}, not trained")));
    if !disagreements.is_empty() {
        let detail = format!("the dump has {}", disagreements.join("; "));
        return Err(Error::Dump { file: dump.file.clone(), detail });
    }
    Ok(errors)
}
