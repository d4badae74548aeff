//! Time per op on the GPU, by events in its streams.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use fox_tensor::{OpTime, Span};

use super::Cuda;
use crate::Result;
use crate::timer::Event;

/// Collects pairs of events while it is on.
#[derive(Default)]
pub(crate) struct Profiler {
    on: AtomicBool,
    noted: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    /// Where the times begin.
    origin: Option<Event>,
    /// Queue, op, begin and end.
    spans: Vec<(&'static str, &'static str, Event, Event)>,
}

/// Records the time of an op on the GPU until it is dropped.
pub(crate) struct OpSpan<'a>(Option<(&'a Cuda, &'static str, Event)>);

impl Drop for OpSpan<'_> {
    fn drop(&mut self) {
        let Some((cuda, op, begin)) = self.0.take() else { return };
        // Profiling is best effort: a failed event drops this span only.
        if let Ok(end) = Event::record_on(cuda.gpu.stream()) {
            cuda.noted().spans.push(("compute", op, begin, end));
        }
    }
}

impl Cuda {
    /// Starts the span of an op on the compute stream; a no-op unless profiling is on.
    pub(crate) fn span(&self, op: &'static str) -> Result<OpSpan<'_>> {
        if !self.profiler.on.load(Ordering::Relaxed) {
            return Ok(OpSpan(None));
        }
        // The first op of a thread may be the one that is timed.
        self.gpu.bind()?;
        Ok(OpSpan(Some((self, op, Event::record_on(self.gpu.stream())?))))
    }

    /// Runs `work` and, while profiling is on, records when it starts and ends on the GPU.
    pub(crate) fn timed<T>(&self, op: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.timed_on(self.gpu.stream(), op, work)
    }

    /// [`Cuda::timed`] for work on another CUDA stream.
    pub(crate) fn timed_on<T>(
        &self,
        stream: sys::CUstream,
        op: &'static str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !self.profiler.on.load(Ordering::Relaxed) {
            return work();
        }
        // The first op of a thread may be the one that is timed.
        self.gpu.bind()?;
        let queue = if stream == self.gpu.stream() { "compute" } else { "exchange" };
        let begin = Event::record_on(stream)?;
        let value = work()?;
        let end = Event::record_on(stream)?;
        self.noted().spans.push((queue, op, begin, end));
        Ok(value)
    }

    pub(crate) fn set_profiling(&self, on: bool) -> Result<()> {
        if on {
            self.gpu.bind()?;
            self.noted().origin = Some(Event::record(&self.gpu)?);
        }
        self.profiler.on.store(on, Ordering::Relaxed);
        Ok(())
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.profiler.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was noted since the last call, when it ran.
    pub(crate) fn timeline(&self) -> Result<Vec<Span>> {
        self.gpu.synchronize()?;
        let Noted { origin, spans } = &mut *self.noted();
        let Some(origin) = origin else { return Ok(Vec::new()) };
        let mut timeline = Vec::with_capacity(spans.len());
        for (queue, op, begin, end) in spans.drain(..) {
            let seconds = |event: &Event| Ok(f64::from(origin.milliseconds_to(event)?) / 1e3);
            timeline.push(Span { queue, op, begin: seconds(&begin)?, end: seconds(&end)? });
        }
        Ok(timeline)
    }

    /// Sums by op of what was noted since the last call, the longest first.
    pub(crate) fn op_times(&self) -> Result<Vec<OpTime>> {
        self.gpu.synchronize()?;
        let mut sums: BTreeMap<&'static str, OpTime> = BTreeMap::new();
        for (_, op, begin, end) in self.noted().spans.drain(..) {
            let sum = sums.entry(op).or_insert(OpTime { op, calls: 0, seconds: 0.0 });
            sum.calls += 1;
            sum.seconds += f64::from(begin.milliseconds_to(&end)?) / 1e3;
        }
        let mut times: Vec<OpTime> = sums.into_values().collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok(times)
    }
}
