//! CUDA events: ordering of streams and elapsed time.

use cudarc::driver::{result, sys};

use crate::{Error, Gpu, Result};

/// A recorded position in a CUDA stream.
pub(crate) struct Event(sys::CUevent);

// SAFETY: an event may be asked from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn record(gpu: &Gpu) -> Result<Self> {
        Event::record_on(gpu.stream())
    }

    /// Records an event in a stream of the current GPU.
    pub(crate) fn record_on(stream: sys::CUstream) -> Result<Self> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| Error::driver("cuEventCreate", e))?;
        let event = Event(event);
        event.rerecord(stream)?;
        Ok(event)
    }

    /// Records the event again, at the stream's current position.
    pub(crate) fn rerecord(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: event and stream are live.
        unsafe { result::event::record(self.0, stream) }
            .map_err(|e| Error::driver("cuEventRecord", e))
    }

    /// Makes a stream wait for the event.
    pub(crate) fn make_wait(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are live.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
            .map_err(|e| Error::driver("cuStreamWaitEvent", e))
    }

    /// Waits on the host until the stream has reached the event.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        unsafe { result::event::synchronize(self.0) }
            .map_err(|e| Error::driver("cuEventSynchronize", e))
    }

    pub(crate) fn milliseconds_to(&self, end: &Event) -> Result<f32> {
        // SAFETY: the events are live and were recorded on streams of one GPU.
        unsafe { result::event::elapsed(self.0, end.0) }
            .map_err(|e| Error::driver("cuEventElapsedTime", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `record`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
