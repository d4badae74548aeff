//! Decode steps of many sequences whose state stays on the device.
//!
//! A step has one set of launches for all its rows, nine for each layer. Everything is compiled, and the launches of
//! every bucket of rows and of context lengths are recorded as a graph, when the slots are opened.

mod graph;
mod kernels;
mod model;
mod params;
mod batch_invariant_linear;
mod step;
mod unpack;

use std::any::Any;

use fox_tensor::{
    Choice, DType, Device, PAGE, PagedKeys, DecodeWeights, SlotDecodeOps, LayerPast, DecodeRow, Tensor,
    slot_state,
};

use crate::backend::Cuda;
use crate::backend::storage::memory;
use crate::ops::paged::Writes;
use crate::params::{Param, int, rows};
use crate::{Buffer, Error, Result};
use graph::Graph;
pub(super) use kernels::variants;
use kernels::{BUCKETS, MAX_ROWS, bucket_of, runs};
use model::DeviceWeights;
use params::{TokenDraw, DecodeTable, DecodeToken};
use step::{Slots, Steps, Work};

/// Pages that the sums of a new slot have room for, at least.
const FEWEST_PAGES: usize = 64;

/// The slots of a model.
struct CudaSlots {
    // Graphs go first: they name the buffers.
    /// By bucket and by the logarithm of the runs; empty when launches go one by one.
    graphs: Vec<Vec<Graph>>,
    steps: Steps,
    weights: DeviceWeights,
    work: Work,
    slots: Slots,
    /// Sums at the ends of pages, by slot.
    ends: Vec<Ends>,
    device: Device,
    max_context: usize,
    /// Rows of the step under way.
    rows: usize,
}

/// Sums of the log gates at the ends of full pages `[layers][room][heads]`.
struct Ends {
    sums: Buffer<f64>,
    /// Pages.
    room: usize,
}

/// How launches get to the GPU.
#[derive(Clone, Copy)]
struct Launching {
    recorded: bool,
    overlapping: bool,
}

impl Launching {
    /// Recorded and overlapping, unless the environment's `FOX_GRAPHS` says otherwise: `0` runs them one by one, to find
    /// out which of them fails, and `serial` records them without overlap.
    fn from_environment() -> Self {
        let value = std::env::var("FOX_GRAPHS").unwrap_or_default();
        Launching { recorded: value != "0", overlapping: value != "0" && value != "serial" }
    }
}

impl Cuda {
    fn open(&self, model: &DecodeWeights<'_>) -> Result<Option<Box<dyn Any + Send>>> {
        if !self.supports_slots(model) {
            return Ok(None);
        }
        let weights = self.device_weights(model)?;
        let (slots, layers, shape) = (model.slots, model.blocks.len(), &model.shape);
        let (buckets, launching) = (bucket_of(slots) + 1, Launching::from_environment());
        let raw = 2 * shape.kv_heads * shape.head_dim;
        let mut streams = CudaSlots {
            graphs: Vec::new(),
            steps: Steps::new(&self.gpu, buckets, &weights, launching.overlapping)?,
            work: Work::new(&self.gpu, BUCKETS[buckets - 1], &weights)?,
            slots: Slots {
                tables: self.gpu.zeros(slots * layers)?,
                now: self.gpu.zeros(slots * layers * shape.heads)?,
                last: self.gpu.zeros(slots * layers * raw)?,
            },
            ends: (0..slots)
                .map(|_| Ok(Ends { sums: self.gpu.alloc(1)?, room: 0 }))
                .collect::<Result<_>>()?,
            device: model.embeddings.device().clone(),
            max_context: model.max_context,
            weights,
            rows: 0,
        };
        // One step of each bucket without a sequence loads all kernels, which must not happen while they are recorded.
        for bucket in 0..buckets {
            self.upload_rows(&mut streams, &[], bucket)?;
            streams.launch(bucket, 1)?;
        }
        self.gpu.synchronize()?;
        if launching.recorded {
            let most = runs(model.max_context.saturating_sub(1)).next_power_of_two().ilog2();
            for bucket in 0..buckets {
                let record =
                    |log: u32| Graph::record(&self.gpu, || streams.launch(bucket, 1 << log));
                let graphs = (0..=most).map(record).collect::<Result<Vec<_>>>()?;
                streams.graphs.push(graphs);
            }
        }
        Ok(Some(Box::new(streams)))
    }

