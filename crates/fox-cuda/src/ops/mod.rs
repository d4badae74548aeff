//! The ops of the backend: each folder has an op's launches and its kernels.
//!
//! A kernel is declared where it is launched: its source with `source!`, its parameters with
//! `kernel_params!`. `variants` below is the list of all of them.

pub mod attention;
mod channel_decay;
pub(crate) mod columns;
mod conv;
mod decode;
mod dropout;
pub(crate) mod elementwise;
mod embedding;
mod gate;
mod gated_norm;
mod glu;
mod head_fragments;
mod heads;
mod hgrn;
pub(crate) mod linear;
mod loss;
mod norm;
mod orthogonalize;
pub(crate) mod packed;
pub(crate) mod paged;
pub(crate) mod path;
mod recompute;
mod reflection;
pub(crate) mod scan;
mod sink;
mod stick;
mod time_step;
mod update;
mod wall;

use crate::{Generation, Source};

/// Typical variants of all kernels, and every variant of the attention kernels that a device can be asked
/// for: source and defines. For compilation checks.
pub fn variants(generation: Generation) -> Vec<(Source, Vec<String>)> {
    let ops = [
        channel_decay::variants,
        columns::variants,
        conv::variants,
        dropout::variants,
        elementwise::variants,
        embedding::variants,
        gate::variants,
        gated_norm::variants,
        glu::variants,
        heads::variants,
        hgrn::variants,
        linear::thin::variants,
        loss::variants,
        norm::variants,
        orthogonalize::variants,
        packed::variants,
        paged::variants,
        path::variants,
        reflection::variants,
        scan::add::variants,
        scan::delta::variants,
        sink::variants,
        stick::variants,
        time_step::variants,
        update::variants,
        wall::variants,
    ];
    let mut all = attention::variants(generation);
    all.extend(decode::variants(generation));
    all.extend(path::span_variants(generation));
    all.extend(wall::span_variants(generation));
    all.extend(ops.iter().flat_map(|variants| variants()));
    all
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use super::*;

    /// Names without extension of the `.cu` files below a folder.
    fn files(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "cu") {
                found.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    fn variants_list_every_kernel_once() {
        let mut names = Vec::new();
        files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops"), &mut names);
        let files: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(files.len(), names.len(), "two files have the same name: {names:?}");
        let mut texts = BTreeMap::new();
        for (source, _) in variants(Generation::Hopper) {
            assert_eq!(*texts.entry(source.name).or_insert(source.text), source.text);
        }
        assert_eq!(files, texts.into_keys().collect());
    }
}
