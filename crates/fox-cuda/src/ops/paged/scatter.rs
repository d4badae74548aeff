//! Many small writes to device memory by one upload and one launch: each copy of the driver takes longer than its bytes.

use super::{PAGED, ScatterParams, ScatterPiece};
use crate::backend::Cuda;
use crate::backend::launcher::{Op, Variant};
use crate::{Result, params};

/// Bytes of a word, of which writes consist.
const WORD: usize = size_of::<u64>();
/// Threads of a write.
const THREADS: usize = 64;

/// Writes that are to be made.
#[derive(Default)]
pub(crate) struct Writes {
    pieces: Vec<ScatterPiece>,
    words: Vec<u8>,
}

impl Writes {
    /// Adds one of whole words.
    pub(crate) fn push(&mut self, address: u64, bytes: &[u8]) {
        debug_assert!(bytes.len().is_multiple_of(WORD) && address.is_multiple_of(WORD as u64));
        let (first, count) = (self.words.len() / WORD, bytes.len() / WORD);
        self.pieces.push(ScatterPiece { to: address.into(), first, count });
        self.words.extend_from_slice(bytes);
    }
}

impl Cuda {
    /// Makes the writes, in no order.
    ///
    /// # Safety
    /// They must go to live buffers of this GPU, and not two to one place.
    pub(crate) unsafe fn scatter(&self, writes: &Writes) -> Result<()> {
        if writes.pieces.is_empty() {
            return Ok(());
        }
        let pieces = params::rows("scatter", &writes.pieces)?;
        let mut bytes: Vec<u8> = bytemuck::cast_slice(&pieces).to_vec();
        let words = bytes.len() as u64;
        bytes.extend_from_slice(&writes.words);
        let uploaded = self.gpu.upload(&bytes)?;
        let params = ScatterParams {
            pieces: uploaded.address().into(),
            words: (uploaded.address() + words).into(),
        };
        let op = Op {
            source: PAGED,
            entry: "scatter",
            variant: Variant::plain(self.activations(), 8),
            grid: [writes.pieces.len(), 1],
            block: THREADS,
            shared: 0,
        };
        // SAFETY: the pieces lie inside what was uploaded; the caller vouches for where they go.
        unsafe { self.launch(&op, params) }
    }
}