    /// The rows of a step, filled up with rows of no slot.
    fn upload_rows(
        &self,
        streams: &mut CudaSlots,
        own: &[DecodeRow],
        bucket: usize,
    ) -> Result<()> {
        let idle = DecodeToken { slot: -1, token: 0, position: 0, unused: 0 };
        let mut all = vec![idle; BUCKETS[bucket]];
        for (row, own) in all.iter_mut().zip(own) {
            let slot = int("a step", "slot", own.slot)?;
            *row = DecodeToken { slot, token: own.token, position: own.position, unused: 0 };
        }
        let mut draws = vec![TokenDraw::default(); BUCKETS[bucket]];
        for (to, draw) in draws.iter_mut().zip(own.iter().map(|row| row.draw)) {
            *to = draw.map_or_else(TokenDraw::default, |draw| TokenDraw {
                uniform: draw.uniform.to_bits(),
                // A temperature that is next to nothing must not make the likeliest 0 times infinity.
                inverse_temperature: (1.0 / draw.temperature).min(f32::MAX),
                top_p: draw.top_p,
                min_p: draw.min_p,
                top_k: draw.top_k,
            });
        }
        // In one piece: each copy takes longer than its bytes.
        let mut input: Vec<u8> = bytemuck::cast_slice(&rows("a step", &all)?).to_vec();
        input.extend_from_slice(bytemuck::cast_slice(&rows("a step", &draws)?));
        // SAFETY: there is room for the rows of every bucket.
        unsafe { self.gpu.write(streams.work.input.address(), &input)? };
        streams.rows = own.len();
        Ok(())
    }

    fn begin(&self, streams: &mut CudaSlots, own: &[DecodeRow]) -> Result<()> {
        let (vocab, most) = (streams.weights.vocab, streams.max_context);
        let bad = |row: &&DecodeRow| {
            usize::try_from(row.token).map_or(true, |id| id >= vocab) || row.position >= most
        };
        if let Some(row) = own.iter().find(bad) {
            let DecodeRow { slot, token, position, .. } = row;
            let detail = format!(
                "token {token} at position {position} of slot {slot}, with {vocab} tokens and {most} positions"
            );
            return Err(Error::argument("step", detail));
        }
        let bucket = bucket_of(own.len());
        let runs = own.iter().map(|row| runs(row.position)).max().unwrap_or(1).next_power_of_two();
        self.upload_rows(streams, own, bucket)?;
        match streams.graphs.get(bucket).and_then(|graphs| graphs.get(runs.ilog2() as usize)) {
            // SAFETY: the buffers belong to `streams`, and pages live as long as their sequences have slots.
            Some(graph) => unsafe { graph.launch(&self.gpu) },
            None => streams.launch(bucket, runs),
        }
    }

    fn finish(&self, streams: &mut CudaSlots) -> Result<Vec<Choice>> {
        let choices = self.gpu.download(&streams.work.choices)?;
        let (ids, scores) = choices.split_at(MAX_ROWS);
        let choice = |(id, score): (&u32, &u32)| {
            let id = Some(id.cast_signed()).filter(|id| *id >= 0);
            Choice { id, logprob: f32::from_bits(*score) }
        };
        Ok(ids.iter().zip(scores).take(streams.rows).map(choice).collect())
    }

