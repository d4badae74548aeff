//! Keys, values and gates on their way. Rows of single heads are collected on the device, so that only what travels
//! passes through the host.

use fox_tensor::{CustomOp, DType, Error, LocalKeys, Result, Tensor};

use super::plan::Need;
use super::{Part, Traffic};

pub(super) const OP: &str = "earlier_keys";

/// Keys are the first tensor, values the second, gates the third.
const GATES: usize = 2;

/// Keys and values `[R, H_kv * d]` and, where there are any, gates `[R, H]` in; the same with the earlier ones that
/// `needs` says in front of every piece out.
pub(super) struct Fetch {
    part: Part,
    /// Of all ranks.
    needs: Vec<Vec<Need>>,
    gated: bool,
    kv_heads: usize,
    head_dim: usize,
    /// Of queries, each of which has a gate.
    heads: usize,
}

/// Successive rows of a head that travel. Rows are counted at their home and among the keys of the rank that needs them.
/// The gates of all heads travel together, as one head.
struct Cells {
    tensor: usize,
    head: usize,
    rows: usize,
    home: usize,
    away: usize,
}

/// The heads of every tensor, each a matrix of its own.
type Heads = Vec<Vec<Tensor>>;

impl Fetch {
    pub(super) fn new(part: &Part, needs: Vec<Vec<Need>>, own: &LocalKeys<'_>) -> Self {
        let (part, gated, spec) = (part.clone(), own.log_gates.is_some(), own.spec);
        let (kv_heads, head_dim, heads) = (spec.kv_heads, spec.head_dim, spec.heads);
        Fetch { part, needs, gated, kv_heads, head_dim, heads }
    }

