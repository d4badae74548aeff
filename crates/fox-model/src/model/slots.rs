//! Decoding in slots of the device.

use fox_cache::{PagePolicy, Slots};
use fox_tensor::{DecodeWeights, SlotDecoder};

use super::Model;
use crate::Result;

impl Model {
    /// Opens `slots` slots for sequences of at most `max_context` tokens whose caches have this policy; `None` if the
    /// device does not support the model.
    pub fn open_slots(
        &self,
        slots: usize,
        max_context: usize,
        policy: &PagePolicy,
    ) -> Result<Option<Slots>> {
        self.check_causal()?;
        if self.device.backend().caps().slots.is_none() {
            return Ok(None);
        }
        let blocks = self.structure.blocks.iter().enumerate();
        let blocks =
            blocks.map(|(l, block)| block.decode_block(&self.params, policy.thresholds(l)));
        let Some(blocks) = blocks.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let value = |id| self.params.value(id).clone();
        let weights = DecodeWeights {
            slots,
            max_context,
            embeddings: value(self.structure.embeddings),
            blocks,
            norm: value(self.structure.norm),
            norm_eps: self.config.norm_eps as f32,
            head: value(self.structure.lm_head),
        };
        Ok(SlotDecoder::open(&weights, &self.device)?.map(Slots::new))
    }
}
