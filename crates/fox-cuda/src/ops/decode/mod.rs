//! Decode steps of many sequences whose state stays on the device, in slots.
//!
//! A step has one set of launches for all its rows, nine per layer. All kernels are compiled, and the launches of every
//! bucket of rows and of context lengths are captured as a CUDA graph, when the slots are opened.

mod dequantize;
mod graph;
mod kernels;
mod linear;
mod params;
mod readback;
mod step;
mod weights;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use fox_tensor::{
    DType, DecodeRow, DecodeWeights, FinishedStep, LayerPast, MAX_UNFINISHED_STEPS, PAGE,
    PagedKeys, RowToken, SlotDecodeOps, Tensor, slot_state,
};

use crate::backend::Cuda;
use crate::backend::storage::memory;
use crate::ops::paged::{DeviceTable, Writes};
use crate::params::{Param, int, rows};
use crate::{Buffer, Error, Result};
use graph::Graph;
pub(super) use kernels::variants;
use kernels::{BUCKETS, bucket_of, kv_splits};
use params::{DecodeTable, DecodeToken, DrawParams};
use readback::Readback;
use step::{AttentionLaunches, SHORT_PAGES, SlotState, Steps, Workspace};
use weights::DeviceWeights;

/// Smallest number of pages that the gate sums of a slot have room for.
const MIN_PAGES: usize = 64;

/// The slots of a model.
struct CudaSlots {
    // Dropped first: waits for unfinished steps.
    /// Room for the results of the unfinished steps, oldest first.
    unfinished: VecDeque<Readback>,
    /// Unused room.
    idle: Vec<Readback>,
    // Dropped next: graphs refer to the buffers.
    /// By bucket; empty when launches are not captured.
    graphs: Vec<BucketGraphs>,
    steps: Steps,
    weights: DeviceWeights,
    work: Workspace,
    state: SlotState,
    slots: Vec<Slot>,
    max_context: usize,
    /// Rows of the step that was begun last.
    rows: usize,
}

/// The graphs of steps of a bucket.
struct BucketGraphs {
    /// With attention in one launch, where the bucket has it.
    one: Option<Graph>,
    /// By logarithm of the KV splits.
    split: Vec<Graph>,
}

/// The host's view of a slot.
struct Slot {
    /// Sums of the log gates at the ends of full pages `[layers][room][heads]`.
    ends: Buffer<f64>,
    /// Pages that `ends` has room for.
    room: usize,
    /// Tokens seen.
    len: usize,
    /// Tokens that the page table has pages for; 0 for an empty slot.
    capacity: usize,
    /// Most pages that a head of a layer holds.
    most_held: usize,
    /// The page tables of all layers, which keep their pages alive.
    tables: Vec<Arc<DeviceTable>>,
}

/// How launches reach the GPU.
#[derive(Clone, Copy)]
struct LaunchMode {
    captured: bool,
    overlapping: bool,
}

impl LaunchMode {
    /// Captured and overlapping, unless the environment variable `FOX_GRAPHS` is `0` (single launches, to find one that
    /// fails) or `serial` (captured without overlap).
    fn from_environment() -> Self {
        let value = std::env::var("FOX_GRAPHS").unwrap_or_default();
        LaunchMode { captured: value != "0", overlapping: value != "0" && value != "serial" }
    }
}

impl Cuda {
    fn open(&self, model: &DecodeWeights) -> Result<Option<Box<dyn Any + Send>>> {
        if !self.supports_slots(model) {
            return Ok(None);
        }
        let weights = self.device_weights(model)?;
        let (count, layers, shape) = (model.slots, model.blocks.len(), &weights.shape);
        let (buckets, mode) = (bucket_of(count) + 1, LaunchMode::from_environment());
        let raw = 2 * shape.kv_heads * shape.head_dim;
        let slot = |_| {
            let ends = self.gpu.alloc(1)?;
            Ok(Slot { ends, room: 0, len: 0, capacity: 0, most_held: 0, tables: Vec::new() })
        };
        let mut slots = CudaSlots {
            graphs: Vec::new(),
            steps: Steps::new(&self.gpu, buckets, &weights, mode.overlapping)?,
            work: Workspace::new(&self.gpu, BUCKETS[buckets - 1], &weights)?,
            state: SlotState {
                tables: self.gpu.zeros(count * layers)?,
                gate_sums: self.gpu.zeros(count * layers * shape.heads)?,
                last: self.gpu.zeros(count * layers * raw)?,
            },
            slots: (0..count).map(slot).collect::<Result<_>>()?,
            max_context: model.max_context,
            rows: 0,
            unfinished: VecDeque::new(),
            idle: (0..MAX_UNFINISHED_STEPS)
                .map(|_| Readback::new(&self.gpu, count, layers * shape.heads))
                .collect::<Result<_>>()?,
            weights,
        };
        // A step of each bucket without sequences loads all kernels, which must not happen during capture.
        for bucket in 0..buckets {
            self.upload_rows(&mut slots, &[], bucket)?;
            slots.launch(bucket, AttentionLaunches::Split(1))?;
            if slots.steps.attends_in_one(bucket) {
                slots.launch(bucket, AttentionLaunches::One)?;
            }
        }
        self.gpu.synchronize()?;
        if mode.captured {
            let most = kv_splits(model.max_context.saturating_sub(1)).next_power_of_two().ilog2();
            let graphs = |bucket: usize| -> Result<BucketGraphs> {
                let capture = |attention: AttentionLaunches| {
                    Graph::capture(&self.gpu, || slots.launch(bucket, attention))
                };
                let one = slots.steps.attends_in_one(bucket);
                Ok(BucketGraphs {
                    one: one.then(|| capture(AttentionLaunches::One)).transpose()?,
                    split: (0..=most)
                        .map(|log| capture(AttentionLaunches::Split(1 << log)))
                        .collect::<Result<_>>()?,
                })
            };
            slots.graphs = (0..buckets).map(graphs).collect::<Result<_>>()?;
        }
        Ok(Some(Box::new(slots)))
    }

