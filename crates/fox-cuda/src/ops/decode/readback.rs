//! Asynchronous copies of a decode step's results to the host, while the next step runs.

use cudarc::driver::result;
use fox_tensor::{DecodeRow, FinishedStep, PAGE, SampledToken};

use super::kernels::MAX_ROWS;
use crate::copies::PageLocked;
use crate::timer::Event;
use crate::{Buffer, Error, Gpu, Result};

/// Bytes of ids and log-probabilities.
const SAMPLED_BYTES: usize = 2 * MAX_ROWS * size_of::<u32>();

/// Rows that end a page in one step from which on the gate sums of all slots are copied at once: a copy of less than
/// 10 KB takes as long as one of 100 KB.
const MANY_ENDS: usize = 8;

/// Room for the results of one step, used again for later ones.
pub(super) struct Readback {
    /// Ids, log-probabilities, and the sums of the log gates `[slots][layers][heads]`.
    memory: PageLocked,
    done: Event,
    slots: usize,
    /// Gate sums of a slot, `layers * heads`.
    sums: usize,
    rows: usize,
    /// Rows that end a page, and their slots.
    ends: Vec<(usize, usize)>,
    gated: bool,
}

impl Readback {
    pub(super) fn new(gpu: &Gpu, slots: usize, sums: usize) -> Result<Self> {
        gpu.bind()?;
        Ok(Readback {
            memory: PageLocked::new(SAMPLED_BYTES + size_of::<f64>() * slots * sums)?,
            done: Event::record(gpu)?,
            slots,
            sums,
            rows: 0,
            ends: Vec::new(),
            gated: false,
        })
    }

    /// Copies the results of the step that was launched last: what it `sampled`, ids and bits of log-probabilities
    /// `[2, MAX_ROWS]`, and `gate_sums: [slots][layers][heads]` of the rows that end a page.
    pub(super) fn begin(
        &mut self,
        gpu: &Gpu,
        rows: &[DecodeRow],
        sampled: &Buffer<u32>,
        gate_sums: Option<&Buffer<f64>>,
    ) -> Result<()> {
        let ends = rows.iter().enumerate().filter(|(_, row)| (row.position + 1) % PAGE == 0);
        self.ends = ends.map(|(n, row)| (n, row.slot)).collect();
        (self.rows, self.gated) = (rows.len(), gate_sums.is_some());
        let each = size_of::<f64>() * self.sums;
        let mut copies = vec![(0, sampled.address(), SAMPLED_BYTES)];
        match gate_sums {
            Some(sums) if self.ends.len() > MANY_ENDS => {
                copies.push((SAMPLED_BYTES, sums.address(), each * self.slots));
            }
            Some(sums) => copies.extend(self.ends.iter().map(|(_, slot)| {
                (SAMPLED_BYTES + each * slot, sums.address() + (each * slot) as u64, each)
            })),
            None => {}
        }
        let memory = self.memory.bytes();
        for (to, from, bytes) in copies {
            // SAFETY: both buffers have these sizes. `self` owns the memory and reads it in `finish` alone, after waiting.
            unsafe { result::memcpy_dtoh_async(&mut memory[to..][..bytes], from, gpu.stream()) }
                .map_err(|e| Error::driver("cuMemcpyDtoHAsync", e))?;
        }
        self.done.rerecord(gpu.stream())
    }

    /// Waits for the copies.
    pub(super) fn finish(&mut self, gpu: &Gpu) -> Result<FinishedStep> {
        gpu.bind()?;
        self.done.wait()?;
        let (sampled, sums) = self.memory.bytes().split_at(SAMPLED_BYTES);
        let (ids, logprobs) = sampled.split_at(SAMPLED_BYTES / 2);
        let (ids, logprobs) =
            (bytemuck::cast_slice::<u8, i32>(ids), bytemuck::cast_slice(logprobs));
        let token = |(id, logprob): (&i32, &f32)| SampledToken {
            id: Some(*id).filter(|id| *id >= 0),
            logprob: *logprob,
        };
        let sums: &[f64] = bytemuck::cast_slice(sums);
        let sums_of = |slot: usize| match self.gated {
            true => sums[slot * self.sums..][..self.sums].to_vec(),
            false => Vec::new(),
        };
        Ok(FinishedStep {
            tokens: ids.iter().zip(logprobs).take(self.rows).map(token).collect(),
            page_ends: self.ends.iter().map(|(row, slot)| (*row, sums_of(*slot))).collect(),
        })
    }
}

impl Drop for Readback {
    /// The device must not write to memory that is freed.
    fn drop(&mut self) {
        let _ = self.done.wait();
    }
}