    pub(super) fn traffic(&self) -> Traffic {
        let values = |cells: Vec<Cells>| -> usize {
            cells.iter().map(|cells| cells.rows * self.width(cells.tensor)).sum()
        };
        let fetched: usize =
            (0..self.index()).map(|from| values(self.cells(from, self.index()))).sum();
        let before: usize = self.needs[self.index()].iter().map(|need| need.piece.position).sum();
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
    fn cells(&self, from: usize, to: usize) -> Vec<Cells> {
        let (mut gates, mut keys) = (Vec::new(), Vec::new());
        for need in &self.needs[to] {
            let Some(piece) = self.part.0.split.piece(from, need.piece.sequence) else { continue };
            let cells = |tensor: usize, head: usize, start: usize| {
                let (start, end) = (start.max(piece.position), piece.positions().end);
                (start < end).then(|| Cells {
                    tensor,
                    head,
                    rows: end - start,
                    home: piece.row + start - piece.position,
                    away: need.key_row + start - need.first,
                })
            };
            gates.extend(self.gated.then(|| cells(GATES, 0, need.first)).flatten());
            for (head, &start) in need.starts.iter().enumerate() {
                keys.extend([0, 1].into_iter().filter_map(|tensor| cells(tensor, head, start)));
            }
        }
        gates.extend(keys);
        gates
    }

    /// Rows of keys at this rank.
    fn key_rows(&self) -> usize {
        let last = self.needs[self.index()].last();
        last.map_or(0, |n| n.key_row + n.piece.position + n.piece.len - n.first)
    }

    /// Whether this rank's own keys are all it needs, in their order.
    fn is_whole(&self) -> bool {
        let mut needs = self.needs[self.index()].iter();
        needs.all(|need| need.first == need.piece.position && need.key_row == need.piece.row)
    }

    /// Row here, row among the keys, and number of rows of every piece.
    fn own_rows(&self) -> impl Iterator<Item = [usize; 3]> {
        self.needs[self.index()].iter().map(|need| {
            let Need { piece, first, key_row, .. } = need;
            [piece.row, key_row + piece.position - first, piece.len]
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
        cells: &[Cells],
        heads: &Heads,
        row: impl Fn(&Cells) -> usize,
    ) -> Result<Vec<f32>> {
        let mut message = Vec::new();
        for cells in by_width(cells) {
            let x = &heads[cells[0].tensor][0];
            let mut packed = x.device().uninit([rows(cells), x.cols()], x.dtype())?;
            let mut at = 0;
            for cell in cells {
                let x = &heads[cell.tensor][cell.head];
                x.device().backend().copy_rows(x, row(cell), &mut packed, at, cell.rows)?;
                at += cell.rows;
            }
            message.extend(packed.to_f32()?);
        }
        Ok(message)
    }

    /// Hands over the rows of a message, on the device of `like`: the cells, and a matrix that has them from a row on.
    fn unpack(
        &self,
        cells: &[Cells],
        mut message: &[f32],
        like: &Tensor,
        mut put: impl FnMut(&Cells, &Tensor, usize) -> Result<()>,
    ) -> Result<()> {
        for cells in by_width(cells) {
            let (rows, width) = (rows(cells), self.width(cells[0].tensor));
            let Some((values, rest)) = message.split_at_checked(rows * width) else {
                let detail = format!("{} values came, {rows} x {width} are missing", message.len());
                return Err(Error::argument(OP, detail));
            };
            message = rest;
            let came = like.device().from_f32(values, [rows, width])?;
            let mut at = 0;
            for cell in cells {
                put(cell, &came, at)?;
                at += cell.rows;
            }
        }
        Ok(())
    }
}

/// Gates, then keys and values.
fn by_width(cells: &[Cells]) -> impl Iterator<Item = &[Cells]> {
    cells.chunk_by(|a, b| (a.tensor == GATES) == (b.tensor == GATES))
}

fn rows(cells: &[Cells]) -> usize {
    cells.iter().map(|cell| cell.rows).sum()
}

impl CustomOp for Fetch {
    fn name(&self) -> &'static str {
        OP
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (index, context) = (self.index(), &self.part.0.context);
        let own = self.split(inputs)?;
        let message = |to| self.pack(&self.cells(index, to), &own, |cells| cells.home);
        let messages: Vec<_> = (index + 1..context.size()).map(message).collect::<Result<_>>()?;
        let came = context.step(|ranks| {
            for (to, message) in (index + 1..).zip(&messages) {
                ranks.send(to, message);
            }
            (0..index).map(|from| ranks.receive::<f32>(from)).collect::<crate::Result<Vec<_>>>()
        });
        let came = self.part.keep_failure(came)?;
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
        for (from, message) in came.iter().enumerate() {
            self.unpack(&self.cells(from, index), message, inputs[0], |cell, came, at| {
                let all = &mut all[cell.tensor][cell.head];
                backend.copy_rows(came, at, all, cell.away, cell.rows)
            })?;
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
        let message = |to| self.pack(&self.cells(to, index), &all, |cells| cells.away);
        let messages: Vec<_> = (0..index).map(message).collect::<Result<_>>()?;
        let came = context.step(|ranks| {
            for (to, message) in messages.iter().enumerate() {
                ranks.send(to, message);
            }
            let later = index + 1..context.size();
            later.map(|from| ranks.receive::<f32>(from)).collect::<crate::Result<Vec<_>>>()
        });
        let came = self.part.keep_failure(came)?;
        let backend = inputs[0].device().backend();
        // In f32, in which gradients of several ranks are added.
        let mut own = like(&all, |x| x.device().zeros([inputs[0].rows(), x.cols()], DType::F32))?;
        for (own, all) in own.iter_mut().flatten().zip(all.iter().flatten()) {
            for [here, among_keys, len] in self.own_rows() {
                backend.copy_rows(all, among_keys, own, here, len)?;
            }
        }
        // In the order of the ranks, whoever was first.
        for (from, message) in (index + 1..).zip(&came) {
            self.unpack(&self.cells(index, from), message, inputs[0], |cell, came, at| {
                let own = &mut own[cell.tensor][cell.head];
                let sum = own.slice_rows(cell.home, cell.rows)?;
                let sum = backend.add(sum, &came.slice_rows(at, cell.rows)?)?;
                backend.copy_rows(&sum, 0, own, cell.home, cell.rows)
            })?;
        }
        Ok(self.join(own)?.into_iter().map(Some).collect())
    }
}

/// A matrix for every head, made from that of `heads`.
fn like(heads: &Heads, make: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Heads> {
    heads.iter().map(|heads| heads.iter().map(&make).collect()).collect()
}
