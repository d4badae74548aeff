//! Attention over a paged KV cache: an optional ability of a device. Other devices gather the pages into rows.
//!
//! A page holds [`PAGE`] keys of one head. The pages of one layer of one sequence are an operand behind the trait
//! [`PagedKeys`]: ops read and write single pages; ownership and sharing are up to the implementation. It is a trait
//! rather than a list, because a device with a [`PageTable`] visits new pages alone; a list of all pages per layer and step
//! would cost more than all other host work of a step.

pub(crate) mod cases;
mod gathered;
mod naive;
mod slab;
mod tape;

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

pub use gathered::gathered_attention;
pub use slab::{Page, PageMut, PageShape, Slab};

use crate::check::Operands;
use crate::{
    AttentionWeights, Backend, Error, PATH_MAX_HEAD_DIM, Result, Segment, Segments, Tensor,
    clamp_log_gate,
};

/// Keys per page.
pub const PAGE: usize = 64;

/// The page table of a device for the pages of one layer of one sequence. Only the device reads and writes its state.
#[derive(Debug, Default)]
pub struct PageTable {
    /// What the device has stored, in its own type.
    pub state: Option<Arc<dyn Any + Send + Sync>>,
    /// Number of pages, from the first token, that have not changed since the device stored them.
    pub valid: usize,
}

/// The paged keys and values of one layer of one sequence. All heads have seen the same number of keys; a head may have
/// evicted its oldest pages.
pub trait PagedKeys: Debug + Send + Sync {
    /// The shape of the pages.
    fn shape(&self) -> PageShape;
    /// Keys seen, evicted ones included.
    fn seen(&self) -> usize;
    /// Evicted pages of key head `head`.
    fn dropped(&self, head: usize) -> usize;
    /// Page number `index` of key head `head`, counted from the first token, if it is held.
    fn page(&self, head: usize, index: usize) -> Option<Page<'_>>;
    /// The page for writing; `None` also if the page or its slab is shared.
    fn page_mut(&mut self, head: usize, index: usize) -> Option<PageMut<'_>>;
    /// Sums of the log gates at the ends of full pages, `[page, H]`, evicted ones included; empty without forget gates.
    fn ends(&self) -> &[f64];
    /// The device's page table.
    fn table(&self) -> &PageTable;
    /// The page table for the device to update.
    fn table_mut(&mut self) -> &mut PageTable;

    /// Pages of each head, evicted ones included.
    fn page_count(&self) -> usize {
        self.seen().div_ceil(PAGE)
    }

    /// Position of the first key that `head` holds.
    fn first(&self, head: usize) -> usize {
        self.dropped(head) * PAGE
    }

    /// Position of the first key that any head holds.
    fn first_of_all(&self) -> usize {
        (0..self.shape().kv_heads).map(|head| self.first(head)).min().unwrap_or(0)
    }
}

/// The pages that a head holds, oldest first.
pub fn held_pages(keys: &dyn PagedKeys, head: usize) -> impl Iterator<Item = Page<'_>> {
    (keys.dropped(head)..keys.page_count()).filter_map(move |index| keys.page(head, index))
}

/// The part of a range of keys that lies in one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// Number of the page, counted from the first token.
    pub index: usize,
    /// Keys of the range in earlier pages.
    pub before: usize,
    /// Positions within the page.
    pub slots: Range<usize>,
}

/// Positions `first .. first + count`, page by page.
pub fn page_parts(first: usize, count: usize) -> impl Iterator<Item = PagePart> {
    (first / PAGE..(first + count).div_ceil(PAGE)).map(move |index| {
        let (from, to) = (first.max(index * PAGE), (first + count).min((index + 1) * PAGE));
        PagePart { index, before: from - first, slots: from - index * PAGE..to - index * PAGE }
    })
}

/// New keys of one layer of one sequence: rows `row .. row + count` of a step's keys.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys<'a> {
    /// `[R, H_kv * d]`.
    pub k: &'a Tensor,
    /// `[R, H_kv * d]`.
    pub v: &'a Tensor,
    /// `[R, H_kv * transition]`, where pages have transitions.
    pub transitions: Option<&'a Tensor>,
    /// `[R, H]`.
    pub log_gates: Option<&'a Tensor>,
    /// The first row.
    pub row: usize,
    /// Number of rows.
    pub count: usize,
}

/// A device's attention over pages; see [`Caps`](crate::Caps).
pub trait PagedOps {
    /// Whether pages hold the log gates. The device then reads only written entries of a page, and no sums.
    fn gates_in_pages(&self) -> bool;

    /// Pages per slab, on devices whose allocations are slow; free pages are then reused. A device with more than 1 must
    /// implement [`PagedOps::write_pages`] and [`PagedOps::copy_page`].
    fn slab_pages(&self) -> Option<usize> {
        None
    }

    /// Copies a page to an unused one.
    fn copy_page(&self, from: Page<'_>, to: Page<'_>) -> Result<()> {
        let (from, to) = (from.place, to.place);
        Err(Error::argument("copy_page", format!("place {from} to {to} of a slab of one page")))
    }

