//! Every tile size of the attention kernels, with its reason.
//!
//! A Hopper thread block has up to 227 KiB of shared memory and 64 Ki registers: 160 per consumer thread with three
//! consumer warpgroups, 240 with two.

use fox_tensor::Mask;

use super::backward::BACKWARD_SM90;
use super::forward::{FORWARD, FORWARD_SM90};
use super::two_pass::{ATTENTION_F32, BACKWARD};
use crate::{Generation, Source};

/// Limits of dynamic shared memory per block in bytes: on Hopper, and on the smallest supported GPU.
pub(in crate::ops) const HOPPER_SHARED: usize = 227 * 1024;
#[cfg(test)]
pub(in crate::ops) const LEAST_SHARED: usize = 99 * 1024;

/// Tile sizes and launch configuration of a main kernel.
#[derive(Clone, Debug)]
pub(crate) struct TileConfig {
    pub(crate) source: Source,
    pub(crate) block_m: usize,
    pub(crate) block_n: usize,
    pub(crate) threads: usize,
    pub(crate) shared: usize,
    pub(crate) defines: Vec<String>,
}

/// Compile-time features of a kernel besides the head dim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Features {
    pub(crate) gates: bool,
    pub(crate) mask: Mask,
    pub(crate) window: bool,
}

impl Features {
    fn defines(self) -> [String; 3] {
        [
            format!("GATES={}", i32::from(self.gates)),
            format!("MASK={}", i32::from(self.mask == Mask::Bidirectional)),
            format!("WINDOW={}", i32::from(self.window)),
        ]
    }
}

/// Head dims are padded with zeros to one of these.
pub(crate) const HEAD_DIMS: [usize; 5] = [64, 96, 128, 192, 256];

pub(crate) fn padded_head_dim(head_dim: usize) -> usize {
    HEAD_DIMS.into_iter().find(|&d| d >= head_dim).unwrap_or(256)
}

/// Forward on Hopper.
pub(crate) fn hopper_forward(head_dim: usize, features: Features) -> TileConfig {
    let head_dim = padded_head_dim(head_dim);
    // (consumer warpgroups, keys per block, K/V stages, half-block main loop)
    let (warpgroups, block_n, stages, halves) = match head_dim {
        // Exponentials cost as much as the products: three warpgroups to overlap them, and 192 rows per tile to cut the
        // L2 traffic of K and V by a third. Halves of 48 keys: S, P, O and Q take 48 + 24 + 32 + 16 registers; halves
        // of 64 keys would leave none for Q. The warpgroups drift up to two blocks apart, so two stages would stall.
        64 => (3, 96, 4, true),
        // 64 + 32 + 64 + 32 registers: room for two warpgroups only. 160 KiB.
        96 | 128 => (2, 128, 2, true),
        // The output accumulators take 96 (128) registers and Q 48 (64) KiB: fewer keys per block.
        192 => (2, 96, 2, false),
        _ => (2, 64, 2, false),
    };
    let slabs = head_dim.div_ceil(64);
    let tiles = slabs * 128 * (64 * warpgroups + 2 * stages * block_n);
    let mut defines = vec![
        format!("HEAD_DIM={head_dim}"),
        format!("BLOCK_N={block_n}"),
        format!("STAGES={stages}"),
        format!("WARPGROUPS={warpgroups}"),
        format!("HALF_BLOCKS={}", i32::from(halves)),
    ];
    defines.extend(features.defines());
    tile(FORWARD_SM90, 64 * warpgroups, block_n, warpgroups + 1, tiles, defines)
}

/// Backward on Hopper; none for bidirectional masks with head dims above 128.
pub(crate) fn hopper_backward(head_dim: usize, features: Features) -> Option<TileConfig> {
    let head_dim = padded_head_dim(head_dim);
    // (queries, keys per tile, stages of dO, of dS)
    let (block_m, block_n, d_out_stages, ds_stages) = match head_dim {
        // Two warpgroups of 64 keys hold dK and dV in registers, beside S and dP of 128 queries or 64 queries.
        64 => (128, 128, 2, 3),
        96 | 128 => (64, 128, 2, 3),
        _ if features.mask == Mask::Bidirectional => return None,
        // One warpgroup holds dK of 64 keys and the other dV, 96 (128) registers, beside S (dP), dQ and an operand of 32,
        // 32 and 16.
        192 => (64, 64, 2, 2),
        _ => (64, 64, 1, 2),
    };
    let slabs = head_dim.div_ceil(64);
    let kv = 2 * slabs * block_n * 128;
    let queries = (2 + d_out_stages) * slabs * block_m * 128;
    let ds = ds_stages * (block_m / 64) * block_n * 128;
    let probabilities = if head_dim > 128 { 64 * 64 * 4 } else { 0 };
    let dq = 2 * 64 * 64 * 4;
    let mut defines = vec![format!("HEAD_DIM={head_dim}"), format!("BLOCK_M={block_m}")];
    defines.extend(features.defines());
    Some(tile(BACKWARD_SM90, block_m, block_n, 3, kv + queries + ds + probabilities + dq, defines))
}