    /// Uploads the rows of a step, padded to the bucket with rows without a slot.
    fn upload_rows(&self, slots: &mut CudaSlots, step: &[DecodeRow], bucket: usize) -> Result<()> {
        let idle = DecodeToken { slot: -1, token: 0, position: 0, sampled_by: -1 };
        let mut tokens = vec![idle; BUCKETS[bucket]];
        let mut draws = vec![DrawParams::default(); BUCKETS[bucket]];
        for ((to, draw), row) in tokens.iter_mut().zip(&mut draws).zip(step) {
            let slot = int("a decode step", "slot", row.slot)?;
            let (token, sampled_by) = match row.token {
                RowToken::Id(id) => (id, -1),
                RowToken::Sampled(row) => (0, int("a decode step", "row", row)?),
            };
            *to = DecodeToken { slot, token, position: row.position, sampled_by };
            if let Some(own) = row.draw {
                *draw = DrawParams {
                    uniform: own.uniform.to_bits(),
                    // Finite, so that the weight of the most likely token is not 0 times infinity.
                    inverse_temperature: (1.0 / own.temperature).min(f32::MAX),
                    top_p: own.top_p,
                    min_p: own.min_p,
                    top_k: own.top_k,
                };
            }
        }
        // One copy: the overhead of a copy exceeds the transfer time of its bytes.
        let mut input: Vec<u8> = bytemuck::cast_slice(&rows("a decode step", &tokens)?).to_vec();
        input.extend_from_slice(bytemuck::cast_slice(&rows("a decode step", &draws)?));
        // SAFETY: `input` has room for the rows of the largest bucket.
        unsafe { self.gpu.write(slots.work.input.address(), &input)? };
        slots.rows = step.len();
        Ok(())
    }

    fn begin(&self, slots: &mut CudaSlots, step: &[DecodeRow]) -> Result<()> {
        for DecodeRow { slot, position, .. } in step {
            if *position >= slots.slots[*slot].capacity {
                let detail = format!("slot {slot} has no page for position {position}");
                return Err(Error::argument("step", detail));
            }
        }
        let bucket = bucket_of(step.len());
        let is_short = step.iter().all(|row| slots.slots[row.slot].most_held <= SHORT_PAGES);
        let attention = if is_short && slots.steps.attends_in_one(bucket) {
            AttentionLaunches::One
        } else {
            let splits = step.iter().map(|row| kv_splits(row.position)).max();
            AttentionLaunches::Split(splits.unwrap_or(1).next_power_of_two())
        };
        self.upload_rows(slots, step, bucket)?;
        step.iter().for_each(|row| slots.slots[row.slot].len += 1);
        let graph = slots.graphs.get(bucket).and_then(|graphs| match attention {
            AttentionLaunches::One => graphs.one.as_ref(),
            AttentionLaunches::Split(splits) => graphs.split.get(splits.ilog2() as usize),
        });
        match graph {
            // SAFETY: `slots` owns the buffers and keeps the pages of its sequences alive.
            Some(graph) => unsafe { graph.launch(&self.gpu) },
            None => slots.launch(bucket, attention),
        }?;
        let none = || Error::argument("step", "too many steps are unfinished");
        let mut readback = slots.idle.pop().ok_or_else(none)?;
        let sums = slots.weights.is_gated().then_some(&slots.state.gate_sums);
        readback.begin(&self.gpu, step, &slots.work.sampled, sums)?;
        slots.unfinished.push_back(readback);
        Ok(())
    }

