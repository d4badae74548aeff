//! Times of work on the GPU, by events in its stream.

use cudarc::driver::{result, sys};

use crate::{Error, Gpu, Result};

/// A point in the stream.
pub(crate) struct Event(sys::CUevent);

// SAFETY: an event may be asked from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn record(gpu: &Gpu) -> Result<Self> {
        Event::record_on(gpu.stream())
    }

    /// The same in another stream of the current GPU.
    pub(crate) fn record_on(stream: sys::CUstream) -> Result<Self> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| Error::driver("cuEventCreate", e))?;
        let event = Event(event);
        event.again(stream)?;
        Ok(event)
    }

    /// Moves it to where the stream is now.
    pub(crate) fn again(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: event and stream are live.
        unsafe { result::event::record(self.0, stream) }
            .map_err(|e| Error::driver("cuEventRecord", e))
    }

    /// Lets a stream wait until this point is reached.
    pub(crate) fn hold_up(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are live.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
            .map_err(|e| Error::driver("cuStreamWaitEvent", e))
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
