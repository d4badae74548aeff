//! Launches that are recorded once and started together.

use cudarc::driver::{result, sys};

use crate::{Error, Gpu, Result};

/// Recorded launches.
pub(super) struct Graph(sys::CUgraphExec);

// SAFETY: a graph may be launched and destroyed from any thread that has made the context current.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `launch` asks for; nothing runs. Nobody else may use the GPU's stream meanwhile, and all kernels
    /// must have run before.
    pub(super) fn record(gpu: &Gpu, launch: impl FnOnce() -> Result<()>) -> Result<Self> {
        gpu.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the GPU, and every recording is ended below.
        unsafe { result::stream::begin_capture(gpu.stream(), mode) }
            .map_err(|e| Error::driver("cuStreamBeginCapture", e))?;
        let launched = launch();
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(gpu.stream()) };
        launched?;
        let graph = graph.map_err(|e| Error::driver("cuStreamEndCapture", e))?;
        // SAFETY: the graph was just made, and is not needed any more when it can be launched.
        let executable = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            made
        };
        executable.map(Graph).map_err(|e| Error::driver("cuGraphInstantiate", e))
    }

    /// Starts all of it.
    ///
    /// # Safety
    /// Every buffer that the launches name must still be there.
    pub(super) unsafe fn launch(&self, gpu: &Gpu) -> Result<()> {
        gpu.bind()?;
        // SAFETY: the caller's promise.
        unsafe { result::graph::launch(self.0, gpu.stream()) }
            .map_err(|e| Error::driver("cuGraphLaunch", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `record`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