    fn finish(&self, slots: &mut CudaSlots) -> Result<FinishedStep> {
        let none = || Error::argument("step", "no step is unfinished");
        let mut readback = slots.unfinished.pop_front().ok_or_else(none)?;
        let finished = readback.finish(&self.gpu);
        slots.idle.push(readback);
        finished
    }

    fn enter(
        &self,
        slots: &mut CudaSlots,
        slot: usize,
        len: usize,
        past: &mut [LayerPast<'_>],
    ) -> Result<()> {
        let layers = slots.weights.layers.len();
        let shape = slots.weights.shape;
        let (heads, group) = (shape.heads, shape.heads / shape.kv_heads);
        let raw_width = shape.kv_heads * shape.head_dim;
        let gated = slots.weights.is_gated();
        let full = len / PAGE;
        if gated && past.iter().any(|past| past.pages.ends().len() < full * heads) {
            return Err(Error::argument("enter", "full pages without sums of gates at their ends"));
        }
        // Until all of the state is there, the slot is empty.
        slots.slots[slot].capacity = 0;
        let room = (2 * full).max(MIN_PAGES);
        // Infinity marks evicted pages as fully decayed.
        let mut ends = vec![f64::INFINITY; if gated { layers * room * heads } else { 1 }];
        for (l, past) in past.iter().enumerate().filter(|_| gated) {
            for n in 0..full {
                let own = &mut ends[(l * room + n) * heads..][..heads];
                for (h, end) in own.iter_mut().enumerate() {
                    if n >= past.pages.dropped(h / group) {
                        *end = past.pages.ends()[n * heads + h];
                    }
                }
            }
        }
        let ends = self.gpu.upload(&ends)?;
        slots.slots[slot] = Slot { ends, room, len, capacity: 0, most_held: 0, tables: Vec::new() };
        if gated {
            let sums: Vec<f64> = past.iter().flat_map(|past| past.gate_sums).copied().collect();
            let at = slots.state.gate_sums.address() + (8 * slot * layers * heads) as u64;
            // SAFETY: the slot has room for the sums of all layers, of which each has `heads`.
            unsafe { self.gpu.write(at, &sums)? };
        }
        for (l, past) in past.iter().enumerate() {
            for (n, last) in [past.last_k, past.last_v].into_iter().enumerate() {
                let Some(last) = last else { continue };
                if last.dtype() != DType::Bf16 {
                    return Err(Error::argument("enter", format!("a raw row of {last:?}")));
                }
                let index = ((slot * layers + l) * 2 + n) * raw_width;
                let to = slots.state.last.address() + (2 * index) as u64;
                // SAFETY: the slot has room for the raw rows of all layers, and the row has `raw_width` bf16 values.
                unsafe { self.gpu.copy(to, memory(last)?.data.address(), 2 * raw_width)? };
            }
        }
        let mut pages: Vec<&mut dyn PagedKeys> =
            past.iter_mut().map(|past| &mut *past.pages as &mut dyn PagedKeys).collect();
        self.update(slots, slot, &mut pages)
    }

    /// Uploads the page tables of a slot and makes room for the gate sums at the ends of its pages.
    fn update(
        &self,
        slots: &mut CudaSlots,
        slot: usize,
        pages: &mut [&mut dyn PagedKeys],
    ) -> Result<()> {
        let (layers, shape) = (slots.weights.layers.len(), slots.weights.shape);
        let (heads, gated) = (shape.heads, slots.weights.is_gated());
        let count = pages.iter().map(|keys| keys.page_count()).max().unwrap_or(0);
        let old = &slots.slots[slot];
        if gated && count > old.room {
            let room = 2 * count;
            let ends = self.gpu.alloc::<f64>(layers * room * heads)?;
            for l in 0..layers {
                let at = |base: &Buffer<f64>, room: usize| {
                    base.address() + (8 * l * room * heads) as u64
                };
                let bytes = 8 * old.room * heads;
                // SAFETY: both buffers have room for `old.room` pages of every layer.
                unsafe { self.gpu.copy(at(&ends, room), at(&old.ends, old.room), bytes)? };
            }
            (slots.slots[slot].ends, slots.slots[slot].room) = (ends, room);
        }
        let own = &mut slots.slots[slot];
        let (mut entries, mut writes) = (Vec::with_capacity(layers), Writes::default());
        let mut tables = Vec::with_capacity(layers);
        let (mut capacity, mut most_held) = (slots.max_context, 0);
        for (l, keys) in pages.iter_mut().enumerate() {
            let table = self.page_table_by(&mut **keys, |at, rows| {
                writes.push(at, rows);
                Ok(())
            })?;
            let count = keys.page_count();
            let first_read = slots.weights.first_read_page(l, own.len);
            let held = |head: usize| table.holds(head, keys.dropped(head), count);
            let skipped = |head: usize| first_read.is_none_or(|first| keys.dropped(head) <= first);
            if !(0..shape.kv_heads).all(|head| held(head) && skipped(head)) {
                let detail = "pages are evicted that the slots' policy does not skip";
                return Err(Error::argument("slots", detail));
            }
            // The next token needs a page of every head.
            let is_held = (0..shape.kv_heads).all(|head| keys.dropped(head) <= own.len / PAGE);
            capacity = capacity.min(if is_held { count * PAGE } else { 0 });
            let held = |head: usize| count.saturating_sub(keys.dropped(head));
            most_held = (0..shape.kv_heads).map(held).fold(most_held, usize::max);
            let ends =
                if gated { own.ends.address() + (8 * l * own.room * heads) as u64 } else { 0 };
            entries.push(DecodeTable { pages: table.address().into(), ends: ends.into() });
            tables.push(table);
        }
        let each = size_of::<<DecodeTable as Param>::Device>();
        let at = slots.state.tables.address() + (each * slot * layers) as u64;
        writes.push(at, bytemuck::cast_slice(&rows("the slots", &entries)?));
        // SAFETY: page tables have room for their entries, and the slot for the tables of all layers.
        unsafe { self.scatter(&writes)? };
        (own.tables, own.capacity, own.most_held) = (tables, capacity, most_held);
        Ok(())
    }

    /// Logits `[V]` of a row of the last step.
    fn read_logits(&self, slots: &CudaSlots, row: usize) -> Result<Vec<f32>> {
        let vocab = slots.weights.vocab;
        if row >= slots.rows {
            let detail = format!("row {row} is out of range ({} rows)", slots.rows);
            return Err(Error::argument("logits", detail));
        }
        let mut logits = vec![0.0; vocab];
        let at = slots.work.logits.address() + (4 * row * vocab) as u64;
        // SAFETY: the logits have room for the rows of the largest bucket.
        unsafe { self.gpu.read(at, &mut logits)? };
        Ok(logits)
    }
}

impl CudaSlots {
    fn launch(&self, bucket: usize, attention: AttentionLaunches) -> Result<()> {
        self.steps.launch(bucket, attention, &self.weights, &self.work, &self.state)
    }
}

impl SlotDecodeOps for Cuda {
    fn open_slots(
        &self,
        weights: &DecodeWeights,
    ) -> fox_tensor::Result<Option<Box<dyn Any + Send>>> {
        fox_tensor::check_open_slots(self, weights)?;
        Ok(self.open(weights)?)
    }

