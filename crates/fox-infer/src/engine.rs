//! The handle: how requests get to the engine's thread, and answers back.

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
/// When the last handle goes, the engine finishes the requests it has and ends, and whoever drops the handle waits for
/// that: afterwards nothing of it is left on the device.
#[derive(Clone, Debug)]
pub struct Engine(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    model: Arc<Model>,
    options: EngineOptions,
    limits: RequestLimits,
    shared: Arc<Shared>,
    /// Until it is waited for.
    thread: Option<JoinHandle<()>>,
}

/// What handles and the engine's thread share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Requests that wait, oldest first.
    pub queue: VecDeque<QueuedRequest>,
    /// Whether no more requests are taken.
    pub closed: bool,
    /// Whether the requests there are shall end where they are.
    pub interrupted: bool,
    /// Whether the thread has ended.
    pub ended: bool,
    /// As of the last step.
    pub stats: Stats,
}

/// A request on its way.
pub(crate) struct QueuedRequest {
    pub request: Request,
    pub sink: EventSink,
    pub cancelled: Arc<AtomicBool>,
    pub submitted: Instant,
    /// How often later requests went first, because there was memory for them and not for this one.
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

/// Where a request's events go.
pub(crate) type EventSink = Box<dyn FnMut(Event) + Send>;

impl std::fmt::Debug for QueuedRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuedRequest").field("request", &self.request).finish_non_exhaustive()
    }
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        // The state is a queue, flags and counters, valid after a panic of any holder.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something has changed.
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

    /// Asks for a continuation. The answer is read from the [`Completion`]; dropping it cancels the
    /// request and frees what it holds before the next step.
    ///
    /// # Errors
    /// Why the request is not accepted; nothing is queued then.
    pub fn submit(&self, request: Request) -> std::result::Result<Completion, Refusal> {
        let (sender, events) = channel();
        // A receiver that is gone has dropped its ticket, too.
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
        let job = QueuedRequest {
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
        state.queue.push_back(job);
        drop(state);
        handle.shared.notify();
        Ok(Ticket { cancelled, shared: handle.shared.clone() })
    }

    /// Whether a request would be accepted if there were a place.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, request: &Request) -> std::result::Result<(), Refusal> {
        self.0.limits.check(request)
    }

    /// What the engine is doing, as of its last step.
    pub fn stats(&self) -> Stats {
        let state = self.0.shared.lock();
        Stats { queued: state.queue.len() + state.stats.queued, ..state.stats.clone() }
    }

    /// Whether requests are taken.
    pub fn is_open(&self) -> bool {
        let state = self.0.shared.lock();
        !state.closed && !state.ended
    }

    /// The model, for looking inside. Its weights are those that the engine computes with.
    pub fn model(&self) -> &Model {
        &self.0.model
    }

    /// What the engine was started with.
    pub fn options(&self) -> &EngineOptions {
        &self.0.options
    }

    /// Takes no more requests; those it has are finished.
    pub fn close(&self) {
        self.0.shared.close();
    }

    /// Takes no more requests, and ends those it has where they are, with [`FinishReason::Interrupted`].
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
        // A process that ends while the thread still frees a GPU's memory crashes.
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() != std::thread::current().id() {
            // A panic of the thread has been told by itself.
            let _ = thread.join();
        }
    }
}

/// The right to an answer: dropping it cancels the request.
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

/// The answer to a request: an iterator over its events that waits for the next one.
///
/// It ends after [`Event::Finished`]; if it ends without, the engine's thread is gone.
#[derive(Debug)]
pub struct Completion {
    events: Receiver<Event>,
    ticket: Ticket,
}

impl Completion {
    /// The next event if there is one already.
    pub fn try_next(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// The events, without the right to cancel, and that right.
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
