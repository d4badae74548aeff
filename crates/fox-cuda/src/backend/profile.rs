//! Time per op on the GPU, by events in its stream.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use fox_tensor::OpTime;

use super::Cuda;
use crate::Result;
use crate::timer::Event;

/// Collects pairs of events while it is on.
#[derive(Default)]
pub(crate) struct Profiler {
    on: AtomicBool,
    spans: Mutex<Vec<(&'static str, Event, Event)>>,
}

impl Cuda {
    /// Runs `work`, and notes when it begins and ends on the GPU if anybody asked.
    pub(crate) fn timed<T>(&self, op: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.profiler.on.load(Ordering::Relaxed) {
            return work();
        }
        let begin = Event::record(&self.gpu)?;
        let value = work()?;
        let end = Event::record(&self.gpu)?;
        let mut spans = self.profiler.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.push((op, begin, end));
        Ok(value)
    }

    pub(crate) fn set_profiling(&self, on: bool) {
        self.profiler.on.store(on, Ordering::Relaxed);
    }

    /// Sums by op of what was noted since the last call, the longest first.
    pub(crate) fn op_times(&self) -> Result<Vec<OpTime>> {
        self.gpu.synchronize()?;
        let mut spans = self.profiler.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sums: BTreeMap<&'static str, OpTime> = BTreeMap::new();
        for (op, begin, end) in spans.drain(..) {
            let sum = sums.entry(op).or_insert(OpTime { op, calls: 0, seconds: 0.0 });
            sum.calls += 1;
            sum.seconds += f64::from(begin.milliseconds_to(&end)?) / 1e3;
        }
        let mut times: Vec<OpTime> = sums.into_values().collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok(times)
    }
}
