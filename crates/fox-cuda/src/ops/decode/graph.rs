//! CUDA graphs: launches that are captured once and started together.

use cudarc::driver::{result, sys};

use crate::{Error, Gpu, Result};

/// An instantiated CUDA graph.
pub(super) struct Graph(sys::CUgraphExec);

// SAFETY: a graph may be launched and destroyed from any thread that has made the context current.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the launches of `launch` without running them. No other thread may use the GPU's stream meanwhile, and
    /// every kernel must have been launched before, because loading it is not allowed during capture.
    pub(super) fn capture(gpu: &Gpu, launch: impl FnOnce() -> Result<()>) -> Result<Self> {
        gpu.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the GPU, and the capture is ended below.
        unsafe { result::stream::begin_capture(gpu.stream(), mode) }
            .map_err(|e| Error::driver("cuStreamBeginCapture", e))?;
        let launched = launch();
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(gpu.stream()) };
        launched?;
        let graph = graph.map_err(|e| Error::driver("cuStreamEndCapture", e))?;
        // SAFETY: the graph was just captured, and its executable does not need it any more.
        let executable = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            made
        };
        executable.map(Graph).map_err(|e| Error::driver("cuGraphInstantiate", e))
    }

    /// Starts all launches.
    ///
    /// # Safety
    /// Every buffer that the launches refer to must be alive.
    pub(super) unsafe fn launch(&self, gpu: &Gpu) -> Result<()> {
        gpu.bind()?;
        // SAFETY: the caller's promise.
        unsafe { result::graph::launch(self.0, gpu.stream()) }
            .map_err(|e| Error::driver("cuGraphLaunch", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated in `capture`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
