//! Values that the backward pass needs: saved, or recomputed.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Flow;
use crate::{Result, Tensor};

/// A value for the backward pass. Clones share one recomputation; its result is dropped with the last of them.
#[derive(Clone)]
pub(crate) struct Saved(Kind);

#[derive(Clone)]
enum Kind {
    Stored(Tensor),
    Recomputed(Arc<Recompute>),
}

struct Recompute {
    make: Box<dyn Fn() -> Result<Tensor> + Send + Sync>,
    /// Whether the backward pass of the producing op returns the value again, for deferred work.
    can_wait: bool,
    state: Mutex<RecomputeState>,
}

#[derive(Default)]
struct RecomputeState {
    value: Option<Tensor>,
    deferred: Vec<Deferred>,
}

/// Work of a backward pass that needs this value only.
pub(crate) type Deferred = Box<dyn FnOnce(&Tensor, &mut Flow<'_>) -> Result<()> + Send>;

impl Saved {
    pub(crate) fn stored(value: Tensor) -> Self {
        Saved(Kind::Stored(value))
    }

    /// Recomputed by `make`. With `can_wait`, the backward pass of the producing op must run the work of
    /// [`Saved::take_deferred`].
    pub(crate) fn recomputed(
        can_wait: bool,
        make: impl Fn() -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Saved(Kind::Recomputed(Arc::new(Recompute {
            make: Box::new(make),
            can_wait,
            state: Mutex::default(),
        })))
    }

    pub(crate) fn get(&self) -> Result<Tensor> {
        let again = match &self.0 {
            Kind::Stored(value) => return Ok(value.clone()),
            Kind::Recomputed(again) => again,
        };
        let mut state = again.state();
        if let Some(value) = &state.value {
            return Ok(value.clone());
        }
        let value = (again.make)()?;
        state.value = Some(value.clone());
        Ok(value)
    }

    /// Runs `work` on the value: now, or in the backward pass of the producing op. That pass is certain to run only if
    /// the value got a gradient, `reached`.
    pub(crate) fn use_later(
        &self,
        reached: bool,
        flow: &mut Flow<'_>,
        work: impl FnOnce(&Tensor, &mut Flow<'_>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if let Kind::Recomputed(again) = &self.0
            && reached
            && again.can_wait
        {
            let mut state = again.state();
            if state.value.is_none() {
                state.deferred.push(Box::new(work));
                return Ok(());
            }
        }
        work(&self.get()?, flow)
    }

    /// The work that was deferred to the producing op.
    pub(crate) fn take_deferred(self) -> Vec<Deferred> {
        match self.0 {
            Kind::Stored(_) => Vec::new(),
            Kind::Recomputed(again) => std::mem::take(&mut again.state().deferred),
        }
    }
}

impl Recompute {
    fn state(&self) -> MutexGuard<'_, RecomputeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Stored(value) => write!(f, "{value:?}"),
            Kind::Recomputed(_) => f.write_str("recomputed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{Device, Gradients};

    #[test]
    fn clones_share_one_recomputation() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let saved = Saved::recomputed(true, move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Device::naive().full([2], 3.0)
        });
        let mut flow = Flow { inner: Vec::new(), params: &mut Gradients::default() };
        let other = saved.clone();
        saved.use_later(true, &mut flow, |_, _| Ok(())).unwrap();
        let (a, b) = (saved.get().unwrap(), other.get().unwrap());
        assert_eq!(a.to_f32().unwrap(), [3.0, 3.0]);
        assert!(b.is_shared() && calls.load(Ordering::Relaxed) == 1);
        // The value exists now, so work is no longer deferred.
        saved.use_later(true, &mut flow, |_, _| Ok(())).unwrap();
        assert_eq!(other.take_deferred().len(), 1);
    }
}
