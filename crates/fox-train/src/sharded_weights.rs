//! Weights in shards over all ranks (ZeRO stage 3, `parallel.shard = "weights"`).
//!
//! A weight matrix is kept by the rank that owns it, see [`owners`]; the others gather it when an op asks for it, in the
//! forward and again in the backward pass. The order of the gathers follows from the model, so it is recorded in the first
//! pass; later ones gather a batch of about one block while the batch before it is in use:
//!
//! ```text
//! compute   | batch k        | batch k + 1    | batch k + 2 ...      matrices of the last block stay until newer ones
//! transfer  | batch k + 1    | batch k + 2    | batch k + 3          need the space: a recomputed block, or the last
//!                                                                    block at the turn of the pass, is gathered once
//! ```
//!
//! Only copies travel, so all numbers have the bits of replicated weights. Vectors and small matrices are replicated.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fox_dist::{Gather, Group, owners};
use fox_model::{Model, ModelConfig, ParamGroup, ParamSpec, Parameters, Pass, WeightSource};
use fox_tensor::{DType, Device, ParamId, Shape, Tensor, WeightFormat};

use crate::recipe::Shard;

/// Smaller parameters are replicated: a gather would take longer than its bytes are worth.
const SMALLEST: usize = 4096;
/// Bytes of a value.
const F32: usize = size_of::<f32>();

/// Whether a parameter is sharded: the matrices of linear layers, the token table and the output projection.
pub(crate) fn is_sharded(spec: &ParamSpec) -> bool {
    let table = matches!(spec.group, ParamGroup::Embedding | ParamGroup::Head);
    let matrix = spec.dims.len() == 2 && (table || !spec.matrices.is_empty());
    matrix && spec.count() >= SMALLEST
}

/// Bytes of the sharded matrices of a block, on average: what is gathered ahead.
pub(crate) fn window(specs: &[ParamSpec], layers: usize) -> usize {
    let of_blocks = |spec: &&ParamSpec| matches!(spec.group, ParamGroup::Mixer | ParamGroup::Mlp);
    let sharded = specs.iter().filter(|spec| is_sharded(spec)).filter(of_blocks);
    sharded.map(|spec| F32 * spec.count()).sum::<usize>().div_ceil(layers.max(1))
}

/// Which parameters a rank keeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResidentParams(Option<(usize, usize)>);

impl ResidentParams {
    /// Those of a rank of a group.
    pub fn new(shard: Shard, group: &Group) -> ResidentParams {
        let sharded = shard == Shard::Weights && group.size() > 1;
        ResidentParams(sharded.then(|| (group.rank(), group.size())))
    }

    /// Whether weights are sharded at all.
    pub fn is_sharded(&self) -> bool {
        self.0.is_some()
    }

    /// By parameter of a model.
    pub fn of(&self, config: &ModelConfig) -> Vec<bool> {
        let specs = config.param_specs();
        let Some((rank, ranks)) = self.0 else { return vec![true; specs.len()] };
        let sizes: Vec<usize> = specs.iter().map(ParamSpec::count).collect();
        let owned = owners(&sizes, ranks).into_iter().map(|owner| owner == rank);
        specs.iter().zip(owned).map(|(spec, owned)| owned || !is_sharded(spec)).collect()
    }
}

/// Gathers the weights of a model.
#[derive(Debug)]
pub(crate) struct ShardedWeights {
    group: Arc<Group>,
    device: Device,
    layouts: Vec<Layout>,
    window: usize,
    state: Mutex<State>,
}

/// A parameter.
#[derive(Debug)]
struct Layout {
    owner: usize,
    shape: Shape,
    /// Whether linear layers read it packed.
    packed: bool,
    sharded: bool,
}

impl Layout {
    fn bytes(&self) -> usize {
        F32 * self.shape.len()
    }
}

#[derive(Debug, Default)]
struct State {
    pass: Option<Pass>,
    /// The order of the gathers of every kind of pass, and how many were used in this one.
    orders: [Vec<ParamId>; 3],
    used: usize,
    /// The matrices that this rank owns, during a pass.
    own: Vec<Option<Tensor>>,
    /// The batch that is in use, and the one after it.
    ready: VecDeque<(ParamId, Gather)>,
    pending: VecDeque<(ParamId, Gather)>,
    /// The matrices that were used last, up to a window. They depend on the order alone, so all ranks have the same.
    recent: VecDeque<(ParamId, Tensor)>,
    failure: Option<fox_dist::Error>,
    /// Whether a pass has ended before its last gather: other ranks may be at another place.
    is_broken: bool,
}