    fn enter(
        &self,
        streams: &mut CudaSlots,
        slot: usize,
        len: usize,
        past: &mut [LayerPast<'_>],
    ) -> Result<()> {
        let layers = streams.weights.layers.len();
        let shape = &streams.weights.shape;
        let (heads, group) = (shape.heads, shape.heads / shape.kv_heads);
        let raw_width = shape.kv_heads * shape.head_dim;
        let gated = streams.weights.start[5] >= 0;
        let fits = |past: &LayerPast<'_>| past.sums.len() == if gated { heads } else { 0 };
        if past.len() != layers || !past.iter().all(fits) {
            return Err(Error::argument("enter", "the sequence's state is not one of this model"));
        }
        let full = len / PAGE;
        let room = (2 * full).max(FEWEST_PAGES);
        // What was dropped has decayed to nothing.
        let mut ends = vec![f64::INFINITY; if gated { layers * room * heads } else { 1 }];
        for (l, past) in past.iter().enumerate().filter(|_| gated) {
            for n in 0..full {
                let own = &mut ends[(l * room + n) * heads..][..heads];
                for (h, end) in own.iter_mut().enumerate() {
                    if n >= past.keys.dropped(h / group) {
                        *end = past.keys.ends()[n * heads + h];
                    }
                }
            }
        }
        streams.ends[slot] = Ends { sums: self.gpu.upload(&ends)?, room };
        if gated {
            let now: Vec<f64> = past.iter().flat_map(|past| past.sums).copied().collect();
            let at = streams.slots.now.address() + (8 * slot * layers * heads) as u64;
            // SAFETY: the slot has room for the sums of all layers.
            unsafe { self.gpu.write(at, &now)? };
        }
        for (l, past) in past.iter().enumerate() {
            for (n, last) in [past.last_k, past.last_v].into_iter().enumerate() {
                let Some(last) = last else { continue };
                if last.dtype() != DType::Bf16 || last.len() != raw_width {
                    return Err(Error::argument("enter", format!("a raw row of {last:?}")));
                }
                let index = ((slot * layers + l) * 2 + n) * raw_width;
                let to = streams.slots.last.address() + (2 * index) as u64;
                // SAFETY: the slot has room for the raw rows of all layers, and the row has this size.
                unsafe { self.gpu.copy(to, memory(last)?.data.address(), 2 * raw_width)? };
            }
        }
        let mut keys: Vec<&mut dyn PagedKeys> =
            past.iter_mut().map(|past| &mut *past.keys as &mut dyn PagedKeys).collect();
        self.extend(streams, slot, &mut keys)
    }

    /// Where the pages of a slot lie, and room for the sums at their ends.
    fn extend(
        &self,
        streams: &mut CudaSlots,
        slot: usize,
        keys: &mut [&mut dyn PagedKeys],
    ) -> Result<()> {
        let (layers, heads) = (streams.weights.layers.len(), streams.weights.shape.heads);
        let gated = streams.weights.start[5] >= 0;
        let pages = keys.iter().map(|keys| keys.page_count()).max().unwrap_or(0);
        let old = &streams.ends[slot];
        if gated && pages > old.room {
            let room = 2 * pages;
            let sums = self.gpu.alloc::<f64>(layers * room * heads)?;
            for l in 0..layers {
                let at = |base: &Buffer<f64>, room: usize| {
                    base.address() + (8 * l * room * heads) as u64
                };
                let bytes = 8 * old.room * heads;
                // SAFETY: both have room for that many sums of every layer.
                unsafe { self.gpu.copy(at(&sums, room), at(&old.sums, old.room), bytes)? };
            }
            streams.ends[slot] = Ends { sums, room };
        }
        let Ends { sums, room } = &streams.ends[slot];
        let (mut tables, mut writes) = (Vec::with_capacity(layers), Writes::default());
        for (l, keys) in keys.iter_mut().enumerate() {
            let pages = self.page_table_by(&mut **keys, &streams.device, |at, rows| {
                writes.push(at, rows);
                Ok(())
            })?;
            let ends = if gated { sums.address() + (8 * l * room * heads) as u64 } else { 0 };
            tables.push(DecodeTable { pages: pages.into(), ends: ends.into() });
        }
        let each = size_of::<<DecodeTable as Param>::Device>();
        let at = streams.slots.tables.address() + (each * slot * layers) as u64;
        writes.push(at, bytemuck::cast_slice(&rows("the slots", &tables)?));
        // SAFETY: tables of pages have room for their rows, and the slot for the tables of all layers.
        unsafe { self.scatter(&writes) }
    }

    /// Logits `[V]` of a row of the last step.
    fn read_logits(&self, streams: &CudaSlots, row: usize) -> Result<Vec<f32>> {
        let vocab = streams.weights.vocab;
        if row >= streams.rows {
            return Err(Error::argument("logits", format!("row {row} of {}", streams.rows)));
        }
        let mut logits = vec![0.0; vocab];
        let at = streams.work.logits.address() + (4 * row * vocab) as u64;
        // SAFETY: the last step had that many rows.
        unsafe { self.gpu.read(at, &mut logits)? };
        Ok(logits)
    }

    fn read_sums(&self, streams: &CudaSlots, slot: usize) -> Result<Vec<f64>> {
        if streams.weights.start[5] < 0 {
            return Ok(Vec::new());
        }
        let each = streams.weights.layers.len() * streams.weights.shape.heads;
        let mut sums = vec![0.0; each];
        // SAFETY: the slot has the sums of all layers.
        unsafe {
            self.gpu.read(streams.slots.now.address() + (8 * slot * each) as u64, &mut sums)?
        };
        Ok(sums)
    }
}

impl CudaSlots {
    fn launch(&self, bucket: usize, runs: usize) -> Result<()> {
        self.steps.launch(bucket, runs, &self.weights, &self.work, &self.slots)
    }
}

impl SlotDecodeOps for Cuda {
    fn open_slots(
        &self,
        model: &DecodeWeights<'_>,
    ) -> fox_tensor::Result<Option<Box<dyn Any + Send>>> {
        Ok(self.open(model)?)
    }

    fn enter_slot(
        &self,
        state: &mut dyn Any,
        slot: usize,
        len: usize,
        past: &mut [LayerPast<'_>],
    ) -> fox_tensor::Result<()> {
        Ok(self.enter(slot_state(state)?, slot, len, past)?)
    }

    fn update_slot_pages(
        &self,
        state: &mut dyn Any,
        slot: usize,
        keys: &mut [&mut dyn PagedKeys],
    ) -> fox_tensor::Result<()> {
        Ok(self.extend(slot_state(state)?, slot, keys)?)
    }

    fn begin_slot_step(&self, state: &mut dyn Any, rows: &[DecodeRow]) -> fox_tensor::Result<()> {
        let state = slot_state(state)?;
        Ok(self.timed("stream step", || self.begin(state, rows))?)
    }

    fn finish_slot_step(&self, state: &mut dyn Any) -> fox_tensor::Result<Vec<Choice>> {
        Ok(self.finish(slot_state(state)?)?)
    }

    fn slot_logits(&self, state: &mut dyn Any, row: usize) -> fox_tensor::Result<Vec<f32>> {
        Ok(self.read_logits(slot_state(state)?, row)?)
    }

    fn slot_gate_sums(&self, state: &mut dyn Any, slot: usize) -> fox_tensor::Result<Vec<f64>> {
        Ok(self.read_sums(slot_state(state)?, slot)?)
    }

    fn batch_invariant_linear(&self, x: &Tensor, w: &Tensor) -> fox_tensor::Result<Option<Tensor>> {
        Ok(self.timed("rows product", || self.multiply_rows(x, w))?)
    }
}
