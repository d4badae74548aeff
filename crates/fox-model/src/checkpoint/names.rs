//! What parameters are called in files, and how they are cut.

use fox_tensor::ParamId;

use crate::config::Layout;
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

/// What a tensor is called in files of older versions of the references.
pub fn old_name(name: &str) -> Option<String> {
    Some(format!("backbone.embedding.{}", name.strip_prefix("backbone.embeddings.")?))
}

/// The file tensors of a parameter, in order; together they are the parameter.
pub fn file_tensors(id: ParamId, spec: &ParamSpec, layout: Layout) -> Vec<FileTensor> {
    let whole =
        |name: String| vec![FileTensor { name, dims: spec.dims.clone(), param: id, start: 0 }];
    if layout == Layout::Official {
        return whole(spec.name.clone());
    }
    match spec.name.strip_suffix(".mlp.gate_proj.weight") {
        Some(block) => {
            let dims = vec![spec.dims[0] / 2, spec.dims[1]];
            let part = |name: &str, start: usize| FileTensor {
                name: format!("{block}.mlp.{name}.weight"),
                dims: dims.clone(),
                param: id,
                start,
            };
            vec![part("gate_proj", 0), part("up_proj", spec.count() / 2)]
        }
        None => whole(
            spec.name
                .replace(".attn.fgate_proj.", ".attn.f_proj.")
                .replace(".attn.ogate_proj.", ".attn.g_proj."),
        ),
    }
}
