//! Caches of the launch path: tilings, tile configurations, kernels and zeroed memory.
//!
//! A short sequence takes the GPU less time than the host would need to format the defines of its kernels, to look them
//! up by these, and to enqueue memsets of counters.

use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::Segments;

use super::Attention;
use super::tiles::{self, Features, TileConfig};
use super::tiling::Tiling;
use crate::launch::Kernel;
use crate::lru::LruCache;
use crate::ops::path::PathTable;
use crate::ops::path::table::SpanSizes;
use crate::{Buffer, Float, Gpu, Result, Source};

/// Launch cache of a GPU.
#[derive(Default)]
pub(crate) struct LaunchCache {
    /// By segments and tile sizes.
    pub(super) tilings: LruCache<(Segments, usize, usize), Tiling>,
    /// Tables of PaTH attention, by segments and blocks of a span at each level.
    pub(in crate::ops) paths: LruCache<(Segments, SpanSizes), PathTable>,
    tiles: LruCache<TileKey, TileConfig>,
    zeros: ZeroArena,
}

impl LaunchCache {
    pub(crate) fn clear(&self) {
        self.tilings.clear();
        self.paths.clear();
        self.zeros.clear();
    }
}

/// Selects a main kernel.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct TileKey {
    forward: bool,
    wide: bool,
    wgmma: bool,
    head_dim: usize,
    features: Features,
}

impl TileKey {
    fn tile(&self) -> TileConfig {
        let &TileKey { forward, wide, wgmma, head_dim, features } = self;
        match (forward, wgmma) {
            _ if wide => tiles::f32_kernel(head_dim, forward),
            (true, true) => tiles::hopper_forward(head_dim, features),
            (true, false) => tiles::portable_forward(head_dim, features),
            (false, _) => tiles::hopper_backward(head_dim, features)
                .filter(|_| wgmma)
                .unwrap_or_else(|| tiles::portable_backward(head_dim, features)),
        }
    }
}

/// Compile-time parameters of a kernel, as a cache key.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Variant {
    /// No parameters.
    Only,
    /// Operands are f32 instead of bf16.
    Wide(bool),
    /// A main kernel.
    Main(TileKey),
}

impl<T: Float> Attention<'_, T> {
    pub(super) fn tile_key(&self, forward: bool) -> TileKey {
        TileKey {
            forward,
            wide: T::WIDE,
            wgmma: self.uses_wgmma(),
            head_dim: self.spec.head_dim,
            features: self.features(),
        }
    }

    pub(super) fn tile(&self, key: TileKey) -> Result<Arc<TileConfig>> {
        self.gpu.attention.tiles.get(key, || Ok(key.tile()))
    }

    /// The main kernel of this tile.
    pub(super) fn main_kernel(
        &self,
        key: TileKey,
        tile: &TileConfig,
        entry: &'static str,
    ) -> Result<Arc<Kernel>> {
        self.kernel(tile.source, entry, Variant::Main(key), || tile.defines.clone())
    }

    /// A kernel, cached by variant; `defines` is only evaluated to compile it.
    pub(super) fn kernel(
        &self,
        source: Source,
        entry: &'static str,
        variant: Variant,
        defines: impl FnOnce() -> Vec<String>,
    ) -> Result<Arc<Kernel>> {
        self.gpu.cached_kernel(source, entry, variant, |_| defines())
    }

    /// Zeroed memory for `len` integers.
    pub(super) fn zeros(&self, len: usize) -> Result<ZeroSlice> {
        self.gpu.attention.zeros.take(self.gpu, len)
    }
}

/// Integers of a slab, zeroed by one memset.
const SLAB_LEN: usize = 64 << 10;
/// Alignment of slices, in integers.
const ALIGN: usize = 32;
/// Longer slices are allocated and zeroed separately.
const MAX_SLICE_LEN: usize = 1 << 10;

/// Hands out slices of zeroed memory, each once: one memset zeroes many.
#[derive(Default)]
struct ZeroArena(Mutex<Option<ZeroSlab>>);

struct ZeroSlab {
    memory: Arc<Buffer<i32>>,
    used: usize,
}

/// A slice of zeroed memory.
pub(super) struct ZeroSlice {
    memory: Arc<Buffer<i32>>,
    first: usize,
}

impl ZeroSlice {
    pub(super) fn address(&self) -> u64 {
        self.memory.address() + 4 * self.first as u64
    }
}

impl ZeroArena {
    fn take(&self, gpu: &Gpu, len: usize) -> Result<ZeroSlice> {
        // A captured graph must zero its memory at every replay.
        if len > MAX_SLICE_LEN || gpu.is_capturing() {
            return Ok(ZeroSlice { memory: Arc::new(gpu.zeros(len)?), first: 0 });
        }
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let slab = match current.take().filter(|slab| slab.used + len <= SLAB_LEN) {
            Some(slab) => slab,
            None => ZeroSlab { memory: Arc::new(gpu.zeros(SLAB_LEN)?), used: 0 },
        };
        let zeros = ZeroSlice { memory: Arc::clone(&slab.memory), first: slab.used };
        let used = slab.used + len.next_multiple_of(ALIGN);
        *current = Some(ZeroSlab { used, ..slab });
        Ok(zeros)
    }

    fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
