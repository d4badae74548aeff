//! Parameters whose values are on other ranks between their uses (ZeRO stage 3).

use std::fmt::Debug;
use std::sync::Arc;

use fox_tensor::{ParamId, Result, Tensor};

use super::Parameters;

/// What a pass over a model does. The order in which parameters are used depends on it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward.
    Training,
    /// Forward, for a loss.
    Evaluation,
    /// Forward, with an [`Observer`](crate::Observer).
    Observation,
}

/// Gathers the values of parameters from the ranks that own them. All ranks begin the same passes and fetch the same
/// parameters in the same order.
pub trait WeightSource: Debug + Send + Sync {
    /// Whether the value of a parameter must be fetched.
    fn holds(&self, id: ParamId) -> bool;

    /// Begins a pass with the values that `params` has here.
    fn begin_pass(&self, pass: Pass, params: &Parameters);

    /// The value of a parameter. Its memory is free when the caller and this source have dropped it.
    ///
    /// # Errors
    /// Those of the device, and the loss of a rank.
    fn fetch(&self, id: ParamId) -> Result<Tensor>;

    /// Ends a pass: nothing that was fetched is kept.
    fn end_pass(&self);
}

/// A pass in progress; it ends when this is dropped.
#[must_use]
#[derive(Debug)]
pub struct PassGuard(Option<Arc<dyn WeightSource>>);

impl Drop for PassGuard {
    fn drop(&mut self) {
        if let Some(source) = &self.0 {
            source.end_pass();
        }
    }
}

impl Parameters {
    /// Lets a source provide the values of the parameters that it holds. Those that this rank does not keep become
    /// [absent](Tensor::absent).
    pub fn set_source(&mut self, source: Arc<dyn WeightSource>, keeps: &super::Residency<'_>) {
        for (i, value) in self.values.iter_mut().enumerate() {
            if source.holds(ParamId(i)) && !keeps(ParamId(i)) {
                *value = Tensor::absent(value.shape(), value.device());
            }
        }
        self.source = Some(source);
    }

    /// Whether some values are on other ranks.
    pub fn is_sharded(&self) -> bool {
        self.source.is_some()
    }

    /// Begins a pass over the model. Without a [`WeightSource`] this does nothing.
    pub fn begin_pass(&self, pass: Pass) -> PassGuard {
        if let Some(source) = &self.source {
            source.begin_pass(pass, self);
        }
        PassGuard(self.source.clone())
    }

    /// The value for an op. After a failure, which the source keeps, the op rejects an absent value.
    pub(super) fn fetched(&self, source: &Arc<dyn WeightSource>, id: ParamId) -> Tensor {
        source.fetch(id).unwrap_or_else(|_| {
            let value = &self.values[id.0];
            Tensor::absent(value.shape(), value.device())
        })
    }
}
