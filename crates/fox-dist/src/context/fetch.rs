//! Exchange of keys, values and gates. Rows of single heads are packed on the device, so that only what is sent
//! passes through the host.

use fox_tensor::{CustomOp, DType, Error, LocalKeys, Result, Tensor};

use super::key_plan::KeyRange;
use super::{SequenceShard, Traffic};

pub(super) const OP: &str = "earlier_keys";

/// Keys are the first tensor, values the second, gates the third.
const GATES: usize = 2;

/// Keys and values `[R, H_kv * d]` and, where there are any, gates `[R, H]` in; the same with the earlier ones that
/// `key_ranges` says in front of every chunk out.
pub(super) struct Fetch {
    part: SequenceShard,
    /// Of all ranks.
    key_ranges: Vec<Vec<KeyRange>>,
    gated: bool,
    kv_heads: usize,
    head_dim: usize,
    /// Of queries, each of which has a gate.
    heads: usize,
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

impl Fetch {
    pub(super) fn new(
        part: &SequenceShard,
        key_ranges: Vec<Vec<KeyRange>>,
        own: &LocalKeys<'_>,
    ) -> Self {
        let (part, gated, spec) = (part.clone(), own.log_gates.is_some(), own.spec);
        let (kv_heads, head_dim, heads) = (spec.kv_heads, spec.head_dim, spec.heads);
        Fetch { part, key_ranges, gated, kv_heads, head_dim, heads }
    }

