//! Decode steps of sequences in slots of the device.

use fox_cache::{PagePolicy, Past};
use fox_tensor::{DecodeKeys, StreamModel, Streams};

use super::Model;
use crate::Result;

impl Model {
    /// Opens `slots` slots for sequences of at most `max_context` tokens whose caches have this policy; `None` where
    /// the device has no such way for this model.
    pub fn open_streams(
        &self,
        slots: usize,
        max_context: usize,
        policy: &PagePolicy,
    ) -> Result<Option<Streams>> {
        let Some(shape) = self.decode_shape() else { return Ok(None) };
        let nobody =
            || Past { keys: DecodeKeys::Pages(Vec::new()), last_k: Vec::new(), last_v: Vec::new() };
        let blocks = self.structure.blocks.iter();
        let blocks = blocks.map(|block| block.decode(&self.params, nobody()));
        let Some(blocks) = blocks.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let model = StreamModel {
            slots,
            max_context,
            shape,
            embeddings: self.params.value(self.structure.embeddings),
            thresholds: (0..blocks.len()).map(|layer| policy.thresholds(layer)).collect(),
            blocks,
            norm: self.params.value(self.structure.norm),
            head: self.params.value(self.structure.lm_head),
        };
        Ok(Streams::open(&model, &self.device)?)
    }
}
