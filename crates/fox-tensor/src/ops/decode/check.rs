//! Validation of the operands of [`SlotDecodeOps`](super::SlotDecodeOps).

use super::{
    DecodeAttention, DecodeBlock, DecodeMixer, DecodeProjection, DecodeRow, DecodeWeights,
    LayerPast, MAX_UNFINISHED_STEPS, RowToken,
};
use crate::check::Operands;
use crate::{Backend, Error, PAGE, PageShape, PagedKeys, Result};

/// Validates the operands of [`SlotDecodeOps::open_slots`](super::SlotDecodeOps::open_slots).
pub fn check_open_slots(backend: &dyn Backend, weights: &DecodeWeights) -> Result<()> {
    let operands = Operands::new("open_slots", backend);
    let (vocab, width) = operands.matrix("embeddings", &weights.embeddings)?;
    operands.require(weights.slots > 0 && weights.max_context > 0, || {
        format!("{} slots for {} tokens", weights.slots, weights.max_context)
    })?;
    weights.blocks.iter().try_for_each(|block| check_block(&operands, block, width))?;
    operands.real("norm", &weights.norm, &[width])?;
    let outputs = operands.weight("head", &weights.head, width)?;
    operands.require(outputs > 0 && outputs <= vocab, || {
        format!("{outputs} outputs for {vocab} embeddings")
    })
}

fn check_block(operands: &Operands<'_>, block: &DecodeBlock, width: usize) -> Result<()> {
    let DecodeMixer::Attention(attention) = &block.mixer;
    let mlp = &block.mlp;
    operands.real("mixer_norm", &block.mixer_norm, &[width])?;
    operands.real("mlp.norm", &mlp.norm, &[width])?;
    let both = operands.weight("mlp.gate_up", &mlp.gate_up, width)?;
    let out = operands.weight("mlp.down", &mlp.down, both / 2)?;
    operands.require(both.is_multiple_of(2) && out == width, || {
        format!("an MLP of {both} and {out} outputs in a model of width {width}")
    })?;
    check_attention(operands, attention, width)
}

fn check_attention(operands: &Operands<'_>, layer: &DecodeAttention, width: usize) -> Result<()> {
    let (heads, kv_heads, d) = (layer.shape.heads, layer.shape.kv_heads, layer.shape.head_dim);
    operands
        .require(d > 0 && kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads for {kv_heads} key heads of {d}")
        })?;
    operands.require(layer.shape.window != Some(0), || "a window of 0 keys".into())?;
    let inner = heads.saturating_mul(d);
    let projection = |what, p: &DecodeProjection, heads: usize| {
        let rows = heads.saturating_mul(d);
        let outputs = operands.weight(what, &p.weight, width)?;
        operands
            .require(outputs == rows, || format!("{what} has {outputs} outputs, not {rows}"))?;
        operands.maybe("bias", p.bias.as_ref(), &[rows])?;
        operands.maybe("shift", p.shift.as_ref(), &[heads, width])?;
        p.norm.as_ref().map_or(Ok(()), |norm| operands.head_weights("norm", norm, d, rows))
    };
    projection("q", &layer.q, heads)?;
    projection("k", &layer.k, kv_heads)?;
    projection("v", &layer.v, kv_heads)?;
    if let Some((weight, bias)) = &layer.gate {
        operands.real("gate", weight, &[heads, width])?;
        operands.real("gate bias", bias, &[heads])?;
    }
    if let Some(gate) = &layer.output_gate {
        let outputs = operands.weight("output_gate", gate, width)?;
        operands.require(outputs == inner, || format!("{outputs} output gates, not {inner}"))?;
    }
    operands.maybe("output_norm", layer.output_norm.as_ref(), &[inner])?;
    operands.maybe("sinks", layer.sinks.as_ref(), &[heads])?;
    let outputs = operands.weight("o_proj", &layer.o_proj, inner)?;
    let thresholds = layer.thresholds.as_ref().map_or(heads, |thresholds| thresholds.len());
    operands.require(outputs == width && thresholds == heads, || {
        format!("{outputs} outputs of attention and {thresholds} thresholds")
    })
}

fn check_slot(weights: &DecodeWeights, slot: usize) -> Result<()> {
    let detail = || format!("slot {slot} is out of range ({} slots)", weights.slots);
    if slot < weights.slots { Ok(()) } else { Err(Error::argument("slots", detail())) }
}