impl ShardedWeights {
    /// For a model of which this rank keeps only its parameters and those that are not sharded.
    pub fn new(group: &Arc<Group>, model: &Model) -> ShardedWeights {
        let params = model.params();
        let sizes: Vec<usize> = params.iter().map(|(_, spec, _)| spec.count()).collect();
        let layouts = params.iter().zip(owners(&sizes, group.size()));
        let layouts = layouts.map(|((_, spec, value), owner)| Layout {
            owner,
            shape: value.shape(),
            packed: model.is_packed(spec),
            sharded: is_sharded(spec),
        });
        let specs: Vec<ParamSpec> = params.iter().map(|(_, spec, _)| spec.clone()).collect();
        ShardedWeights {
            group: Arc::clone(group),
            device: model.device().clone(),
            layouts: layouts.collect(),
            window: window(&specs, model.config().num_layers),
            state: Mutex::default(),
        }
    }

    /// Bytes that are gathered ahead.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Whether the rank keeps this parameter.
    pub fn keeps(&self, id: ParamId) -> bool {
        let layout = &self.layouts[id.0];
        !layout.sharded || layout.owner == self.group.rank()
    }

    /// Why a fetch has failed, once.
    pub fn failure(&self) -> Option<fox_dist::Error> {
        self.state().failure.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parameters of the next batch from a place of the order on.
    fn batch(&self, order: &[ParamId], from: usize) -> Vec<ParamId> {
        let mut bytes = 0;
        let fits = |id: &&ParamId| {
            bytes += self.layouts[id.0].bytes();
            bytes <= self.window
        };
        let some: Vec<ParamId> = order[from..].iter().take_while(fits).copied().collect();
        match some.is_empty() {
            // One that is larger than a block.
            true => order[from..].iter().take(1).copied().collect(),
            false => some,
        }
    }

    fn begin(
        &self,
        state: &State,
        ids: &[ParamId],
    ) -> fox_dist::Result<VecDeque<(ParamId, Gather)>> {
        let mut tensors = Vec::with_capacity(ids.len());
        for id in ids {
            let Layout { owner, shape, packed, .. } = self.layouts[id.0];
            let tensor = match &state.own[id.0] {
                Some(own) => own.clone(),
                None if !self.group.is_connected() => Tensor::absent(shape, &self.device),
                None => {
                    let empty = self.device.uninit(shape, DType::F32)?;
                    if packed { empty.packed(WeightFormat::F32)? } else { empty }
                }
            };
            tensors.push((owner, tensor));
        }
        Ok(ids.iter().copied().zip(self.group.begin_gather(tensors)?).collect())
    }

    fn take(&self, state: &mut State, id: ParamId) -> fox_dist::Result<Tensor> {
        let Some(pass) = state.pass.filter(|_| !state.is_broken) else {
            let words = "weights were used outside of a pass, or after one that ended early";
            return Err(fox_dist::Error::Refused(words.into()));
        };
        let recent = state.recent.iter().position(|(recent, _)| *recent == id);
        if let Some((_, tensor)) = recent.and_then(|at| state.recent.remove(at)) {
            state.recent.push_back((id, tensor.clone()));
            return Ok(tensor);
        }
        if state.ready.is_empty() && !state.pending.is_empty() {
            self.group.wait_for_gathers()?;
            state.ready = std::mem::take(&mut state.pending);
            let next = state.used + state.ready.len();
            let ids = self.batch(&state.orders[pass as usize], next);
            state.pending = self.begin(state, &ids)?;
        }
        if state.ready.front().is_none_or(|(next, _)| *next != id) {
            // The first pass, or one in another order: on all ranks.
            self.group.wait_for_gathers()?;
            let unused = state.ready.drain(..).chain(state.pending.drain(..));
            for (_, gather) in unused.collect::<Vec<_>>() {
                self.group.finish_gather(gather)?;
            }
            let used = state.used;
            state.orders[pass as usize].truncate(used);
            state.orders[pass as usize].push(id);
            state.ready = self.begin(state, &[id])?;
            self.group.wait_for_gathers()?;
        }
        let Some((_, gather)) = state.ready.pop_front() else {
            return Err(fox_dist::Error::Refused("a gather is missing".into()));
        };
        let mut tensor = self.group.finish_gather(gather)?;
        if self.layouts[id.0].packed {
            tensor = tensor.packed(WeightFormat::F32)?;
        }
        state.used += 1;
        self.remember(state, id, &tensor);
        Ok(tensor)
    }

    fn remember(&self, state: &mut State, id: ParamId, tensor: &Tensor) {
        state.recent.push_back((id, tensor.clone()));
        let mut bytes: usize = state.recent.iter().map(|(id, _)| self.layouts[id.0].bytes()).sum();
        while bytes > self.window
            && let Some((oldest, _)) = state.recent.pop_front()
        {
            bytes -= self.layouts[oldest.0].bytes();
        }
    }
}

impl WeightSource for ShardedWeights {
    fn holds(&self, id: ParamId) -> bool {
        self.layouts[id.0].sharded
    }

