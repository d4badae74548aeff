//! Transfer of keys, values and gates to the ranks that need them, and of their gradients back. Rows of single heads are
//! packed on the device.
//!
//! Two ops of the tape: [`SendKeys`] starts the transfer and [`PlaceKeys`] puts what has arrived in front of the own keys.
//! In the backward pass, [`PlaceKeys`] starts the way back of the gradients and [`SendKeys`] adds them. What the tape
//! records between both runs beside the transfers.

use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::{CustomOp, DType, Error, LocalKeys, Result, Tensor};

use super::key_plan::KeyRange;
use super::transfer::{Expected, Parcel, Transfer, arranged};
use super::{SequenceShard, Traffic};

pub(super) const OP: &str = "earlier_keys";

/// Keys are the first tensor, values the second, gates the third.
const GATES: usize = 2;

/// The keys of a layer that travel.
pub(super) struct KeyTransfer {
    part: SequenceShard,
    /// Of all ranks.
    key_ranges: Vec<Vec<KeyRange>>,
    gated: bool,
    kv_heads: usize,
    head_dim: usize,
    /// Of queries, each of which has a gate.
    heads: usize,
    /// Of keys and values, and of their gradients on the way back.
    key_type: DType,
    under_way: Mutex<Option<Transfer>>,
}

/// Successive rows of a head that travel. Rows are counted at their home and among the keys of the rank that needs them.
/// The gates of all heads travel together, as one head.
struct HeadRows {
    tensor: usize,
    head: usize,
    rows: usize,
    home: usize,
    away: usize,
}

/// The heads of every tensor, one matrix each.
type Heads = Vec<Vec<Tensor>>;

impl KeyTransfer {
    pub(super) fn new(
        part: &SequenceShard,
        key_ranges: Vec<Vec<KeyRange>>,
        own: &LocalKeys<'_>,
    ) -> Self {
        let (part, gated, spec) = (part.clone(), own.log_gates.is_some(), own.spec);
        let (kv_heads, head_dim, heads) = (spec.kv_heads, spec.head_dim, spec.heads);
        let (key_type, under_way) = (own.k.value().dtype(), Mutex::default());
        KeyTransfer { part, key_ranges, gated, kv_heads, head_dim, heads, key_type, under_way }
    }

    pub(super) fn traffic(&self) -> Traffic {
        // Of a key or value, and of a gate. The host has f32.
        let key = if self.part.0.context.on_devices() { self.key_type } else { DType::F32 };
        let sizes = [key, DType::F32].map(DType::size);
        let bytes = |head_rows: &HeadRows| {
            let size = sizes[usize::from(head_rows.tensor == GATES)];
            head_rows.rows * self.width(head_rows.tensor) * size
        };
        let fetched = (0..self.index()).flat_map(|from| self.head_rows(from, self.index()));
        let fetched: usize = fetched.map(|head_rows| bytes(&head_rows)).sum();
        let before: usize =
            self.key_ranges[self.index()].iter().map(|range| range.chunk.position).sum();
        let gates = if self.gated { self.heads * sizes[1] } else { 0 };
        let each = 2 * self.kv_heads * self.head_dim * sizes[0] + gates;
        Traffic { fetched: fetched as u64, full: (before * each) as u64 }
    }

    fn index(&self) -> usize {
        self.part.0.context.index()
    }

    /// Of a head of a tensor.
    fn width(&self, tensor: usize) -> usize {
        if tensor == GATES { self.heads } else { self.head_dim }
    }

    /// What rank `to` needs of rank `from`, in the order in which it travels: gates first.
    fn head_rows(&self, from: usize, to: usize) -> Vec<HeadRows> {
        let (mut gates, mut keys) = (Vec::new(), Vec::new());
        for range in &self.key_ranges[to] {
            let Some(chunk) = self.part.0.split.chunk(from, range.chunk.sequence) else { continue };
            let head_rows = |tensor: usize, head: usize, start: usize| {
                let (start, end) = (start.max(chunk.position), chunk.positions().end);
                (start < end).then(|| HeadRows {
                    tensor,
                    head,
                    rows: end - start,
                    home: chunk.row + start - chunk.position,
                    away: range.key_row + start - range.first,
                })
            };
            gates.extend(self.gated.then(|| head_rows(GATES, 0, range.first)).flatten());
            for (head, &start) in range.starts.iter().enumerate() {
                keys.extend([0, 1].into_iter().filter_map(|tensor| head_rows(tensor, head, start)));
            }
        }
        gates.extend(keys);
        gates
    }

