//! Names and slices of parameters in files.

use fox_tensor::ParamId;

use crate::params::ParamSpec;

/// A tensor of a file: all or some rows of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// Name in the file.
    pub name: String,
    /// Extents in the file.
    pub dims: Vec<usize>,
    /// The parameter it belongs to.
    pub param: ParamId,
    /// Position of its first element in the parameter.
    pub start: usize,
}

impl FileTensor {
    /// Number of elements.
    pub fn count(&self) -> usize {
        self.dims.iter().product()
    }
}

/// A parameter that is stored as it is, under its own name.
pub fn single_tensor(id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
    vec![FileTensor { name: spec.name.clone(), dims: spec.dims.clone(), param: id, start: 0 }]
}

/// As [`single_tensor`], but the two halves of an MLP's first matrix are separate tensors: `gate_proj` and
/// `up_proj`.
pub fn split_mlp(id: ParamId, spec: &ParamSpec) -> Vec<FileTensor> {
    let Some(block) = spec.name.strip_suffix(".mlp.gate_proj.weight") else {
        return single_tensor(id, spec);
    };
    let part = |name: &str, start: usize| FileTensor {
        name: format!("{block}.mlp.{name}.weight"),
        dims: vec![spec.dims[0] / 2, spec.dims[1]],
        param: id,
        start,
    };
    vec![part("gate_proj", 0), part("up_proj", spec.count() / 2)]
}