    fn begin_pass(&self, pass: Pass, params: &Parameters) {
        let state = &mut *self.state();
        let own = params.iter().map(|(id, _, value)| {
            let layout = &self.layouts[id.0];
            (layout.sharded && layout.owner == self.group.rank()).then(|| value.clone())
        });
        (state.pass, state.used, state.own) = (Some(pass), 0, own.collect());
        let ids = self.batch(&state.orders[pass as usize], 0);
        match self.begin(state, &ids) {
            Ok(pending) => state.pending = pending,
            Err(error) => (state.failure, state.is_broken) = (Some(error), true),
        }
    }

    fn fetch(&self, id: ParamId) -> fox_tensor::Result<Tensor> {
        let state = &mut *self.state();
        self.take(state, id).map_err(|error| {
            let words = error.to_string();
            // The first one is the reason.
            state.failure.get_or_insert(error);
            fox_tensor::Error::argument("gather", words)
        })
    }

    fn end_pass(&self) {
        let state = &mut *self.state();
        state.pass = None;
        // Waiting for the rest here could wait for a rank that waits for this one.
        state.is_broken |= !(state.ready.is_empty() && state.pending.is_empty());
        state.own.clear();
        state.ready.clear();
        state.pending.clear();
        state.recent.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let config = ModelConfig::fox_pro(64, 3, 2).with_vocab(100);
        Model::init(&config, 0, &fox_cpu::device()).unwrap()
    }

    #[test]
    fn matrices_are_sharded_and_vectors_are_not() {
        let model = model();
        let sharded = |(_, spec, _): &(ParamId, &ParamSpec, &Tensor)| is_sharded(spec);
        let names: Vec<String> =
            model.params().iter().filter(sharded).map(|(_, spec, _)| spec.name.clone()).collect();
        assert!(names.iter().any(|name| name == "lm_head.weight"), "{names:?}");
        assert!(names.iter().any(|name| name.contains("layers.2.mlp.down_proj")), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("norm")), "{names:?}");
        let matrices: usize =
            model.params().iter().filter(sharded).map(|(_, spec, _)| spec.count()).sum();
        assert!(matrices as f64 > 0.95 * model.params().count() as f64);
    }

    /// A group of one gathers from itself: the order is recorded, and followed in the second pass.
    #[test]
    fn later_passes_gather_ahead() {
        let model = model();
        let weights = ShardedWeights::new(&Arc::new(Group::alone()), &model);
        let held: Vec<ParamId> =
            model.params().iter().map(|(id, _, _)| id).filter(|id| weights.holds(*id)).collect();
        let pass = |order: &[ParamId]| {
            weights.begin_pass(Pass::Training, model.params());
            let mut ahead = 0;
            for id in order {
                let value = weights.fetch(*id).unwrap().to_f32().unwrap();
                assert_eq!(value, model.params().value(*id).to_f32().unwrap());
                ahead = ahead.max(weights.state().pending.len());
            }
            weights.end_pass();
            ahead
        };
        assert_eq!(pass(&held), 0, "the first pass does not know the order");
        assert!(pass(&held) > 2);
        // Another order is recorded anew.
        let reversed: Vec<ParamId> = held.iter().rev().copied().collect();
        assert_eq!((pass(&reversed), pass(&reversed) > 2), (0, true));
        // What was used last is not gathered again.
        let twice = [reversed.clone(), reversed[reversed.len() - 1..].to_vec()].concat();
        pass(&twice);
        assert_eq!(weights.state().orders[0].len(), reversed.len());
        weights.begin_pass(Pass::Training, model.params());
        weights.end_pass();
        assert!(weights.failure().is_none(), "the reason is elsewhere");
        let error = weights.fetch(held[0]).unwrap_err().to_string();
        assert!(error.contains("after one that ended early"), "{error}");
        assert!(weights.failure().is_some());
    }
}
