//! What is kept from one call to the next: lists of tiles, the choice of kernels, cleared memory.
//!
//! A short sequence takes the GPU less time than the host would need to write the defines of its kernels, to look them
//! up and to clear a counter.

use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::Segments;

use super::Attention;
use super::tiles::{self, Features, Tile};
use super::tiling::Tiling;
use crate::launch::Kernel;
use crate::recent::Recent;
use crate::{Buffer, Float, Gpu, Result, Source};

/// Kept with the GPU.
#[derive(Default)]
pub(crate) struct Kept {
    /// By segments and tile sizes.
    pub(super) tilings: Recent<(Segments, usize, usize), Tiling>,
    tiles: Recent<TileKey, Tile>,
    kernels: Recent<(Source, &'static str, Variant), Kernel>,
    cleared: Cleared,
}

impl Kept {
    pub(crate) fn clear(&self) {
        self.tilings.clear();
        self.kernels.clear();
        self.cleared.clear();
    }
}

/// What decides about a main kernel.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct TileKey {
    forward: bool,
    wide: bool,
    hopper: bool,
    head_dim: usize,
    features: Features,
}

impl TileKey {
    fn tile(&self) -> Tile {
        let &TileKey { forward, wide, hopper, head_dim, features } = self;
        match (forward, hopper) {
            _ if wide => tiles::single(head_dim, forward),
            (true, true) => tiles::hopper_forward(head_dim, features),
            (true, false) => tiles::portable_forward(head_dim, features),
            (false, _) => tiles::hopper_backward(head_dim, features)
                .filter(|_| hopper)
                .unwrap_or_else(|| tiles::portable_backward(head_dim, features)),
        }
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Variant {
    /// There is one.
    Only,
    /// The type of the operands: f32 rather than bf16.
    Wide(bool),
    /// A main kernel.
    Main(TileKey),
}

impl<T: Float> Attention<'_, T> {
    pub(super) fn tile_key(&self, forward: bool) -> TileKey {
        TileKey {
            forward,
            wide: T::WIDE,
            hopper: self.hopper(),
            head_dim: self.spec.head_dim,
            features: self.features(),
        }
    }

    pub(super) fn tile(&self, key: TileKey) -> Result<Arc<Tile>> {
        self.gpu.attention.tiles.get(key, || Ok(key.tile()))
    }

    /// The main kernel of this tile.
    pub(super) fn main_kernel(
        &self,
        key: TileKey,
        tile: &Tile,
        entry: &'static str,
    ) -> Result<Arc<Kernel>> {
        self.kernel(tile.source, entry, Variant::Main(key), || tile.defines.clone())
    }

    /// A kernel that is looked up by its variant; `defines` describes it to the compiler.
    pub(super) fn kernel(
        &self,
        source: Source,
        entry: &'static str,
        variant: Variant,
        defines: impl FnOnce() -> Vec<String>,
    ) -> Result<Arc<Kernel>> {
        self.gpu.bind()?;
        let kernels = &self.gpu.attention.kernels;
        kernels.get((source, entry, variant), || self.gpu.kernel(source, &defines(), entry))
    }

    /// Memory for `len` integers, all 0.
    pub(super) fn cleared(&self, len: usize) -> Result<Zeros> {
        self.gpu.attention.cleared.take(self.gpu, len)
    }
}

/// Integers that are cleared together.
const SHEET: usize = 64 << 10;
/// A piece of a sheet begins at a multiple of this.
const PIECE: usize = 32;
/// More than this is cleared alone.
const LARGEST: usize = 1 << 10;

/// Small pieces of cleared memory: many are cleared by one memset, and each is handed out once.
#[derive(Default)]
struct Cleared(Mutex<Option<Sheet>>);

struct Sheet {
    memory: Arc<Buffer<i32>>,
    used: usize,
}

/// A piece of cleared memory, as long as this lives.
pub(super) struct Zeros {
    memory: Arc<Buffer<i32>>,
    first: usize,
}

impl Zeros {
    pub(super) fn address(&self) -> u64 {
        self.memory.address() + 4 * self.first as u64
    }
}

impl Cleared {
    fn take(&self, gpu: &Gpu, len: usize) -> Result<Zeros> {
        // A graph clears what it uses whenever it is replayed.
        if len > LARGEST || gpu.is_capturing() {
            return Ok(Zeros { memory: Arc::new(gpu.zeros(len)?), first: 0 });
        }
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sheet = match current.take().filter(|sheet| sheet.used + len <= SHEET) {
            Some(sheet) => sheet,
            None => Sheet { memory: Arc::new(gpu.zeros(SHEET)?), used: 0 },
        };
        let zeros = Zeros { memory: Arc::clone(&sheet.memory), first: sheet.used };
        let used = sheet.used + len.next_multiple_of(PIECE);
        *current = Some(Sheet { used, ..sheet });
        Ok(zeros)
    }

    fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