/// Portable forward: 64 queries per block, tiles within 99 KiB of shared memory.
pub(crate) fn portable_forward(head_dim: usize, features: Features) -> TileConfig {
    let head_dim = padded_head_dim(head_dim);
    let block_n = if head_dim <= 128 { 64 } else { 32 };
    let shared = (64 + 2 * block_n) * (head_dim + 8) * 2 + 4 * block_n;
    let mut defines = vec![format!("HEAD_DIM={head_dim}"), format!("BLOCK_N={block_n}")];
    defines.extend(features.defines());
    defines.push(format!("SHARED_BYTES={shared}"));
    TileConfig { source: FORWARD, block_m: 64, block_n, threads: 128, shared, defines }
}

/// Portable backward.
pub(crate) fn portable_backward(head_dim: usize, features: Features) -> TileConfig {
    let head_dim = padded_head_dim(head_dim);
    // Streamed rows per step: shared memory limits wide heads to 16.
    let step = if head_dim <= 128 { 64 } else { 16 };
    let shared = (2 * 64 + 2 * step) * (head_dim + 8) * 2 + 20 * step;
    let mut defines = vec![format!("HEAD_DIM={head_dim}"), format!("STEP={step}")];
    defines.extend(features.defines());
    defines.push(format!("SHARED_BYTES={shared}"));
    TileConfig { source: BACKWARD, block_m: 64, block_n: 64, threads: 128, shared, defines }
}

/// Resident rows of the 64 of a tile, and streamed rows per step, in the f32 kernels; limited by shared memory.
fn f32_resident_rows(head_dim: usize) -> (usize, usize) {
    if head_dim > 128 { (32, 8) } else { (64, 16) }
}

/// Thread blocks per tile of 64 rows in the f32 kernels.
pub(crate) fn f32_row_splits(head_dim: usize) -> usize {
    64 / f32_resident_rows(head_dim).0
}

/// f32 kernels of either direction; the forward has one resident operand, the backward two.
pub(crate) fn f32_kernel(head_dim: usize, forward: bool) -> TileConfig {
    let head_dim = if head_dim <= 64 { 64 } else { head_dim.next_power_of_two() };
    let (own, step) = f32_resident_rows(head_dim);
    let operands = if forward { 1 } else { 2 };
    let floats = operands * ((own + step) * (head_dim + 1) + own * step);
    TileConfig {
        source: ATTENTION_F32,
        block_m: 64,
        block_n: 64,
        threads: 256,
        shared: 4 * floats,
        defines: vec![format!("HEAD_DIM={head_dim}")],
    }
}

/// Thread blocks over which the portable and the stick-breaking backward split the columns of dK and dV.
pub(crate) fn portable_column_splits(head_dim: usize) -> usize {
    if padded_head_dim(head_dim) > 128 { 2 } else { 1 }
}

fn tile(
    source: Source,
    block_m: usize,
    block_n: usize,
    warpgroups: usize,
    tile_bytes: usize,
    mut defines: Vec<String>,
) -> TileConfig {
    // Reserve for barriers, row statistics, biases and tile descriptions.
    let shared = tile_bytes + 3 * 1024;
    debug_assert!(shared <= HOPPER_SHARED);
    defines.push(format!("SHARED_BYTES={shared}"));
    TileConfig { source, block_m, block_n, threads: 128 * warpgroups, shared, defines }
}

/// Every variant of the main kernels that a device of this architecture can be asked for, for
/// compilation checks: source and defines.
pub(super) fn variants(generation: Generation) -> Vec<(Source, Vec<String>)> {
    let mut variants = Vec::new();
    for gates in [true, false] {
        for mask in [Mask::Causal, Mask::Bidirectional] {
            for window in [false, true] {
                let features = Features { gates, mask, window };
                for head_dim in HEAD_DIMS {
                    for portable in [portable_forward, portable_backward] {
                        let tile = portable(head_dim, features);
                        variants.push((tile.source, tile.defines));
                    }
                    if generation.has_wgmma() {
                        let fwd = hopper_forward(head_dim, features);
                        variants.push((fwd.source, fwd.defines));
                        let bwd = hopper_backward(head_dim, features);
                        variants.extend(bwd.map(|t| (t.source, t.defines)));
                    }
                }
            }
        }
    }
    for head_dim in [64, 128, 256] {
        variants.push((ATTENTION_F32, f32_kernel(head_dim, true).defines));
    }
    variants
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_shared_memory() {
        for head_dim in [8, 64, 72, 96, 128, 160, 192, 256] {
            let features = Features { gates: true, mask: Mask::Causal, window: false };
            assert!(hopper_forward(head_dim, features).shared <= HOPPER_SHARED, "{head_dim}");
            assert!(portable_forward(head_dim, features).shared <= LEAST_SHARED, "{head_dim}");
            assert!(portable_backward(head_dim, features).shared <= LEAST_SHARED, "{head_dim}");
            assert!(f32_kernel(head_dim, false).shared <= LEAST_SHARED, "{head_dim}");
            if let Some(tile) = hopper_backward(head_dim, features) {
                assert!(tile.shared <= HOPPER_SHARED, "{head_dim}");
            }
        }
    }
}
