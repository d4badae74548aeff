//! Decoding of a few sequences together: prefill op by op, then one token per sequence and step.
//!
//! Steps run in slots of the device where it has them for the model, otherwise op by op; callers need not know which.

use fox_cache::{Cache, PagePolicy, SequenceState, SlotSequence, Slots};
use fox_tensor::RowToken;

use super::{ForwardOptions, Model, Pruning};
use crate::{Error, Result};

/// Slots: steps of up to so many rows take as long as those of one.
const SLOTS: usize = 8;
/// Smallest number of tokens that slots are opened for; above, powers of two.
const MIN_CONTEXT: usize = 2048;

/// Decodes sequences of a model; see [`Model::token_decoder`].
#[derive(Debug)]
pub struct TokenDecoder<'m> {
    model: &'m Model,
    options: ForwardOptions,
    opened: Opened,
}

/// Slots for sequences of up to `max_context` tokens; none where the device does not support the model.
#[derive(Debug, Default)]
struct Opened {
    max_context: usize,
    slots: Option<(Slots, PagePolicy)>,
}

impl Model {
    /// A decoder of a few sequences together. With slots, `options.pruning` evicts pages instead of skipping blocks of
    /// attention, by the same tolerance; a faded RoPE (`options.rope_strength`) decodes op by op.
    pub fn token_decoder(&self, options: ForwardOptions) -> TokenDecoder<'_> {
        TokenDecoder { model: self, options, opened: Opened::default() }
    }

    /// The tolerance of pruned blocks, the strictest of all layers; `None` without pruning.
    fn log_tolerance(&self, pruning: Pruning) -> Option<f32> {
        let configured = || {
            let layers = self.attention_layers().flatten();
            let tolerances = layers.map(|(layer, _)| layer.options().log_pruning_tolerance);
            tolerances.collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::min)
        };
        match pruning {
            Pruning::Off => None,
            Pruning::Config => configured().map(|tolerance| tolerance as f32),
            Pruning::Tolerance(tolerance) => Some(tolerance),
            Pruning::Auto => Some(fox_tensor::AUTO_LOG_TOLERANCE),
        }
    }
}

impl TokenDecoder<'_> {
    /// Prepares for sequences of up to `tokens` tokens, the generated ones included; the largest number of sequences of
    /// a step. Sequences that have begun with fewer cannot be continued if this opens larger slots.
    pub fn reserve(&mut self, tokens: usize) -> Result<usize> {
        if tokens > self.opened.max_context {
            let max_context = tokens.next_power_of_two().max(MIN_CONTEXT);
            // The memory of the old slots is free before the new ones take theirs.
            self.opened = Opened::default();
            self.opened = Opened { max_context, slots: self.open(max_context)? };
        }
        Ok(self.opened.slots.as_ref().map_or(1, |(slots, _)| slots.count()))
    }

    fn open(&self, max_context: usize) -> Result<Option<(Slots, PagePolicy)>> {
        if self.options.rope_strength.is_some()
            || self.model.device().backend().caps().slots.is_none()
        {
            return Ok(None);
        }
        let tolerance = self.model.log_tolerance(self.options.pruning);
        let policy = self.model.page_policy(tolerance, max_context)?;
        let slots = self.model.open_slots(SLOTS, max_context, &policy)?;
        Ok(slots.map(|slots| (slots, policy)))
    }

    /// An empty cache of a sequence of up to `tokens` tokens.
    pub fn new_cache(&mut self, tokens: usize) -> Result<Cache> {
        self.reserve(tokens)?;
        match &self.opened.slots {
            Some((_, policy)) => self.model.new_paged_cache(policy),
            None => self.model.new_cache(1, tokens),
        }
    }

    /// Feeds a prompt to a cache of one sequence; the logits after it `[V]`.
    pub fn prefill(&self, prompt: &[i32], cache: &mut Cache) -> Result<Vec<f32>> {
        Ok(self.model.decode(&[prompt], cache, &self.options)?.to_f32()?)
    }

    /// Feeds each sequence its next token; the logits after it `[V]`, by sequence. A sequence enters a slot with its first
    /// step.
    ///
    /// # Errors
    /// More sequences than [`TokenDecoder::reserve`] allows, or another number of tokens; the device's.
    pub fn step(
        &mut self,
        sequences: &mut [&mut SequenceState],
        tokens: &[i32],
    ) -> Result<Vec<Vec<f32>>> {
        if sequences.len() != tokens.len() {
            let detail = format!("{} tokens for {} sequences", tokens.len(), sequences.len());
            return Err(Error::Argument(detail));
        }
        match &mut self.opened.slots {
            Some((slots, _)) => step_in_slots(slots, sequences, tokens),
            None => {
                let steps = sequences.iter_mut().zip(tokens);
                steps.map(|(state, token)| self.step_by_ops(state, *token)).collect()
            }
        }
    }

    fn step_by_ops(&self, state: &mut SequenceState, token: i32) -> Result<Vec<f32>> {
        match state {
            SequenceState::Cache(cache) => self.prefill(&[token], cache),
            SequenceState::Slot(_) => Err(fox_cache::Error::ForeignSlot.into()),
        }
    }
}

fn step_in_slots(
    slots: &mut Slots,
    states: &mut [&mut SequenceState],
    tokens: &[i32],
) -> Result<Vec<Vec<f32>>> {
    let mut sequences: Vec<&mut SlotSequence> = Vec::with_capacity(states.len());
    for state in states {
        if let SequenceState::Cache(cache) = &mut **state {
            **state = SequenceState::Slot(slots.enter(cache.take())?);
        }
        if let SequenceState::Slot(sequence) = &mut **state {
            sequences.push(sequence);
        }
    }
    let row =
        |(own, token): (&mut &mut SlotSequence, &i32)| slots.row(own, RowToken::Id(*token), None);
    let rows = sequences.iter_mut().zip(tokens).map(row);
    let rows = rows.collect::<fox_cache::Result<Vec<_>>>()?;
    slots.begin(&rows)?;
    sequences.iter_mut().for_each(|sequence| sequence.advance());
    for (row, sums) in slots.finish()?.page_ends {
        sequences[row].seal_page(&sums);
    }
    (0..rows.len()).map(|row| Ok(slots.logits(row)?)).collect()
}
