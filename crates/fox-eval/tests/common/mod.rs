//! Models of known faults.
#![allow(dead_code)] // every test file uses a part of it

use std::path::PathBuf;

use fox_eval::Subject;
use fox_model::Model;
use fox_tensor::ParamId;

/// A reference dump: weights so large that every token before a position matters to it.
pub fn dump(name: &str) -> Model {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
    Model::from_checkpoint(&path, &fox_cpu::device()).unwrap()
}

/// The model under the name `tiny`.
pub fn subject(model: &Model) -> Subject<'_> {
    Subject { name: "tiny", model, training_length: Some(256) }
}

/// Replaces all elements of a parameter.
pub fn fill(model: &mut Model, id: ParamId, value: f32) {
    let tensor = model.params().value(id).clone();
    let filled = tensor.device().full(tensor.shape(), value).unwrap();
    model.params_mut().set(id, filled).unwrap();
}

/// A model whose output projection is `value` in every element.
pub fn broken(mut model: Model, value: f32) -> Model {
    let id = model.params().find("lm_head.weight").unwrap();
    fill(&mut model, id, value);
    model
}

/// Whether a message is the sentence about values that are not finite, and names the model.
pub fn says_not_finite(said: &str) -> bool {
    said.starts_with("the model tiny computes ")
        && said.contains("which is not a finite number")
        && said.contains("earlier checkpoint")
        && !said.contains('\n')
}
