//! What the backward needs of the forward: kept, or computed again.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Result, Tensor};

/// A value for the backward. Clones share what is computed again, so that it happens once; it is dropped
/// with the last of them.
#[derive(Clone)]
pub(super) struct Saved(Kind);

#[derive(Clone)]
enum Kind {
    Kept(Tensor),
    Again(Arc<Again>),
}

struct Again {
    make: Box<dyn Fn() -> Result<Tensor> + Send + Sync>,
    value: Mutex<Option<Tensor>>,
}

impl Saved {
    pub(super) fn kept(value: Tensor) -> Self {
        Saved(Kind::Kept(value))
    }

    pub(super) fn again(make: impl Fn() -> Result<Tensor> + Send + Sync + 'static) -> Self {
        let again = Again { make: Box::new(make), value: Mutex::default() };
        Saved(Kind::Again(Arc::new(again)))
    }

    pub(super) fn get(&self) -> Result<Tensor> {
        let again = match &self.0 {
            Kind::Kept(value) => return Ok(value.clone()),
            Kind::Again(again) => again,
        };
        let mut held = again.value.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = &*held {
            return Ok(value.clone());
        }
        let value = (again.make)()?;
        *held = Some(value.clone());
        Ok(value)
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
    use crate::Device;

    #[test]
    fn clones_compute_once_and_share() {
        let runs = Arc::new(AtomicUsize::new(0));
        let counter = runs.clone();
        let saved = Saved::again(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Device::naive().full([2], 3.0)
        });
        let other = saved.clone();
        let (a, b) = (saved.get().unwrap(), other.get().unwrap());
        assert_eq!(a.to_f32().unwrap(), [3.0, 3.0]);
        assert!(b.is_shared() && runs.load(Ordering::Relaxed) == 1);
    }
}