/// Validates the operands of [`SlotDecodeOps::enter_slot`](super::SlotDecodeOps::enter_slot).
pub fn check_enter_slot(
    weights: &DecodeWeights,
    slot: usize,
    len: usize,
    past: &[LayerPast<'_>],
) -> Result<()> {
    check_slot(weights, slot)?;
    check_pages(weights, past.iter().map(|past| &*past.pages))?;
    let operands = Operands::new("enter_slot", weights.embeddings.device().backend());
    for (past, block) in past.iter().zip(&weights.blocks) {
        let DecodeMixer::Attention(layer) = &block.mixer;
        let heads = if layer.gate.is_some() { layer.shape.heads } else { 0 };
        operands.require(past.gate_sums.len() == heads, || {
            format!("{} gate sums for {heads} gated heads", past.gate_sums.len())
        })?;
        operands.require(len < past.pages.page_count().saturating_mul(PAGE), || {
            format!("no page for token {len}")
        })?;
        let width = layer.shape.kv_heads * layer.shape.head_dim;
        for (last, p) in [(past.last_k, &layer.k), (past.last_v, &layer.v)] {
            operands.require(last.is_some() == p.shift.is_some(), || {
                "a raw projection exactly with a token shift".into()
            })?;
            operands.maybe("raw projection", last, &[1, width])?;
        }
    }
    operands.require(len < weights.max_context, || {
        format!("{len} tokens in a context of {}", weights.max_context)
    })
}

/// Validates the operands of [`SlotDecodeOps::update_slot_pages`](super::SlotDecodeOps::update_slot_pages).
pub fn check_update_slot_pages(
    weights: &DecodeWeights,
    slot: usize,
    pages: &[&mut dyn PagedKeys],
) -> Result<()> {
    check_slot(weights, slot)?;
    check_pages(weights, pages.iter().map(|pages| &**pages))
}

fn check_pages<'a>(
    weights: &DecodeWeights,
    pages: impl ExactSizeIterator<Item = &'a dyn PagedKeys>,
) -> Result<()> {
    let fits = |(pages, block): (&dyn PagedKeys, &DecodeBlock)| {
        let DecodeMixer::Attention(layer) = &block.mixer;
        let (heads, kv_heads, head_dim) =
            (layer.shape.heads, layer.shape.kv_heads, layer.shape.head_dim);
        let group = if layer.gate.is_some() { heads / kv_heads } else { 0 };
        pages.shape() == PageShape { kv_heads, head_dim, group, transition: 0 }
    };
    match pages.len() == weights.blocks.len() && pages.zip(&weights.blocks).all(fits) {
        true => Ok(()),
        false => Err(Error::argument("slots", "pages of another model")),
    }
}

/// Validates the rows of [`SlotDecodeOps::begin_slot_step`](super::SlotDecodeOps::begin_slot_step); `lens` are the
/// tokens that each slot has seen, `sampled` the rows of the step begun before, and `unfinished` the steps.
pub fn check_slot_rows(
    weights: &DecodeWeights,
    rows: &[DecodeRow],
    lens: impl Fn(usize) -> usize,
    (sampled, unfinished): (usize, usize),
) -> Result<()> {
    if unfinished >= MAX_UNFINISHED_STEPS {
        return Err(Error::argument("step", format!("{unfinished} steps are unfinished")));
    }
    let (vocab, most) = (weights.head.rows(), weights.max_context);
    let mut taken = vec![false; weights.slots];
    for &DecodeRow { slot, token, position, .. } in rows {
        check_slot(weights, slot)?;
        let exists = match token {
            RowToken::Id(id) => usize::try_from(id).is_ok_and(|id| id < vocab),
            RowToken::Sampled(row) => row < sampled,
        };
        let is_taken = std::mem::replace(&mut taken[slot], true);
        let detail = match lens(slot) {
            _ if is_taken => format!("two rows for slot {slot}"),
            _ if !exists => {
                format!("{token:?} is out of range ({vocab} tokens, {sampled} sampled ones)")
            }
            _ if position >= most => format!("position {position} is beyond the context of {most}"),
            len if position != len => {
                format!("slot {slot} is at position {len}, not position {position}")
            }
            _ => continue,
        };
        return Err(Error::argument("step", detail));
    }
    Ok(())
}
