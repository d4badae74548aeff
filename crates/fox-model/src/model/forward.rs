//! The forward pass of a model, with or without a decode state, and the loss.

use fox_cache::Cache;
use fox_tensor::{Dropout, Result as TensorResult, Segments, Tape, Tensor, Var};

use super::Model;
use crate::block::{Block, BlockOutput};
use crate::mixers::MixerContext;
use crate::observe::Observer;
use crate::{Error, Result};

/// Which attention blocks may be skipped (adaptive computation pruning).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Pruning {
    /// As configured.
    #[default]
    Config,
    /// None.
    Off,
    /// Those whose fraction of a row's softmax is provably below `e^tolerance`.
    Tolerance(f32),
    /// With a tolerance of -10 and a bound from the norms of queries and keys.
    Auto,
}

/// How a forward pass is run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ForwardOptions {
    /// Which attention blocks may be skipped.
    pub pruning: Pruning,
    /// Drop the activations of each block and compute them again in the backward pass.
    pub recompute: bool,
    /// Factor on the angles of RoPE, from 1 to 0, while it is faded out; `None`: as configured.
    pub rope_strength: Option<f64>,
    /// Dropout of the embeddings and of what every mixer and MLP adds to the residual stream; only in training.
    pub dropout: Option<Dropout>,
}

/// The result of the blocks.
#[derive(Debug)]
#[non_exhaustive]
pub struct ForwardOutput {
    /// The normalized hidden states `[R, D]`, ready for the output projection.
    pub states: Var,
    /// Per attention layer, tiles visited and in total `[H, 4]` i32 ([`fox_tensor::tile_counts`]); empty in recurrent models.
    pub tiles: Vec<Tensor>,
}

/// The result of a loss.
#[derive(Debug)]
pub struct TokenLoss {
    /// Cross-entropy of every row `[R]`; 0 where the label is ignored.
    pub per_token: Tensor,
    /// Per attention layer, tiles visited and in total `[H, 4]` i32 ([`fox_tensor::tile_counts`]); empty in recurrent models.
    pub tiles: Vec<Tensor>,
}

