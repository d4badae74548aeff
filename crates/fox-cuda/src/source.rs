//! Kernel sources. Each op declares its own with [`source!`], beside its launches.

use crate::params::{Declaration, constants_header, header};

/// A kernel source: a `.cu` file, its headers and the structs of its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name without folder and extension, unique among sources.
    pub name: &'static str,
    pub(crate) text: &'static str,
    /// Headers of the op, name and text.
    pub(crate) headers: &'static [(&'static str, &'static str)],
    /// The contents of `params.cuh`.
    pub(crate) params: &'static [Declaration],
}

// Compared by name: comparing texts at every launch would cost as much as the launch.
impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}
impl Eq for Source {}
impl std::hash::Hash for Source {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// `source!("norm", [headers], [structs])`: the file `norm.cu` of this folder with further headers of this
/// folder and structs defined by `kernel_params!`.
macro_rules! source {
    ($name:literal, [$($header:literal),*], [$($params:ty),* $(,)?]) => {
        $crate::Source {
            name: $name,
            text: include_str!(concat!($name, ".cu")),
            headers: &[$(($header, include_str!($header))),*],
            params: &[$(<$params as $crate::params::KernelParams>::DECLARATION),*],
        }
    };
}
pub(crate) use source;

macro_rules! shared {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("cuda/", $name)))),*]
    };
}
/// Headers that several ops include.
const SHARED: &[(&str, &str)] = shared!(
    "attention.cuh",
    "flat.cuh",
    "int8.cuh",
    "mma.cuh",
    "overlap.cuh",
    "head_fragments.cuh",
    "head_tiles.cuh",
    "ptx.cuh",
    "real.cuh",
    "scan.cuh",
    "spans.cuh",
    "tiles.cuh",
    "tma.cuh",
    "triangular.cuh",
    "warpgroup.cuh",
    "wgmma.cuh"
);

impl Source {
    /// The texts of sources and of all their includes, by file name, with one `params.cuh` for all of them: for tests that
    /// compile them for the host.
    pub fn files(sources: &[Source]) -> Vec<(String, String)> {
        let mut params: Vec<Declaration> = Vec::new();
        let mut files = Vec::new();
        for source in sources {
            files.push((format!("{}.cu", source.name), source.text.to_owned()));
            files.extend(source.headers().into_iter().map(|(name, text)| (name.to_owned(), text)));
            for declaration in source.params {
                if params.iter().all(|known| known.name != declaration.name) {
                    params.push(*declaration);
                }
            }
        }
        files.retain(|(name, _)| name != "params.cuh");
        files.push(("params.cuh".to_owned(), header(&params)));
        files
    }

    /// All headers that the source may include, name and text.
    pub(crate) fn headers(&self) -> Vec<(&'static str, String)> {
        let files = SHARED.iter().chain(self.headers);
        let mut all: Vec<_> = files.map(|&(name, text)| (name, text.to_owned())).collect();
        all.push(("constants.cuh", constants_header()));
        all.push(("params.cuh", header(self.params)));
        all
    }
}
