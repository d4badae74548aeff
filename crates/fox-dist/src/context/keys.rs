//! Earlier keys, values and gates for forgetting attention.

use std::ops::Range;
use std::sync::Arc;

use fox_tensor::{
    Acp, AttentionSpec, CustomOp, OwnKeys, Result, Segment, Segments, Tape, Tensor, Var, Whole,
    WithEarlier,
};

use super::agree::{Bounds, agree};
use super::plan::{Need, Reach, needs};
use super::{Part, Traffic};

/// Without pruning a key stays where it is when its weight is provably below `e^-104`, which is 0 in f32: the smallest
/// number above is `2^-149 = e^-103.3`.
const VANISHED: f64 = -104.0;

/// Bounds from norm weights are those of exact arithmetic; rounding to bf16 adds at most `2^-7`.
const ROUNDING: f64 = 1.01;

/// See [`EarlierRows::with_earlier`](fox_tensor::EarlierRows::with_earlier).
pub(super) fn with_earlier(
    part: &Part,
    tape: &mut Tape<'_>,
    own: &OwnKeys<'_>,
) -> Result<WithEarlier> {
    let inner = &*part.0;
    let (split, context, spec) = (&inner.split, &inner.context, own.spec);
    let gates = own.log_gates.map(|gates| gates.value().to_f32()).transpose()?;
    let (sums, bounds) = match &gates {
        None => (None, Bounds::default()),
        Some(gates) => {
            let (sums, bounds) = agree(part, own, gates)?;
            (Some(sums), bounds)
        }
    };
    let tolerance = match spec.acp {
        Acp::On { log_tolerance, .. } => f64::from(log_tolerance),
        Acp::Off => VANISHED,
    };
    let threshold = |sequence: usize, head: usize| {
        let bound = ROUNDING * bounds.of(sequence, head, spec.heads);
        tolerance - 2.0 * bound - (split.length(sequence) as f64).ln()
    };
    let reach = Reach { heads: spec.heads, kv_heads: spec.kv_heads, window: spec.window };
    let needs: Vec<Vec<Need>> = (0..context.size())
        .map(|rank| needs(split, rank, reach, sums.as_ref(), threshold))
        .collect();
    let mine = &needs[context.index()];
    let segments = mine.iter().map(|need| Segment {
        q_start: need.piece.row,
        q_len: need.piece.len,
        k_start: need.key_row,
        k_len: need.piece.position + need.piece.len - need.first,
    });
    let segments = Segments::new(segments.collect())?;
    let gate_sums = sums.iter().flat_map(|sums| {
        let before = |need: &Need, h| sums.before(need.piece.sequence, need.first, h);
        mine.iter().flat_map(move |need| (0..spec.heads).map(move |h| before(need, h)))
    });
    let whole = Whole {
        gate_sums: gate_sums.collect(),
        keys: mine.iter().map(|need| split.length(need.piece.sequence)).collect(),
        bounds: match bounds.by_sequence.is_empty() {
            true => Vec::new(),
            false => {
                let of = |need: &Need, h| bounds.of(need.piece.sequence, h, spec.heads);
                let all = mine.iter().flat_map(|need| (0..spec.heads).map(move |h| of(need, h)));
                all.collect()
            }
        },
    };
    let gated = own.log_gates.is_some();
    let fetch = Fetch { part: part.clone(), needs, gated, widths: widths(spec) };
    part.note_traffic(fetch.traffic());
    let inputs: Vec<&Var> = [own.k, own.v].into_iter().chain(own.log_gates).collect();
    let mut outputs = tape.custom(fetch, &inputs)?.into_iter();
    let spec = AttentionSpec { segments, whole: Some(Arc::new(whole)), ..spec.clone() };
    match (outputs.next(), outputs.next(), outputs.next()) {
        (Some(k), Some(v), log_gates) => Ok(WithEarlier { k, v, log_gates, spec }),
        _ => Err(fox_tensor::Error::Argument { op: OP, detail: "the op gave no keys".into() }),
    }
}

const OP: &str = "earlier_keys";

/// Width of a key, of its gates, and number of key heads.
#[derive(Clone, Copy)]
struct Widths {
    kv_heads: usize,
    head_dim: usize,
    heads: usize,
}

fn widths(spec: &AttentionSpec) -> Widths {
    Widths { kv_heads: spec.kv_heads, head_dim: spec.head_dim, heads: spec.heads }
}

/// Keys and values `[R, H_kv * d]` and, where there are any, gates `[R, H]` in; the same with the earlier ones that
/// `needs` says in front of every piece out.
struct Fetch {
    part: Part,
    /// Of all ranks.
    needs: Vec<Vec<Need>>,
    gated: bool,
    widths: Widths,
}

/// Columns of successive rows that travel: `tensor` 0 is keys, 1 values, 2 gates. Rows are counted at their home and
/// among the keys of the rank that needs them.
struct Cells {
    tensor: usize,
    columns: Range<usize>,
    rows: usize,
    home: usize,
    away: usize,
}

impl Fetch {
    fn index(&self) -> usize {
        self.part.0.context.index()
    }

    fn width(&self, tensor: usize) -> usize {
        let Widths { kv_heads, head_dim, heads } = self.widths;
        if tensor == 2 { heads } else { kv_heads * head_dim }
    }

