//! The parameters of a model: an ordered list of named tensors.
//!
//! Names are the official checkpoint names. Layers declare their parameters while the model is built and
//! store the [`ParamId`]s; values, gradients and optimizer state are lists in the same
//! order.

mod init;
mod source;

use std::sync::Arc;

use fox_tensor::{Device, ParamId, Shape, Tensor, Var};

pub use source::{Pass, PassGuard, WeightSource};

use crate::{Error, Result};

/// The module of the model that a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParamGroup {
    /// The token table.
    Embedding,
    /// The token mixers.
    Mixer,
    /// The feed-forward layers.
    Mlp,
    /// Norms of the residual stream.
    Norm,
    /// The output projection.
    Head,
}

/// Initialization of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// Independent normal values; one row may be zero (the pad token's).
    Normal {
        /// Standard deviation.
        std: f64,
        /// A row that is 0 instead.
        zero_row: Option<usize>,
    },
    /// Independent values, uniform between `-bound` and `bound`.
    Uniform {
        /// The largest magnitude.
        bound: f64,
    },
    /// Independent logarithms of values that are uniform between the two.
    LogOfUniform {
        /// The smallest value.
        low: f64,
        /// The largest value.
        high: f64,
    },
    /// Independent biases whose softplus is a time step, spread evenly on a logarithmic scale.
    TimeStep {
        /// The smallest time step.
        min: f64,
        /// The largest time step.
        max: f64,
        /// A floor under them.
        floor: f64,
    },
    /// Every element the same.
    Constant(f32),
    /// These values, repeated as often as needed: for every row, if they are one row.
    Given(Vec<f32>),
}

/// A parameter without its value.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// The official checkpoint name.
    pub name: String,
    /// Its extents.
    pub dims: Vec<usize>,
    /// Its module.
    pub group: ParamGroup,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether it is trained; a buffer is only stored.
    pub trainable: bool,
    /// Rows of each matrix of a linear layer in it, from the first row on: one for most, several where layers
    /// with the same input are stacked into one product, none for other parameters (the tables of tokens,
    /// vectors, filters). A rule that treats matrices as a whole must treat the stacked ones by themselves: the singular
    /// vectors of a stack are not those of its matrices, and the update of one would depend on the others.
    pub matrices: Vec<usize>,
    /// Its initialization.
    pub init: Init,
}

impl ParamSpec {
    /// Number of elements. Configurations are validated such that it does not overflow.
    pub fn count(&self) -> usize {
        self.dims.iter().product()
    }
}

/// The declarations of a model's parameters, in order. Every method adds one and gives its id.
#[derive(Debug, Default)]
pub struct ParamList {
    specs: Vec<ParamSpec>,
}

impl ParamList {
    /// A matrix `[rows, cols]` with weight decay and normal initialization.
    pub fn matrix(
        &mut self,
        group: ParamGroup,
        name: impl Into<String>,
        rows: usize,
        cols: usize,
        std: f64,
    ) -> ParamId {
        let init = Init::Normal { std, zero_row: None };
        let id = self.push(group, name, vec![rows, cols], true, init);
        self.stacked(id, &[rows])
    }

    /// A matrix `[rows, cols]` with weight decay and uniform initialization.
    pub fn uniform_matrix(
        &mut self,
        group: ParamGroup,
        name: impl Into<String>,
        (rows, cols): (usize, usize),
        bound: f64,
    ) -> ParamId {
        let id = self.push(group, name, vec![rows, cols], true, Init::Uniform { bound });
        self.stacked(id, &[rows])
    }

    /// Marks a matrix as several stacked ones of so many rows each.
    pub fn stacked(&mut self, id: ParamId, rows: &[usize]) -> ParamId {
        let spec = &mut self.specs[id.0];
        debug_assert_eq!(rows.iter().sum::<usize>(), spec.dims[0], "{}", spec.name);
        spec.matrices = rows.to_vec();
        id
    }

    /// A vector without weight decay, every element `start`.
    pub fn vector(
        &mut self,
        group: ParamGroup,
        name: impl Into<String>,
        len: usize,
        start: f32,
    ) -> ParamId {
        self.push(group, name, vec![len], false, Init::Constant(start))
    }

    /// Any parameter that is trained.
    pub fn push(
        &mut self,
        group: ParamGroup,
        name: impl Into<String>,
        dims: Vec<usize>,
        decay: bool,
        init: Init,
    ) -> ParamId {
        let name = name.into();
        let matrices = Vec::new();
        self.specs.push(ParamSpec { name, dims, group, decay, trainable: true, matrices, init });
        ParamId(self.specs.len() - 1)
    }

