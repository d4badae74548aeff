//! The handle: requests to the engine's thread, events back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use fox_model::Model;

use crate::limits::RequestLimits;
use crate::scheduler::Scheduler;
use crate::{
    CacheUsage, EngineOptions, Error, Event, FinishReason, Finished, Refusal, Request, Result,
    Stats, Usage,
};

/// A handle to a running engine. Cheap to clone, and safe to share between threads.
///
/// Dropping the last handle waits until the engine has finished its requests: afterwards it holds no device memory.
#[derive(Clone, Debug)]
pub struct Engine(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    model: Arc<Model>,
    options: EngineOptions,
    limits: RequestLimits,
    shared: Arc<Shared>,
    /// Taken when it is joined.
    thread: Option<JoinHandle<()>>,
}

/// State that handles and the engine's thread share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Requests that were not admitted yet, oldest first.
    pub queue: VecDeque<QueuedRequest>,
    /// Whether new requests are refused.
    pub closed: bool,
    /// Whether running requests are to end at once.
    pub interrupted: bool,
    /// Whether the thread has ended.
    pub ended: bool,
    /// As of the last step.
    pub stats: Stats,
}

/// A request in the queue.
pub(crate) struct QueuedRequest {
    pub request: Request,
    pub sink: EventSink,
    pub cancelled: Arc<AtomicBool>,
    pub submitted: Instant,
    /// How often later, smaller requests were admitted first.
    pub passed: u32,
}

impl QueuedRequest {
    /// Reports the end of a request that did not run.
    pub fn end(&mut self, reason: FinishReason) {
        let usage = Usage { prompt_tokens: self.request.prompt.len(), ..Usage::default() };
        let cache = CacheUsage::default();
        (self.sink)(Event::Finished(Box::new(Finished { reason, usage, cache })));
    }
}

/// Receives the events of a request.
pub(crate) type EventSink = Box<dyn FnMut(Event) + Send>;

impl std::fmt::Debug for QueuedRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuedRequest").field("request", &self.request).finish_non_exhaustive()
    }
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        // The state is a queue, flags and counters: valid even if a thread panicked while it held the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a notification.
    pub fn wait<'a>(&self, guard: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    pub fn notify(&self) {
        self.changed.notify_all();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.notify();
    }
}

impl Engine {
    /// Starts a thread that owns the model and runs requests on its device.
    ///
    /// # Errors
    /// An option out of range, or weights in a format the device does not have.
    pub fn start(model: Model, options: EngineOptions) -> Result<Engine> {
        options.check()?;
        let shared = Arc::new(Shared::default());
        let scheduler = Scheduler::new(model, options.clone(), shared.clone())?;
        let (model, limits) = (scheduler.model().clone(), scheduler.limits().clone());
        let thread = std::thread::Builder::new()
            .name("fox-infer".into())
            .spawn(move || scheduler.run())
            .map_err(Error::Thread)?;
        Ok(Engine(Arc::new(Handle { model, options, limits, shared, thread: Some(thread) })))
    }

    /// Submits a request. Its events are read from the [`Completion`]; dropping that cancels the request and frees its
    /// memory before the next step.
    ///
    /// # Errors
    /// The request is refused, and nothing is queued.
    pub fn submit(&self, request: Request) -> std::result::Result<Completion, Refusal> {
        let (sender, events) = channel();
        // A dropped receiver has dropped its ticket, too.
        let ticket = self.submit_to(request, move |event| drop(sender.send(event)))?;
        Ok(Completion { events, ticket })
    }

    /// As [`Engine::submit`], with the events passed to `sink` on a thread of the engine, which it must
    /// not block. Dropping the [`Ticket`] cancels the request.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_to(
        &self,
        request: Request,
        sink: impl FnMut(Event) + Send + 'static,
    ) -> std::result::Result<Ticket, Refusal> {
        let handle = &*self.0;
        handle.limits.check(&request)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let queued = QueuedRequest {
            request,
            sink: Box::new(sink),
            cancelled: cancelled.clone(),
            submitted: Instant::now(),
            passed: 0,
        };
        let mut state = handle.shared.lock();
        if state.closed || state.ended {
            return Err(Refusal::Closed);
        }
        if state.queue.len() >= handle.options.max_queue {
            return Err(Refusal::QueueFull(handle.options.max_queue));
        }
        state.queue.push_back(queued);
        drop(state);
        handle.shared.notify();
        Ok(Ticket { cancelled, shared: handle.shared.clone() })
    }

    /// Validates a request without queueing it.
    ///
    /// # Errors
    /// The request would be refused whatever the load.
    pub fn check(&self, request: &Request) -> std::result::Result<(), Refusal> {
        self.0.limits.check(request)
    }

    /// Statistics as of the last step.
    pub fn stats(&self) -> Stats {
        let state = self.0.shared.lock();
        Stats { queued: state.queue.len() + state.stats.queued, ..state.stats.clone() }
    }

    /// Whether requests are accepted.
    pub fn is_open(&self) -> bool {
        let state = self.0.shared.lock();
        !state.closed && !state.ended
    }

    /// The model, with the weights that the engine computes with.
    pub fn model(&self) -> &Model {
        &self.0.model
    }

    /// The options that the engine was started with.
    pub fn options(&self) -> &EngineOptions {
        &self.0.options
    }

    /// Refuses new requests and finishes those it has.
    pub fn close(&self) {
        self.0.shared.close();
    }

    /// Refuses new requests and ends those it has at once, with [`FinishReason::Interrupted`].
    pub fn interrupt(&self) {
        self.0.shared.lock().interrupted = true;
        self.close();
    }

    /// Closes, and waits until the last request has ended.
    pub fn drain(&self) {
        self.close();
        let mut state = self.0.shared.lock();
        while !state.ended {
            state = self.0.shared.wait(state);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
        // A process that exits while the thread still frees GPU memory crashes.
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() != std::thread::current().id() {
            // A panic has printed its message already.
            let _ = thread.join();
        }
    }
}

/// A handle to a submitted request: dropping it cancels the request.
#[derive(Debug)]
pub struct Ticket {
    cancelled: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.shared.notify();
    }
}

/// A blocking iterator over the events of a request.
///
/// It ends after [`Event::Finished`]; if it ends without, the engine's thread has ended.
#[derive(Debug)]
pub struct Completion {
    events: Receiver<Event>,
    ticket: Ticket,
}

impl Completion {
    /// The next event, without waiting.
    pub fn try_next(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// The receiver of events, and the ticket that cancels the request.
    pub fn split(self) -> (Receiver<Event>, Ticket) {
        (self.events, self.ticket)
    }
}

impl Iterator for Completion {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.events.recv().ok()
    }
}