    /// What rank `to` needs of rank `from`, in the order in which it travels.
    fn cells(&self, from: usize, to: usize) -> Vec<Cells> {
        let Widths { kv_heads, head_dim, heads } = self.widths;
        let mut cells = Vec::new();
        for need in &self.needs[to] {
            let Some(piece) = self.part.0.split.piece(from, need.piece.sequence) else { continue };
            let mut add = |tensor: usize, columns: Range<usize>, start: usize| {
                let Range { start, end } = start.max(piece.position)..piece.positions().end;
                if start < end {
                    let home = piece.row + start - piece.position;
                    let away = need.key_row + start - need.first;
                    cells.push(Cells { tensor, columns, rows: end - start, home, away });
                }
            };
            if self.gated {
                add(2, 0..heads, need.first);
            }
            for (kv, &start) in need.starts.iter().enumerate().take(kv_heads) {
                let columns = kv * head_dim..(kv + 1) * head_dim;
                add(0, columns.clone(), start);
                add(1, columns, start);
            }
        }
        cells
    }

    fn traffic(&self) -> Traffic {
        let values = |cells: Vec<Cells>| -> usize {
            cells.iter().map(|cells| cells.rows * cells.columns.len()).sum()
        };
        let fetched: usize =
            (0..self.index()).map(|from| values(self.cells(from, self.index()))).sum();
        let before: usize = self.needs[self.index()].iter().map(|need| need.piece.position).sum();
        let each = 2 * self.width(0) + if self.gated { self.width(2) } else { 0 };
        let bytes = |values: usize| (values * size_of::<f32>()) as u64;
        Traffic { fetched: bytes(fetched), full: bytes(before * each) }
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

    fn pack(
        &self,
        cells: &[Cells],
        tensors: &[Vec<f32>],
        row: impl Fn(&Cells) -> usize,
    ) -> Vec<f32> {
        let mut message = Vec::new();
        for cell in cells {
            let width = self.width(cell.tensor);
            for r in row(cell)..row(cell) + cell.rows {
                message.extend(&tensors[cell.tensor][r * width..][cell.columns.clone()]);
            }
        }
        message
    }

    /// Lets `put` take the values of a message, row by row.
    fn unpack(
        &self,
        cells: &[Cells],
        message: &[f32],
        tensors: &mut [Vec<f32>],
        row: impl Fn(&Cells) -> usize,
        put: impl Fn(&mut f32, f32),
    ) {
        let mut message = message.iter();
        for cell in cells {
            let width = self.width(cell.tensor);
            for r in row(cell)..row(cell) + cell.rows {
                let values = &mut tensors[cell.tensor][r * width..][cell.columns.clone()];
                values.iter_mut().zip(&mut message).for_each(|(value, x)| put(value, *x));
            }
        }
    }

    /// Where the rows of every piece are, as values of a tensor: here, and among the keys.
    fn own_ranges(&self, tensor: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let width = self.width(tensor);
        self.needs[self.index()].iter().map(move |need| {
            let range = |row: usize| row * width..(row + need.piece.len) * width;
            (range(need.piece.row), range(need.key_row + need.piece.position - need.first))
        })
    }
}

impl CustomOp for Fetch {
    fn name(&self) -> &'static str {
        OP
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (index, context) = (self.index(), &self.part.0.context);
        let own: Vec<Vec<f32>> = inputs.iter().map(|x| x.to_f32()).collect::<Result<_>>()?;
        let rows = self.key_rows();
        let mut all: Vec<Vec<f32>> =
            (0..inputs.len()).map(|tensor| vec![0.0; rows * self.width(tensor)]).collect();
        let came = context.step(|ranks| {
            for to in index + 1..context.size() {
                ranks.send(to, &self.pack(&self.cells(index, to), &own, |cells| cells.home));
            }
            (0..index).map(|from| ranks.receive::<f32>(from)).collect::<crate::Result<Vec<_>>>()
        });
        let came = self.part.keep_failure(came)?;
        if self.is_whole() {
            return Ok(inputs.iter().map(|&x| x.clone()).collect());
        }
        for (from, message) in came.iter().enumerate() {
            let cells = self.cells(from, index);
            self.unpack(&cells, message, &mut all, |cells| cells.away, |value, x| *value = x);
        }
        for (tensor, (all, own)) in all.iter_mut().zip(&own).enumerate() {
            for (here, among_keys) in self.own_ranges(tensor) {
                all[among_keys].copy_from_slice(&own[here]);
            }
        }
        let tensor = |(tensor, values): (usize, Vec<f32>)| {
            let on_device = inputs[0].device().from_f32(&values, [rows, self.width(tensor)])?;
            if tensor == 2 { Ok(on_device) } else { on_device.to_activations() }
        };
        all.into_iter().enumerate().map(tensor).collect()
    }

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &[&Tensor],
        grads: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let (index, context) = (self.index(), &self.part.0.context);
        let all: Vec<Vec<f32>> = grads.iter().map(|x| x.to_f32()).collect::<Result<_>>()?;
        let came = context.step(|ranks| {
            for to in 0..index {
                ranks.send(to, &self.pack(&self.cells(to, index), &all, |cells| cells.away));
            }
            let later = index + 1..context.size();
            later.map(|from| ranks.receive::<f32>(from)).collect::<crate::Result<Vec<_>>>()
        });
        let came = self.part.keep_failure(came)?;
        let mut own: Vec<Vec<f32>> = inputs.iter().map(|x| vec![0.0; x.len()]).collect();
        for (tensor, (own, all)) in own.iter_mut().zip(&all).enumerate() {
            for (here, among_keys) in self.own_ranges(tensor) {
                own[here].copy_from_slice(&all[among_keys]);
            }
        }
        // In the order of the ranks, whoever was first.
        for (from, message) in (index + 1..).zip(&came) {
            let cells = self.cells(index, from);
            self.unpack(&cells, message, &mut own, |cells| cells.home, |value, x| *value += x);
        }
        let tensor =
            |(values, x): (Vec<f32>, &&Tensor)| x.device().from_f32(&values, x.shape()).map(Some);
        own.into_iter().zip(inputs).map(tensor).collect()
    }
}