    fn enter_slot(
        &self,
        state: &mut dyn Any,
        slot: usize,
        len: usize,
        past: &mut [LayerPast<'_>],
    ) -> fox_tensor::Result<()> {
        let slots: &mut CudaSlots = slot_state(state)?;
        fox_tensor::check_enter_slot(slots.weights.model(), slot, len, past)?;
        Ok(self.enter(slots, slot, len, past)?)
    }

    fn update_slot_pages(
        &self,
        state: &mut dyn Any,
        slot: usize,
        pages: &mut [&mut dyn PagedKeys],
    ) -> fox_tensor::Result<()> {
        let slots: &mut CudaSlots = slot_state(state)?;
        fox_tensor::check_update_slot_pages(slots.weights.model(), slot, pages)?;
        Ok(self.update(slots, slot, pages)?)
    }

    fn begin_slot_step(&self, state: &mut dyn Any, rows: &[DecodeRow]) -> fox_tensor::Result<()> {
        let slots: &mut CudaSlots = slot_state(state)?;
        let len = |slot: usize| slots.slots[slot].len;
        let before = (slots.rows, slots.unfinished.len());
        fox_tensor::check_slot_rows(slots.weights.model(), rows, len, before)?;
        Ok(self.timed("decode step", || self.begin(slots, rows))?)
    }

    fn finish_slot_step(&self, state: &mut dyn Any) -> fox_tensor::Result<FinishedStep> {
        Ok(self.finish(slot_state(state)?)?)
    }

    fn slot_logits(&self, state: &mut dyn Any, row: usize) -> fox_tensor::Result<Vec<f32>> {
        Ok(self.read_logits(slot_state(state)?, row)?)
    }

    fn batch_invariant_linear(&self, x: &Tensor, w: &Tensor) -> fox_tensor::Result<Option<Tensor>> {
        fox_tensor::check_linear_fwd(self, x, w, None)?;
        Ok(self.timed("batch-invariant linear", || self.multiply_rows(x, w))?)
    }
}