    /// A tensor that is stored with the model, but not trained.
    pub fn buffer(
        &mut self,
        group: ParamGroup,
        name: impl Into<String>,
        dims: Vec<usize>,
        init: Init,
    ) -> ParamId {
        let id = self.push(group, name, dims, false, init);
        self.specs[id.0].trainable = false;
        id
    }

    /// The declarations.
    pub(crate) fn into_specs(self) -> Vec<ParamSpec> {
        self.specs
    }
}

/// Which parameters a rank keeps; the values of all others are [absent](Tensor::absent).
pub type Residency<'a> = dyn Fn(ParamId) -> bool + 'a;

/// The parameters with their values on a device.
#[derive(Clone, Debug)]
pub struct Parameters {
    specs: Vec<ParamSpec>,
    values: Vec<Tensor>,
    /// Where values come from that are not kept here between their uses.
    source: Option<Arc<dyn WeightSource>>,
}

impl Parameters {
    /// Initial values, the same for the same seed whatever the order of the parameters.
    pub(crate) fn init(
        specs: Vec<ParamSpec>,
        seed: u64,
        device: &Device,
        keeps: &Residency<'_>,
    ) -> Result<Self> {
        Self::build(specs, device, keeps, |_, spec| Ok(init::values(spec, seed)))
    }

    /// Values from `source`, which is called for one parameter after the other that this rank `keeps`.
    pub(crate) fn build(
        specs: Vec<ParamSpec>,
        device: &Device,
        keeps: &Residency<'_>,
        mut source: impl FnMut(ParamId, &ParamSpec) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let mut values = Vec::with_capacity(specs.len());
        for (i, spec) in specs.iter().enumerate() {
            let shape = Shape::from(&spec.dims[..]);
            values.push(match keeps(ParamId(i)) {
                true => device.from_f32(&source(ParamId(i), spec)?, shape)?,
                false => Tensor::absent(shape, device),
            });
        }
        Ok(Parameters { specs, values, source: None })
    }

    /// Number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Number of elements of all parameters.
    pub fn count(&self) -> usize {
        self.specs.iter().map(ParamSpec::count).sum()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &ParamSpec, &Tensor)> {
        let pairs = self.specs.iter().zip(&self.values);
        pairs.enumerate().map(|(i, (spec, value))| (ParamId(i), spec, value))
    }

    /// The parameter of this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.specs.iter().position(|spec| spec.name == name).map(ParamId)
    }

    /// The specification of a parameter.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// Its value.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.values[id.0]
    }

    /// Its value, for an optimizer to update.
    pub fn value_mut(&mut self, id: ParamId) -> &mut Tensor {
        &mut self.values[id.0]
    }

    /// All of them with their values for an optimizer to update, in order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ParamId, &ParamSpec, &mut Tensor)> {
        let pairs = self.specs.iter().zip(&mut self.values);
        pairs.enumerate().map(|(i, (spec, value))| (ParamId(i), spec, value))
    }

    /// Replaces a value; the shape must stay.
    pub fn set(&mut self, id: ParamId, value: Tensor) -> Result<()> {
        let spec = self.spec(id);
        if value.dims() != spec.dims {
            return Err(Error::Argument(format!(
                "{} has shape {:?}; a value of shape {} does not fit",
                spec.name,
                spec.dims,
                value.shape()
            )));
        }
        self.values[id.0] = value;
        Ok(())
    }

    /// Freezes all parameters but these: like buffers they have no gradient.
    pub fn train_only(&mut self, trained: impl Fn(&ParamSpec) -> bool) {
        for spec in &mut self.specs {
            spec.trainable &= trained(spec);
        }
    }

    /// The parameter for a tape: with a gradient when it is trained.
    pub fn var(&self, id: ParamId) -> Var {
        let trainable = self.specs[id.0].trainable;
        if let Some(source) = self.source.as_ref().filter(|source| source.holds(id)) {
            let (value, source) = (self.fetched(source, id), Arc::clone(source));
            let trained = trainable.then_some(id);
            return Var::fetched_param(trained, value, move || source.fetch(id));
        }
        let value = self.values[id.0].clone();
        if trainable { Var::param(id, value) } else { Var::constant(value) }
    }
}
