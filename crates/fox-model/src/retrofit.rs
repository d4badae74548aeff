//! Forget gates for a model that was trained without them.
//!
//! A gate with weights of 0 and a bias `b` forgets `softplus(-b)` nat per token whatever the input is. With a memory of
//! `T` tokens that is `1 / T`, so over `n` tokens no logit of the attention changes by more than `n / T`.

use std::path::Path;

use fox_base::durable::{self, NewFolder};
use fox_tensor::{Activation, ParamId};

use crate::checkpoint::{
    CheckpointReader, FileDtype, WriteOptions, copy_tokenizer_files, write_checkpoint,
};
use crate::mixers::ModelType;
use crate::mixers::forgetting::{DecayTime, ForgetGate, ForgettingConfig};
use crate::{Error, ModelConfig, Result};

/// Memory relative to the length that a model is meant for, where none is given.
const FAR_BEYOND: f64 = 1e6;

/// Options of a retrofit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RetrofitOptions {
    /// Memory lengths in tokens: one for all heads, one for each, or none for a million times the length that the
    /// model is meant for.
    pub memory: Vec<f64>,
    /// An output gate too. It starts at one half, and the output projection with twice its weights, which changes
    /// no bit of the result.
    pub output_gate: bool,
}

/// Result of a retrofit.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RetrofitReport {
    /// The format of the original.
    pub from: ModelType,
    /// The format that was written.
    pub to: ModelType,
    /// Number of parameters.
    pub parameters: usize,
    /// How many of them are new.
    pub added: usize,
    /// Decay of the fastest gate, in nat per token.
    pub decay: f64,
}

/// The options of a model with forget gates, and the biases of the gates of a layer `[H]`.
fn plan(config: &ModelConfig, options: &RetrofitOptions) -> Result<(ModelConfig, Vec<f32>)> {
    let refuse = |detail: String| Err(Error::Argument(detail));
    let mut with = config.clone();
    let Some(mixer) = with.mixer.forgetting_mut() else {
        let kind = config.mixer.kind();
        return refuse(format!("gates can be added to attention, but the model is {kind}"));
    };
    if mixer.gate != ForgetGate::None {
        return refuse("the model has forget gates already".into());
    }
    if options.output_gate && mixer.output_gate.is_some() {
        return refuse("the model has an output gate already; do not add another".into());
    }
    let heads = mixer.heads;
    let memory = match options.memory.as_slice() {
        [] => vec![FAR_BEYOND * config.max_position_embeddings as f64; heads],
        [all] => vec![*all; heads],
        each if each.len() == heads => each.to_vec(),
        each => {
            let given = each.len();
            return refuse(format!(
                "{given} memory lengths do not fit {heads} heads; give one or {heads}"
            ));
        }
    };
    if let Some(bad) = memory.iter().find(|t| !(1.0..=1e30).contains(*t)) {
        return refuse(format!("a memory of {bad} tokens cannot be; give between 1 and 1e30"));
    }
    let bias = |t: &f64| DecayTime { min: *t, max: *t }.gate_biases(1)[0];
    let biases = memory.iter().map(bias).collect();
    *mixer = ForgettingConfig {
        gate: ForgetGate::Full,
        output_gate: options.output_gate.then_some(Activation::Sigmoid).or(mixer.output_gate),
        ..mixer.clone()
    };
    Ok((with, biases))
}

/// Writes the checkpoint `from` with forget gates to `to`, in fox's native format, tokenizer files included.
///
/// # Errors
/// A model without attention or with gates, memory lengths that do not fit its heads, a `to` that is not empty.
pub fn retrofit_checkpoint(
    from: &Path,
    to: &Path,
    options: &RetrofitOptions,
) -> Result<RetrofitReport> {
    let mut reader = CheckpointReader::open(from)?;
    let (config, biases) = plan(reader.config(), options)
        .map_err(|e| Error::Argument(format!("{}: {e}", from.display())))?;
    if !durable::is_vacant(to)? {
        return Err(Error::Occupied { path: to.to_path_buf() });
    }
    let specs = config.param_specs();
    let old: Vec<String> = reader.specs().iter().map(|spec| spec.name.clone()).collect();
    let place = |name: &str| old.iter().position(|known| known == name).map(ParamId);
    let added = specs.iter().filter(|spec| place(&spec.name).is_none()).map(|s| s.count()).sum();
    let write = WriteOptions {
        model_type: ModelType::NATIVE_FOX,
        dtype: FileDtype::F32,
        max_shard_bytes: None,
    };
    let folder = NewFolder::create(to)?;
    write_checkpoint(folder.path(), &config, &write, |id| {
        let spec = &specs[id.0];
        let Some(at) = place(&spec.name) else {
            let is_bias = spec.name.ends_with(".fgate_proj.bias");
            return Ok(if is_bias { biases.clone() } else { vec![0.0; spec.count()] });
        };
        let mut values = reader.read(at)?;
        if options.output_gate && spec.name.ends_with(".o_proj.weight") {
            values.iter_mut().for_each(|value| *value *= 2.0);
        }
        Ok(values)
    })?;
    copy_tokenizer_files(from, folder.path())?;
    folder.publish()?;
    let forgets = |bias: &f32| (-f64::from(*bias)).exp().ln_1p();
    Ok(RetrofitReport {
        from: reader.model_type(),
        to: write.model_type,
        parameters: specs.iter().map(|spec| spec.count()).sum(),
        added,
        decay: biases.iter().map(forgets).fold(0.0, f64::max),
    })
}
