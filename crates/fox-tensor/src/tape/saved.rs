//! What the backward needs of the forward: kept, or computed again.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Flow;
use crate::{Result, Tensor};

/// A value for the backward. Clones share what is computed again, so that it happens once; it is dropped
/// with the last of them.
#[derive(Clone)]
pub(crate) struct Saved(Kind);

#[derive(Clone)]
enum Kind {
    Kept(Tensor),
    Again(Arc<Again>),
}

struct Again {
    make: Box<dyn Fn() -> Result<Tensor> + Send + Sync>,
    /// Whether the backward of the op that made the value gives it once more, for those who can wait.
    can_wait: bool,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    value: Option<Tensor>,
    waiting: Vec<Waiting>,
}

/// Part of a backward that needs the value and nothing else.
pub(crate) type Waiting = Box<dyn FnOnce(&Tensor, &mut Flow<'_>) -> Result<()> + Send>;

impl Saved {
    pub(crate) fn kept(value: Tensor) -> Self {
        Saved(Kind::Kept(value))
    }

    /// Computed again by `make`. With `can_wait`, the backward of the op that made it must run what
    /// [`Saved::take_waiting`] gives.
    pub(crate) fn again(
        can_wait: bool,
        make: impl Fn() -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Saved(Kind::Again(Arc::new(Again {
            make: Box::new(make),
            can_wait,
            held: Mutex::default(),
        })))
    }

    pub(crate) fn get(&self) -> Result<Tensor> {
        let again = match &self.0 {
            Kind::Kept(value) => return Ok(value.clone()),
            Kind::Again(again) => again,
        };
        let mut held = again.held();
        if let Some(value) = &held.value {
            return Ok(value.clone());
        }
        let value = (again.make)()?;
        held.value = Some(value.clone());
        Ok(value)
    }

    /// Runs `work` with the value: now, or when the backward of the op that made it has it at hand. That
    /// one surely comes only if the value was given a gradient, `reached`.
    pub(crate) fn use_later(
        &self,
        reached: bool,
        flow: &mut Flow<'_>,
        work: impl FnOnce(&Tensor, &mut Flow<'_>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if let Kind::Again(again) = &self.0
            && reached
            && again.can_wait
        {
            let mut held = again.held();
            if held.value.is_none() {
                held.waiting.push(Box::new(work));
                return Ok(());
            }
        }
        work(&self.get()?, flow)
    }

    /// What waits for the value.
    pub(crate) fn take_waiting(self) -> Vec<Waiting> {
        match self.0 {
            Kind::Kept(_) => Vec::new(),
            Kind::Again(again) => std::mem::take(&mut again.held().waiting),
        }
    }
}

impl Again {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Kept(value) => write!(f, "{value:?}"),
            Kind::Again(_) => f.write_str("computed again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{Device, Gradients};

    #[test]
    fn clones_compute_once_and_share() {
        let runs = Arc::new(AtomicUsize::new(0));
        let counter = runs.clone();
        let saved = Saved::again(true, move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Device::naive().full([2], 3.0)
        });
        let mut flow = Flow { inner: Vec::new(), params: &mut Gradients::default() };
        let other = saved.clone();
        saved.use_later(true, &mut flow, |_, _| Ok(())).unwrap();
        let (a, b) = (saved.get().unwrap(), other.get().unwrap());
        assert_eq!(a.to_f32().unwrap(), [3.0, 3.0]);
        assert!(b.is_shared() && runs.load(Ordering::Relaxed) == 1);
        // The value is there now: nothing has to wait any more.
        saved.use_later(true, &mut flow, |_, _| Ok(())).unwrap();
        assert_eq!(other.take_waiting().len(), 1);
    }
}
