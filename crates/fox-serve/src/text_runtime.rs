//! Worker threads for text: detokenizing and serializing answers, apart from the threads that read and write sockets.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::error::{ApiError, ApiResult};
use crate::{Error, Result};

const WORKERS: usize = 2;

/// The worker threads. They end in the background when this is dropped.
pub(crate) struct TextRuntime(Option<Runtime>);

impl TextRuntime {
    pub fn start() -> Result<TextRuntime> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("fox-text")
            .enable_time()
            .build()
            .map_err(Error::Runtime)?;
        Ok(TextRuntime(Some(runtime)))
    }

    /// Runs a future on the worker threads.
    ///
    /// # Errors
    /// The server is shutting down.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> ApiResult<Worker<T>> {
        match &self.0 {
            Some(runtime) => Ok(Worker(runtime.spawn(work))),
            None => Err(fox_infer::Refusal::Closed.into()),
        }
    }
}

impl Drop for TextRuntime {
    fn drop(&mut self) {
        // Does not wait: the last owner may be a task of a runtime.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Work of another thread. Dropping it cancels the work; a panic becomes an error with status 500.
pub(crate) struct Worker<T>(JoinHandle<T>);

impl<T: Send + 'static> Worker<T> {
    /// Runs a future on the current runtime.
    pub fn spawn(work: impl Future<Output = T> + Send + 'static) -> Worker<T> {
        Worker(tokio::spawn(work))
    }

    /// Runs a function on a thread that may block. It cannot be cancelled.
    pub fn blocking(work: impl FnOnce() -> T + Send + 'static) -> Worker<T> {
        Worker(tokio::task::spawn_blocking(work))
    }
}

impl<T> Future for Worker<T> {
    type Output = ApiResult<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ApiResult<T>> {
        Pin::new(&mut self.0).poll(cx).map(|result| {
            result.map_err(|error| match error.is_panic() {
                true => ApiError::internal("the server failed on this request"),
                false => fox_infer::Refusal::Closed.into(),
            })
        })
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_is_an_internal_error_and_drop_cancels() {
        let text = TextRuntime::start().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let panics = text.spawn(async { panic!("planted") }).unwrap();
        let result: ApiResult<()> = runtime.block_on(panics);
        assert_eq!(result.unwrap_err().status, hyper::StatusCode::INTERNAL_SERVER_ERROR);
        let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
        let endless = text.spawn(async move {
            std::future::pending::<()>().await;
            drop(sender);
        });
        drop(endless);
        assert!(runtime.block_on(receiver).is_err(), "the task and what it owned are gone");
    }
}