    /// Rows of keys at this rank.
    fn key_rows(&self) -> usize {
        let last = self.key_ranges[self.index()].last();
        last.map_or(0, |n| n.key_row + n.chunk.position + n.chunk.len - n.first)
    }

    /// Whether this rank needs its own keys only, in their order.
    fn is_whole(&self) -> bool {
        let mut key_ranges = self.key_ranges[self.index()].iter();
        key_ranges
            .all(|range| range.first == range.chunk.position && range.key_row == range.chunk.row)
    }

    /// Row here, row among the keys, and number of rows of every chunk.
    fn own_rows(&self) -> impl Iterator<Item = [usize; 3]> {
        self.key_ranges[self.index()].iter().map(|range| {
            let KeyRange { chunk, first, key_row, .. } = range;
            [chunk.row, key_row + chunk.position - first, chunk.len]
        })
    }

    fn split(&self, tensors: &[&Tensor]) -> Result<Heads> {
        let widths = vec![self.head_dim; self.kv_heads];
        let heads = |(tensor, x): (usize, &&Tensor)| match tensor {
            GATES => Ok(vec![(*x).clone()]),
            _ => x.device().backend().split_columns(x, &widths),
        };
        tensors.iter().enumerate().map(heads).collect()
    }

    fn join(&self, heads: Heads) -> Result<Vec<Tensor>> {
        let join = |mut heads: Vec<Tensor>| match heads.len() {
            1 => Ok(heads.swap_remove(0)),
            _ => heads[0].device().backend().join_columns(&heads),
        };
        heads.into_iter().map(join).collect()
    }

    /// In which the rows of a tensor travel.
    fn type_of(&self, tensor: usize) -> DType {
        if tensor == GATES { DType::F32 } else { self.key_type }
    }

    fn expected(&self, from: usize, head_rows: &[HeadRows]) -> Expected {
        let layout = |head_rows: &[HeadRows]| {
            let tensor = head_rows[0].tensor;
            ([rows(head_rows), self.width(tensor)].into(), self.type_of(tensor))
        };
        (from, by_width(head_rows).map(layout).collect())
    }

    /// Rows of heads as one matrix for each width, of the type of a tensor.
    fn pack(
        &self,
        head_rows: &[HeadRows],
        heads: &Heads,
        row: impl Fn(&HeadRows) -> usize,
        type_of: impl Fn(usize) -> DType,
    ) -> Result<Vec<Tensor>> {
        let pack = |head_rows: &[HeadRows]| {
            let tensor = head_rows[0].tensor;
            let device = heads[tensor][0].device();
            let mut packed =
                device.uninit([rows(head_rows), self.width(tensor)], type_of(tensor))?;
            let mut at = 0;
            for head_row in head_rows {
                let x = &heads[head_row.tensor][head_row.head];
                device.backend().copy_rows(x, row(head_row), &mut packed, at, head_row.rows)?;
                at += head_row.rows;
            }
            Ok(packed)
        };
        by_width(head_rows).map(pack).collect()
    }

    /// The inverse of [`KeyTransfer::pack`].
    fn unpack(
        &self,
        head_rows: &[HeadRows],
        packed: &[Tensor],
        heads: &mut Heads,
        row: impl Fn(&HeadRows) -> usize,
    ) -> Result<()> {
        for (head_rows, packed) in by_width(head_rows).zip(packed) {
            let mut at = 0;
            for head_row in head_rows {
                let x = &mut heads[head_row.tensor][head_row.head];
                packed.device().backend().copy_rows(packed, at, x, row(head_row), head_row.rows)?;
                at += head_row.rows;
            }
        }
        Ok(())
    }

    fn begin(&self, like: &Tensor, sent: Vec<Parcel>, expected: Vec<Expected>) -> Result<()> {
        let transfer = self.part.begin(like.device(), sent, expected)?;
        *self.under_way.lock().unwrap_or_else(PoisonError::into_inner) = Some(transfer);
        Ok(())
    }

    fn finish(&self) -> Result<Vec<Vec<Tensor>>> {
        let transfer = self.under_way.lock().unwrap_or_else(PoisonError::into_inner).take();
        let missing = || Error::argument(OP, "no keys are under way");
        self.part.finish(transfer.ok_or_else(missing)?)
    }

    /// Indices of the ranks after this one.
    fn later(&self) -> std::ops::Range<usize> {
        self.index() + 1..self.part.0.context.size()
    }
}

/// Gates, then keys and values.
fn by_width(head_rows: &[HeadRows]) -> impl Iterator<Item = &[HeadRows]> {
    head_rows.chunk_by(|a, b| (a.tensor == GATES) == (b.tensor == GATES))
}

