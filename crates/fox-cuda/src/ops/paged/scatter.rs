//! Many small writes to device memory with one upload and one launch: the overhead of a driver call exceeds the transfer
//! time of its bytes.

use super::{PAGED, ScatterParams, ScatterWrite};
use crate::backend::Cuda;
use crate::backend::launcher::{Op, Variant};
use crate::{Result, params};

/// Writes consist of words of this many bytes.
const WORD: usize = size_of::<u64>();
/// Threads of a thread block, which does one write.
const THREADS: usize = 64;

/// Pending writes.
#[derive(Default)]
pub(crate) struct Writes {
    writes: Vec<ScatterWrite>,
    words: Vec<u8>,
}

impl Writes {
    /// Adds a write of whole words.
    pub(crate) fn push(&mut self, address: u64, bytes: &[u8]) {
        debug_assert!(bytes.len().is_multiple_of(WORD) && address.is_multiple_of(WORD as u64));
        let (first, count) = (self.words.len() / WORD, bytes.len() / WORD);
        self.writes.push(ScatterWrite { to: address.into(), first, count });
        self.words.extend_from_slice(bytes);
    }
}

impl Cuda {
    /// Performs the writes, in no particular order.
    ///
    /// # Safety
    /// They must go to live buffers of this GPU and not overlap.
    pub(crate) unsafe fn scatter(&self, writes: &Writes) -> Result<()> {
        if writes.writes.is_empty() {
            return Ok(());
        }
        let list = params::rows("scatter", &writes.writes)?;
        let mut bytes: Vec<u8> = bytemuck::cast_slice(&list).to_vec();
        let words = bytes.len() as u64;
        bytes.extend_from_slice(&writes.words);
        let uploaded = self.gpu.upload(&bytes)?;
        let params = ScatterParams {
            writes: uploaded.address().into(),
            words: (uploaded.address() + words).into(),
        };
        let op = Op {
            source: PAGED,
            entry: "scatter",
            variant: Variant::plain(self.activations(), 8),
            grid: [writes.writes.len(), 1],
            block: THREADS,
            shared: 0,
        };
        // SAFETY: the words lie inside the upload; the caller vouches for the destinations.
        unsafe { self.launch(&op, params) }
    }
}
