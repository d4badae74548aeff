//! Constants that host and kernels share. Kernels include them as `constants.cuh`.

/// Most thread blocks that the keys of a decoding sequence are split over.
pub(crate) const MAX_KV_SPLITS: usize = 64;
/// Most ranges that the columns of a decode matmul are split into.
pub(crate) const MAX_K_SPLITS: usize = 8;

const CONSTANTS: [(&str, usize); 4] = [
    ("PAGE", fox_tensor::PAGE),
    ("INT8_BLOCK", fox_tensor::INT8_BLOCK),
    ("MAX_KV_SPLITS", MAX_KV_SPLITS),
    ("MAX_K_SPLITS", MAX_K_SPLITS),
];

/// The text of `constants.cuh`.
pub(crate) fn constants_header() -> String {
    let line = |(name, value): &(&str, usize)| format!("constexpr int {name} = {value};\n");
    format!("#pragma once\n{}", CONSTANTS.iter().map(line).collect::<String>())
}