fn rows(head_rows: &[HeadRows]) -> usize {
    head_rows.iter().map(|head_row| head_row.rows).sum()
}

/// Keys and values `[R, H_kv * d]` and, where there are any, gates `[R, H]` in, and out as they are; their rows go to later
/// ranks.
pub(super) struct SendKeys(pub Arc<KeyTransfer>);

impl CustomOp for SendKeys {
    fn name(&self) -> &'static str {
        OP
    }

    fn reads_values(&self) -> bool {
        false
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (keys, index) = (&*self.0, self.0.index());
        let own = if keys.later().is_empty() { Vec::new() } else { keys.split(inputs)? };
        let parcel = |to: usize| {
            let head_rows = keys.head_rows(index, to);
            Ok((to, keys.pack(&head_rows, &own, |rows| rows.home, |x| keys.type_of(x))?))
        };
        let sent = keys.later().map(parcel).collect::<Result<_>>()?;
        let expected = (0..index).map(|from| keys.expected(from, &keys.head_rows(from, index)));
        keys.begin(inputs[0], sent, expected.collect())?;
        Ok(inputs.iter().map(|&x| x.clone()).collect())
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let keys = &*self.0;
        let received = keys.finish()?;
        if received.iter().all(Vec::is_empty) {
            return Ok(grads.iter().map(|&x| Some(x.clone())).collect());
        }
        let backend = inputs[0].device().backend();
        // In f32, in which gradients of several ranks are added.
        let wide = |x: &&Tensor| arranged(x, x.rows(), DType::F32, [[0, 0, x.rows()]]);
        let own = grads.iter().map(wide).collect::<Result<Vec<_>>>()?;
        let mut own = keys.split(&own.iter().collect::<Vec<_>>())?;
        // In the order of the ranks, not of arrival.
        for (from, received) in keys.later().zip(received) {
            let head_rows = keys.head_rows(keys.index(), from);
            let sums = keys.pack(&head_rows, &own, |rows| rows.home, |_| DType::F32)?;
            let sums = sums.into_iter().zip(&received).map(|(sum, x)| backend.add(sum, x));
            let sums = sums.collect::<Result<Vec<_>>>()?;
            keys.unpack(&head_rows, &sums, &mut own, |rows| rows.home)?;
        }
        Ok(keys.join(own)?.into_iter().map(Some).collect())
    }
}

/// What [`SendKeys`] has returned in; the same with the earlier rows that `key_ranges` says in front of every chunk out.
pub(super) struct PlaceKeys(pub Arc<KeyTransfer>);

impl CustomOp for PlaceKeys {
    fn name(&self) -> &'static str {
        OP
    }

    fn reads_values(&self) -> bool {
        false
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (keys, index) = (&*self.0, self.0.index());
        if keys.is_whole() {
            keys.finish()?;
            return Ok(inputs.iter().map(|&x| x.clone()).collect());
        }
        // Zeros where a head needs fewer keys than another.
        let own = |x: &Tensor| arranged(x, keys.key_rows(), x.dtype(), keys.own_rows());
        let mut all = like(&keys.split(inputs)?, own)?;
        for (from, received) in keys.finish()?.iter().enumerate() {
            let head_rows = keys.head_rows(from, index);
            keys.unpack(&head_rows, received, &mut all, |rows| rows.away)?;
        }
        keys.join(all)
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (keys, index) = (&*self.0, self.0.index());
        let all = if index == 0 { Vec::new() } else { keys.split(grads)? };
        let parcel = |to: usize| {
            let head_rows = keys.head_rows(to, index);
            Ok((to, keys.pack(&head_rows, &all, |rows| rows.away, |x| keys.type_of(x))?))
        };
        let sent = (0..index).map(parcel).collect::<Result<_>>()?;
        let expected = |from| keys.expected(from, &keys.head_rows(index, from));
        keys.begin(inputs[0], sent, keys.later().map(expected).collect())?;
        if keys.is_whole() {
            return Ok(grads.iter().map(|&x| Some(x.clone())).collect());
        }
        let rows = inputs[0].rows();
        let home = || keys.own_rows().map(|[here, among_keys, len]| [among_keys, here, len]);
        grads.iter().map(|x| arranged(x, rows, x.dtype(), home()).map(Some)).collect()
    }
}

/// A matrix for every head, made from that of `heads`.
fn like(heads: &Heads, make: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Heads> {
    heads.iter().map(|heads| heads.iter().map(&make).collect()).collect()
}
