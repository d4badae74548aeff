//! Attention over keys and values in pages: an optional ability of a device. One without it gathers the
//! pages in rows and attends to those.
//!
//! A page holds [`PAGE`] keys of one head. The pages of one layer of one sequence are an operand behind
//! the trait [`PagedKeys`]: ops read and write single pages and know nothing of who owns, shares, counts
//! or frees them. A trait rather than a list, because a device that keeps a [`PageTable`] looks only at
//! the pages that are new to it, and a list of all pages for every layer and step would cost more than
//! the step's other host work.

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
use crate::{AttentionWeights, Backend, Error, Result, Segment, Segments, Tensor, clamp_log_gate};

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

/// Keys and values of one layer of one sequence, in pages. All heads have seen the same number of keys;
/// a head may have dropped its oldest pages.
pub trait PagedKeys: Debug + Send + Sync {
    /// What the pages have in common.
    fn shape(&self) -> PageShape;
    /// Keys seen, dropped ones included.
    fn seen(&self) -> usize;
    /// Pages of key head `head` that were dropped.
    fn dropped(&self, head: usize) -> usize;
    /// Page number `index` of key head `head`, counted from the first token, if it is held.
    fn page(&self, head: usize, index: usize) -> Option<Page<'_>>;
    /// The same for writing; `None` also when another sequence shares the page, or others its slab.
    fn page_mut(&mut self, head: usize, index: usize) -> Option<PageMut<'_>>;
    /// Sums of the log gates at the ends of full pages, `[page, H]`, dropped ones included; empty when nothing is
    /// forgotten.
    fn ends(&self) -> &[f64];
    /// What the device has noted about where the pages lie.
    fn table(&self) -> &PageTable;
    /// The same for the device to write.
    fn table_mut(&mut self) -> &mut PageTable;

    /// Pages of each head, dropped ones included.
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

/// Part of a run of keys that lies in one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// Number of the page, counted from the first token.
    pub index: usize,
    /// Keys of the run that lie in earlier pages.
    pub before: usize,
    /// Where in the page.
    pub slots: Range<usize>,
}

/// Positions `first .. first + count`, page by page.
pub fn page_parts(first: usize, count: usize) -> impl Iterator<Item = PagePart> {
    (first / PAGE..(first + count).div_ceil(PAGE)).map(move |index| {
        let (from, to) = (first.max(index * PAGE), (first + count).min((index + 1) * PAGE));
        PagePart { index, before: from - first, slots: from - index * PAGE..to - index * PAGE }
    })
}

/// New keys of one layer of one sequence: rows `row .. row + count` of what a step has made.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys<'a> {
    /// `[R, H_kv * d]`.
    pub k: &'a Tensor,
    /// `[R, H_kv * d]`.
    pub v: &'a Tensor,
    /// `[R, H]`.
    pub log_gates: Option<&'a Tensor>,
    /// The first row.
    pub row: usize,
    /// Number of rows.
    pub count: usize,
}

/// A device's attention over pages; see [`Caps`](crate::Caps).
pub trait PagedOps {
    /// Whether pages hold the log gates, too; then nothing of a page is read that was not written, and
    /// nobody reads the sums.
    fn gates_in_pages(&self) -> bool;

    /// Where memory is slow to get, for how many pages it is taken at once; pages that nobody holds any more are then
    /// kept for those who need some next. A device that answers more than 1 writes and copies pages by itself.
    fn slab_pages(&self) -> Option<usize> {
        None
    }

    /// Copies a page to one of another place that nobody reads or writes.
    fn copy_page(&self, from: Page<'_>, to: Page<'_>) -> Result<()> {
        let (from, to) = (from.place, to.place);
        Err(Error::argument("copy_page", format!("place {from} to {to} of a slab of one page")))
    }

    /// Sums of log gates over runs of rows, `[tensor][run][H]`; see [`gate_totals`].
    fn gate_totals(&self, log_gates: &[&Tensor], runs: &[Range<usize>]) -> Result<Vec<f64>> {
        totals_on_the_host(log_gates, runs)
    }

    /// Writes new keys, values and gates into pages from position `first` on; there is room for them that
    /// nobody shares.
    fn write_pages(&self, new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()> {
        copy_to_pages(new, keys, first)
    }

    /// Attention of `q: [R, H * d]` over pages: `keys[s]` belongs to segment `s`. A sequence's result
    /// depends on its own rows and pages alone, to the bit.
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

/// Copies new keys and values to their pages one by one.
fn copy_to_pages(new: &NewKeys<'_>, keys: &mut dyn PagedKeys, first: usize) -> Result<()> {
    let backend = new.k.device().backend();
    let PageShape { kv_heads, head_dim, .. } = keys.shape();
    for head in 0..kv_heads {
        for part in page_parts(first, new.count) {
            let Some(PageMut { slab, place }) = keys.page_mut(head, part.index) else {
                return Err(unwritable(part.index));
            };
            let (from, slots) = ((new.row + part.before, head * head_dim), part.slots);
            let row = place * PAGE + slots.start;
            backend.copy_columns(new.k, from, &mut slab.k, row, slots.len())?;
            backend.copy_columns(new.v, from, &mut slab.v, row, slots.len())?;
        }
    }
    Ok(())
}

/// Sums of log gates `[R, H]` over runs of rows, `[tensor][run][H]`, each gate counted as [`clamp_log_gate`] says. All
/// tensors lie on one device, which the host waits for once.
pub fn gate_totals(log_gates: &[&Tensor], runs: &[Range<usize>]) -> Result<Vec<f64>> {
    let Some(first) = log_gates.first() else { return Ok(Vec::new()) };
    let last = runs.iter().map(|run| run.end).max().unwrap_or(0);
    if let Some(short) = log_gates.iter().find(|gates| gates.rows() < last) {
        let detail = format!("{last} rows of gates {short:?}");
        return Err(Error::argument("gate_totals", detail));
    }
    let device = first.device();
    device.count_download();
    match device.backend().caps().paged {
        Some(ops) => ops.gate_totals(log_gates, runs),
        None => totals_on_the_host(log_gates, runs),
    }
}

fn totals_on_the_host(log_gates: &[&Tensor], runs: &[Range<usize>]) -> Result<Vec<f64>> {
    let mut totals = Vec::new();
    for gates in log_gates {
        let (values, heads) = (gates.device().backend().download_f64(gates)?, gates.cols());
        for run in runs {
            let own = totals.len();
            totals.resize(own + heads, 0.0);
            for row in values[run.start * heads..run.end * heads].chunks(heads) {
                let sums = totals[own..].iter_mut().zip(row);
                sums.for_each(|(sum, gate)| *sum += clamp_log_gate(*gate));
            }
        }
    }
    Ok(totals)
}

/// A page that cannot be written.
fn unwritable(index: usize) -> Error {
    let detail = format!("page {index} is missing or shared: reserve it before writing");
    Error::argument("write_pages", detail)
}

/// Options of attention over pages. Causal.
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
    /// Per query head, the decay below which a block of keys may be skipped.
    pub thresholds: Option<Arc<[f64]>>,
    /// The queries of each sequence; its keys are all that were seen, the new ones included.
    pub segments: Segments,
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
    let group = heads / kv_heads;
    let fits = |(keys, segment): (&&dyn PagedKeys, &Segment)| {
        let shape = keys.shape();
        let before = segment.k_len - segment.q_len.min(segment.k_len);
        (shape.kv_heads, shape.head_dim) == (spec.kv_heads, spec.head_dim)
            && (shape.group == 0 || shape.group == group)
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