    /// Sums of log gates over ranges of rows, `[tensor][range][H]`; see [`gate_totals`] and [`host_gate_totals`].
    fn gate_totals(&self, log_gates: &[&Tensor], ranges: &[Range<usize>]) -> Result<Vec<f64>>;

    /// Writes new keys, values and gates into pages from position `first` on, which must be reserved and unshared; see
    /// [`copy_to_pages`].
    fn write_pages(&self, new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()>;

    /// Attention of `q: [R, H * d]` over pages: `keys[s]` belongs to segment `s`. Batch-invariant.
    fn paged_attention(
        &self,
        q: &Tensor,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> Result<Tensor>;
}

/// [`PagedOps::write_pages`] on any device.
pub fn write_pages(new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()> {
    match new.k.device().backend().caps().paged {
        Some(ops) => ops.write_pages(new, keys, first),
        None => copy_to_pages(new, keys, first),
    }
}

/// [`PagedOps::write_pages`] by copies of columns, without gates.
pub fn copy_to_pages(new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()> {
    let backend = new.k.device().backend();
    check_write_pages(backend, new, keys, first)?;
    let PageShape { kv_heads, head_dim, transition, .. } = keys.shape();
    for head in 0..kv_heads {
        for part in page_parts(first, new.count) {
            let Some(PageMut { slab, place }) = keys.page_mut(head, part.index) else {
                return Err(unwritable(part.index));
            };
            let (from, slots) = ((new.row + part.before, head * head_dim), part.slots);
            let row = place * PAGE + slots.start;
            backend.copy_columns(new.k, from, &mut slab.k, row, slots.len())?;
            backend.copy_columns(new.v, from, &mut slab.v, row, slots.len())?;
            if let (Some(new), Some(own)) = (new.transitions, &mut slab.transitions) {
                backend.copy_columns(new, (from.0, head * transition), own, row, slots.len())?;
            }
        }
    }
    Ok(())
}

/// Sums of log gates `[R, H]` over ranges of rows, `[tensor][range][H]`, each gate clamped by [`clamp_log_gate`]. All tensors
/// lie on one device, which the host waits for once.
pub fn gate_totals(log_gates: &[&Tensor], ranges: &[Range<usize>]) -> Result<Vec<f64>> {
    let Some(first) = log_gates.first() else { return Ok(Vec::new()) };
    let device = first.device();
    device.count_download();
    match device.backend().caps().paged {
        Some(ops) => ops.gate_totals(log_gates, ranges),
        None => host_gate_totals(device.backend(), log_gates, ranges),
    }
}

/// [`PagedOps::gate_totals`] on the host.
pub fn host_gate_totals(
    backend: &dyn Backend,
    log_gates: &[&Tensor],
    ranges: &[Range<usize>],
) -> Result<Vec<f64>> {
    check_gate_totals(backend, log_gates, ranges)?;
    let mut totals = Vec::new();
    for gates in log_gates {
        let (values, heads) = (gates.device().backend().download_f64(gates)?, gates.cols());
        for range in ranges {
            let own = totals.len();
            totals.resize(own + heads, 0.0);
            for row in values[range.start * heads..range.end * heads].chunks(heads) {
                let sums = totals[own..].iter_mut().zip(row);
                sums.for_each(|(sum, gate)| *sum += clamp_log_gate(*gate));
            }
        }
    }
    Ok(totals)
}

/// The error for a page that cannot be written.
fn unwritable(index: usize) -> Error {
    let detail = format!("page {index} is missing or shared: reserve it before writing");
    Error::argument("write_pages", detail)
}

/// Options of causal attention over pages.
#[derive(Clone, Debug)]
pub struct PagedSpec {
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// Query heads `H`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Sliding window.
    pub window: Option<usize>,
    /// Per query head, the decay below which a page may be skipped.
    pub thresholds: Option<Arc<[f64]>>,
    /// Attention sinks `[H]` of softmax attention; see [`SinkOps`](crate::SinkOps).
    pub sinks: Option<Tensor>,
    /// Whether the transitions of the pages are reflections: [`PathInputs::u`](crate::PathInputs::u).
    pub reflected: bool,
    /// The queries of each sequence; its keys are all that were seen, the new ones included.
    pub segments: Segments,
}

/// Validates the operands of [`PagedOps::copy_page`].
pub fn check_copy_page(backend: &dyn Backend, from: Page<'_>, to: Page<'_>) -> Result<()> {
    let operands = Operands::new("copy_page", backend);
    let is_inside = |page: Page<'_>| page.place < page.slab.k.rows() / PAGE;
    operands.require(is_inside(from) && is_inside(to), || {
        format!("page {} or {} is outside of its slab", from.place, to.place)
    })?;
    let (gates, other_gates) = (from.slab.gates.as_ref(), to.slab.gates.as_ref());
    operands.require(gates.is_some() == other_gates.is_some(), || {
        "only one of the pages has gates".into()
    })?;
    let transitions = (from.slab.transitions.as_ref(), to.slab.transitions.as_ref());
    operands.require(transitions.0.is_some() == transitions.1.is_some(), || {
        "only one of the pages has transitions".into()
    })?;
    let tensors = [(&from.slab.k, &to.slab.k), (&from.slab.v, &to.slab.v)];
    let more = gates.zip(other_gates).into_iter().chain(transitions.0.zip(transitions.1));
    for (x, y) in tensors.into_iter().chain(more) {
        operands.plain("page", x)?;
        operands.plain("page", y)?;
        operands.require(x.cols() == y.cols() && x.dtype() == y.dtype(), || {
            format!("a page of {x:?} to one of {y:?}")
        })?;
    }
    Ok(())
}

/// Validates the operands of [`PagedOps::gate_totals`].
pub fn check_gate_totals(
    backend: &dyn Backend,
    log_gates: &[&Tensor],
    ranges: &[Range<usize>],
) -> Result<()> {
    let operands = Operands::new("gate_totals", backend);
    for gates in log_gates {
        let (rows, _) = operands.matrix("log_gates", gates)?;
        let outside = ranges.iter().find(|range| range.start > range.end || range.end > rows);
        operands.require(outside.is_none(), || format!("rows {outside:?} of {gates:?}"))?;
    }
    Ok(())
}

/// Validates the operands of [`PagedOps::write_pages`].
pub fn check_write_pages(
    backend: &dyn Backend,
    new: &NewKeys<'_>,
    keys: &dyn PagedKeys,
    first: usize,
) -> Result<()> {
    let operands = Operands::new("write_pages", backend);
    let PageShape { kv_heads, head_dim, group, transition } = keys.shape();
    let (rows, _) = operands.matrix("k", new.k)?;
    let dims = [rows, kv_heads.saturating_mul(head_dim)];
    operands.real("k", new.k, &dims)?;
    operands.real("v", new.v, &dims)?;
    operands.maybe("log_gates", new.log_gates, &[rows, kv_heads.saturating_mul(group)])?;
    let width = kv_heads.saturating_mul(transition);
    operands.maybe("transitions", new.transitions, &[rows, width])?;
    operands.require((transition > 0) == new.transitions.is_some(), || {
        format!("pages with {transition} values per transition, keys with others")
    })?;
    let needs_gates = group > 0 && backend.caps().gates_in_pages();
    operands.require(!needs_gates || new.log_gates.is_some(), || "no log gates".into())?;
    let fits = |start: usize, end: usize| start.checked_add(new.count).is_some_and(|e| e <= end);
    operands.require(fits(new.row, rows) && fits(first, keys.seen()), || {
        let (row, count, seen) = (new.row, new.count, keys.seen());
        format!("{count} keys from row {row} of {rows} to position {first} of {seen}")
    })
}

/// Validates the operands of [`PagedOps::paged_attention`].
pub fn check_paged_attention(
    backend: &dyn Backend,
    q: &Tensor,
    keys: &[&dyn PagedKeys],
    spec: &PagedSpec,
) -> Result<()> {
    let operands = Operands::new("paged_attention", backend);
    let (heads, kv_heads, d) = (spec.heads, spec.kv_heads, spec.head_dim);
    operands.matrix("q", q)?;
    operands.real("q", q, &[q.rows(), heads.saturating_mul(d)])?;
    operands.segments(&spec.segments, q.rows(), usize::MAX)?;
    operands.require(d > 0 && d <= 256 && d.is_multiple_of(8), || {
        format!("head dim {d} is not a multiple of 8 up to 256")
    })?;
    operands.require(kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
        format!("{heads} query heads are not a multiple of {kv_heads} key heads")
    })?;
    operands.require(spec.window != Some(0), || "a window of 0 keys; use 1 or more".into())?;
    if let Some(sinks) = &spec.sinks {
        operands.real("sinks", sinks, &[heads])?;
        operands.require(spec.weights == AttentionWeights::Softmax, || {
            "sinks need softmax attention".into()
        })?;
    }
    operands.require(
        !spec.reflected
            || spec.window.is_none()
                && spec.sinks.is_none()
                && spec.weights == AttentionWeights::Softmax
                && d <= PATH_MAX_HEAD_DIM,
        || "reflected queries need a plain softmax without a window".into(),
    )?;
    let (group, transition) = (heads / kv_heads, if spec.reflected { d } else { 0 });
    let fits = |(keys, segment): (&&dyn PagedKeys, &Segment)| {
        let shape = keys.shape();
        let before = segment.k_len - segment.q_len.min(segment.k_len);
        (shape.kv_heads, shape.head_dim) == (spec.kv_heads, spec.head_dim)
            && (shape.group == 0 || shape.group == group)
            && shape.transition == transition
            && keys.seen() == segment.k_len
            && (0..spec.kv_heads).all(|head| keys.first(head) <= before)
    };
    if keys.len() != spec.segments.len()
        || !keys.iter().zip(spec.segments.as_slice()).all(fits)
        || spec.thresholds.as_ref().is_some_and(|t| t.len() != spec.heads)
    {
        return Err(operands.error("the pages do not fit heads and segments"));
    }
    Ok(())
}