    pub(super) fn traffic(&self) -> Traffic {
        let values = |head_rows: Vec<HeadRows>| -> usize {
            head_rows.iter().map(|head_rows| head_rows.rows * self.width(head_rows.tensor)).sum()
        };
        let fetched: usize =
            (0..self.index()).map(|from| values(self.head_rows(from, self.index()))).sum();
        let before: usize =
            self.key_ranges[self.index()].iter().map(|range| range.chunk.position).sum();
        let each = 2 * self.kv_heads * self.head_dim + if self.gated { self.heads } else { 0 };
        let bytes = |values: usize| (values * size_of::<f32>()) as u64;
        Traffic { fetched: bytes(fetched), full: bytes(before * each) }
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

    /// The values that travel to another rank.
    fn pack(
        &self,
        head_rows: &[HeadRows],
        heads: &Heads,
        row: impl Fn(&HeadRows) -> usize,
    ) -> Result<Vec<f32>> {
        let mut message = Vec::new();
        for head_rows in by_width(head_rows) {
            let x = &heads[head_rows[0].tensor][0];
            let mut packed = x.device().uninit([rows(head_rows), x.cols()], x.dtype())?;
            let mut at = 0;
            for head_row in head_rows {
                let x = &heads[head_row.tensor][head_row.head];
                x.device().backend().copy_rows(x, row(head_row), &mut packed, at, head_row.rows)?;
                at += head_row.rows;
            }
            message.extend(packed.to_f32()?);
        }
        Ok(message)
    }

    /// Hands over the rows of a message, on the device of `like`: the rows of a head, and a matrix that has them from a row on.
    fn unpack(
        &self,
        head_rows: &[HeadRows],
        mut message: &[f32],
        like: &Tensor,
        mut put: impl FnMut(&HeadRows, &Tensor, usize) -> Result<()>,
    ) -> Result<()> {
        for head_rows in by_width(head_rows) {
            let (rows, width) = (rows(head_rows), self.width(head_rows[0].tensor));
            let Some((values, rest)) = message.split_at_checked(rows * width) else {
                let detail =
                    format!("{} values received, {rows} x {width} are missing", message.len());
                return Err(Error::argument(OP, detail));
            };
            message = rest;
            let received = like.device().from_f32(values, [rows, width])?;
            let mut at = 0;
            for head_row in head_rows {
                put(head_row, &received, at)?;
                at += head_row.rows;
            }
        }
        Ok(())
    }
}

/// Gates, then keys and values.
fn by_width(head_rows: &[HeadRows]) -> impl Iterator<Item = &[HeadRows]> {
    head_rows.chunk_by(|a, b| (a.tensor == GATES) == (b.tensor == GATES))
}

fn rows(head_rows: &[HeadRows]) -> usize {
    head_rows.iter().map(|head_row| head_row.rows).sum()
}

impl CustomOp for Fetch {
    fn name(&self) -> &'static str {
        OP
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (index, context) = (self.index(), &self.part.0.context);
        let own = self.split(inputs)?;
        let message = |to| self.pack(&self.head_rows(index, to), &own, |head_rows| head_rows.home);
        let messages: Vec<_> = (index + 1..context.size()).map(message).collect::<Result<_>>()?;
        let received = context.step(|ranks| {
            for (to, message) in (index + 1..).zip(&messages) {
                ranks.send(to, message);
            }
            (0..index).map(|from| ranks.receive::<f32>(from)).collect::<crate::Result<Vec<_>>>()
        });
        let received = self.part.record_failure(received)?;
        if self.is_whole() {
            return Ok(inputs.iter().map(|&x| x.clone()).collect());
        }
        let backend = inputs[0].device().backend();
        // Zeros where a head needs fewer keys than another.
        let mut all = like(&own, |x| x.device().zeros([self.key_rows(), x.cols()], x.dtype()))?;
        for (all, own) in all.iter_mut().flatten().zip(own.iter().flatten()) {
            for [here, among_keys, len] in self.own_rows() {
                backend.copy_rows(own, here, all, among_keys, len)?;
            }
        }
        for (from, message) in received.iter().enumerate() {
            self.unpack(
                &self.head_rows(from, index),
                message,
                inputs[0],
                |head_row, received, at| {
                    let all = &mut all[head_row.tensor][head_row.head];
                    backend.copy_rows(received, at, all, head_row.away, head_row.rows)
                },
            )?;
        }
        self.join(all)
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (index, context) = (self.index(), &self.part.0.context);
        let all = self.split(grads)?;
        let message = |to| self.pack(&self.head_rows(to, index), &all, |head_rows| head_rows.away);
        let messages: Vec<_> = (0..index).map(message).collect::<Result<_>>()?;
        let received = context.step(|ranks| {
            for (to, message) in messages.iter().enumerate() {
                ranks.send(to, message);
            }
            let later = index + 1..context.size();
            later.map(|from| ranks.receive::<f32>(from)).collect::<crate::Result<Vec<_>>>()
        });
        let received = self.part.record_failure(received)?;
        let backend = inputs[0].device().backend();
        // In f32, in which gradients of several ranks are added.
        let mut own = like(&all, |x| x.device().zeros([inputs[0].rows(), x.cols()], DType::F32))?;
        for (own, all) in own.iter_mut().flatten().zip(all.iter().flatten()) {
            for [here, among_keys, len] in self.own_rows() {
                backend.copy_rows(all, among_keys, own, here, len)?;
            }
        }
        // In the order of the ranks, not of arrival.
        for (from, message) in (index + 1..).zip(&received) {
            self.unpack(
                &self.head_rows(index, from),
                message,
                inputs[0],
                |head_row, received, at| {
                    let own = &mut own[head_row.tensor][head_row.head];
                    let sum = own.slice_rows(head_row.home, head_row.rows)?;
                    let sum = backend.add(sum, &received.slice_rows(at, head_row.rows)?)?;
                    backend.copy_rows(&sum, 0, own, head_row.home, head_row.rows)
                },
            )?;
        }
        Ok(self.join(own)?.into_iter().map(Some).collect())
    }
}

/// A matrix for every head, made from that of `heads`.
fn like(heads: &Heads, make: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Heads> {
    heads.iter().map(|heads| heads.iter().map(&make).collect()).collect()
}
