//! Sequences whose decode steps run in slots of the device ([`fox_tensor::Streams`]).
//!
//! The device writes keys, values and gates into the pages, and sums up the gates. The host looks after a sequence at
//! the ends of pages alone: [`Cache::turn_page`] takes the sums over and drops what is forgotten, and
//! [`Cache::reserve_one`] makes room for the next page.

use fox_tensor::{PAGE, PagedKeys, StreamPast};

use crate::cache::Cache;
use crate::layer::LayerState;
use crate::paged::PagedState;
use crate::{Error, Result};

impl Cache {
    /// What every layer remembers of the only sequence, with room for its next token.
    ///
    /// # Errors
    /// When there is more than one sequence, or a layer whose state is not in pages.
    pub fn stream_past(&mut self) -> Result<Vec<StreamPast<'_>>> {
        if self.batch() != 1 {
            return Err(Error::BatchMismatch { step: 1, cache: self.batch() });
        }
        self.reserve_one()?;
        let past = |layer| match layer {
            &mut LayerState::Paged(ref mut state) => state.stream_past(),
            _ => None,
        };
        let layers = self.layers_mut().iter_mut().map(past);
        layers.collect::<Option<_>>().ok_or(Error::NotPaged("put into a slot"))
    }

    /// The pages of every layer of the only sequence.
    pub fn stream_keys(&mut self) -> Vec<&mut dyn PagedKeys> {
        let paged = self.layers_mut().iter_mut().filter_map(LayerState::paged);
        paged.filter_map(PagedState::keys_mut).collect()
    }

    /// A step has fed the only sequence one token in its slot; whether that was the last of a page.
    pub fn advance(&mut self) -> bool {
        self.lens_mut()[0] += 1;
        self.lens()[0].is_multiple_of(PAGE)
    }

    /// Takes the sums of the log gates `[layers][H]` over at the end of a page, and drops what is forgotten.
    pub fn turn_page(&mut self, sums: &[f64]) {
        let (len, mut rest) = (self.lens()[0], sums);
        for layer in self.layers_mut().iter_mut().filter_map(LayerState::paged) {
            let (own, others) = rest.split_at(layer.gated_heads().min(rest.len()));
            layer.turn_page(len, own);
            rest = others;
        }
    }
}