impl Model {
    /// Embedding, blocks and final norm of `tokens: [R]`.
    ///
    /// `segments` says which rows form a sequence. With a cache, segment `b` holds the new tokens of
    /// sequence `b`, which see all earlier ones; the tape must not record then.
    pub fn forward<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        tokens: &Tensor,
        segments: &Segments,
        cache: Option<&mut Cache>,
        options: &ForwardOptions,
    ) -> Result<ForwardOutput> {
        self.run(tape, tokens, segments, cache, options, None)
    }

    /// A forward pass that calls `observer` with the operands of every attention layer, one layer at a time, so that
    /// only one is in memory.
    pub fn observe(
        &self,
        tokens: &Tensor,
        segments: &Segments,
        options: &ForwardOptions,
        observer: &dyn Observer,
    ) -> Result<ForwardOutput> {
        let mut tape = Tape::inference(&self.device);
        self.run(&mut tape, tokens, segments, None, options, Some(observer))
    }

    fn run<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        tokens: &Tensor,
        segments: &Segments,
        mut cache: Option<&mut Cache>,
        options: &ForwardOptions,
        observer: Option<&dyn Observer>,
    ) -> Result<ForwardOutput> {
        if cache.is_some() && tape.is_recording() {
            return Err(Error::Argument("gradients do not pass through a cache".into()));
        }
        let placed = match cache.as_deref_mut() {
            Some(cache) => cache.begin(segments)?,
            None => segments.clone(),
        };
        let table = self.params.var(self.structure.embeddings);
        let mut h = tape.embedding(&table, tokens, self.config.untrained_token())?;
        if let Some(dropout) = options.dropout {
            h = tape.dropout(&h, &dropout.of_tensor(0))?;
        }
        let mut delta: Option<Var> = None;
        let mut tiles = Vec::with_capacity(self.config.num_layers);
        for (l, block) in self.structure.blocks.iter().enumerate() {
            let out = if options.recompute && tape.is_recording() {
                self.forward_again(tape, (l, block), &h, delta.as_ref(), &placed, options)?
            } else {
                let mut context = self.context(&placed, options);
                context.observer = observer.map(|observer| (observer, l));
                let state = cache.as_deref_mut().map(|cache| &mut cache.layers_mut()[l]);
                let dropout = block_dropout(options, l);
                block.forward(tape, &h, delta.as_ref(), &context, dropout, state)?
            };
            tiles.extend(out.tiles);
            (h, delta) = (out.h, Some(out.delta));
        }
        let norm = self.params.var(self.structure.norm);
        let eps = self.config.norm_eps as f32;
        let (_, states) = tape.add_rms_norm(&h, delta.as_ref(), &norm, eps)?;
        if let Some(cache) = cache {
            cache.commit(segments)?;
        }
        Ok(ForwardOutput { states, tiles })
    }

    /// A block whose activations are dropped now and computed again in the backward pass.
    fn forward_again<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        (layer, block): (usize, &'m Block),
        h: &Var,
        delta: Option<&Var>,
        segments: &Segments,
        options: &ForwardOptions,
    ) -> Result<BlockOutput> {
        let inputs: Vec<Var> = std::iter::once(h).chain(delta).cloned().collect();
        let (segments, options) = (segments.clone(), *options);
        let outputs = tape.checkpoint(&inputs, move |tape, inputs| {
            let (context, dropout) =
                (self.context(&segments, &options), block_dropout(&options, layer));
            let out = block.forward(tape, &inputs[0], inputs.get(1), &context, dropout, None)?;
            let tiles = out.tiles.map(Var::constant);
            Ok([out.h, out.delta].into_iter().chain(tiles).collect())
        })?;
        let mut outputs = outputs.into_iter();
        match (outputs.next(), outputs.next(), outputs.next()) {
            (Some(h), Some(delta), tiles) => {
                Ok(BlockOutput { h, delta, tiles: tiles.map(|t| t.value().clone()) })
            }
            _ => Err(Error::Argument("a recomputed block gave fewer than two values".into())),
        }
    }

    fn context<'a>(&'a self, segments: &'a Segments, options: &ForwardOptions) -> MixerContext<'a> {
        MixerContext {
            params: &self.params,
            segments,
            pruning: options.pruning,
            rope_strength: options.rope_strength,
            observer: None,
        }
    }

    /// Logits `[R, V]` of normalised states `[R, D]`.
    pub fn logits(&self, tape: &mut Tape<'_>, states: &Var) -> TensorResult<Var> {
        tape.linear(states, &self.params.var(self.structure.lm_head), None)
    }

    /// Loss of every token; a backward pass starts from `sum_r weights[r] * loss[r]`.
    ///
    /// `tokens`, `labels` (already shifted) and `weights` are `[R]`; a mean over all rows has weights
    /// `1 / R`.
    pub fn loss<'m>(
        &'m self,
        tape: &mut Tape<'m>,
        tokens: &Tensor,
        labels: &Tensor,
        weights: &Tensor,
        segments: &Segments,
        options: &ForwardOptions,
    ) -> Result<TokenLoss> {
        let hidden = self.forward(tape, tokens, segments, None, options)?;
        let head = self.params.var(self.structure.lm_head);
        let per_token = match self.teacher.as_ref().filter(|_| tape.is_recording()) {
            None => tape.linear_cross_entropy(&hidden.states, &head, labels, weights)?,
            Some(teacher) => {
                let (student, targets) = ((&hidden.states, &head), (labels, weights));
                teacher.loss(tape, student, tokens, targets, segments)?
            }
        };
        Ok(TokenLoss { per_token, tiles: hidden.tiles })
    }
}

/// Dropout of the outputs of a block's mixer and MLP. The embeddings are tensor 0, blocks have two each.
fn block_dropout(options: &ForwardOptions, layer: usize) -> Option<[Dropout; 2]> {
    let first = 2 * layer as u64 + 1;
    options.dropout.map(|dropout| [dropout.of_tensor(first), dropout.of_tensor(first + 1)])
}
