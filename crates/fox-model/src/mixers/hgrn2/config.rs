//! Options of HGRN2: validation, sizes, arithmetic.

use fox_tensor::ParamId;

use super::layer::Hgrn2Layer;
use crate::Result;
use crate::config::{ModelConfig, Validator};
use crate::mixers::{
    LayerParams, Mixer, MixerConfig, RecurrentStateSpec, ScanShape, StateSpec, enabled,
};
use crate::params::{Init, ParamGroup, ParamList};

/// HGRN2.
#[derive(Clone, Debug, PartialEq)]
pub struct Hgrn2Config {
    /// Heads `H`.
    pub heads: usize,
    /// Width of a query and of a key `e`.
    pub expand_ratio: usize,
    /// Lower bounds of the forget gates.
    pub lower_bounds: LowerBounds,
    /// Epsilon of the output norm.
    pub output_norm_eps: f64,
}

/// Use of the table `model.lower_bounds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowerBounds {
    /// There is none.
    None,
    /// It is stored, but without effect: the official checkpoints.
    Stored,
    /// Gates rise from layer to layer: flash-linear-attention.
    Used,
}

impl Hgrn2Config {
    /// Sizes of the recurrence.
    pub(super) fn scan(&self, hidden_size: usize) -> ScanShape {
        ScanShape {
            heads: self.heads,
            key_heads: self.heads,
            key_dim: self.expand_ratio,
            value_dim: hidden_size / self.heads,
            delta: false,
        }
    }

    /// Sizes of the decode state of a layer.
    pub(super) fn shape(&self, hidden_size: usize) -> RecurrentStateSpec {
        RecurrentStateSpec { convs: Vec::new(), scan: self.expand_ratio * hidden_size }
    }
}

impl MixerConfig for Hgrn2Config {
    fn name(&self) -> &'static str {
        "HGRN2"
    }

    fn heads(&self, _: &ModelConfig) -> (usize, usize) {
        (self.heads, self.expand_ratio)
    }

    fn options(&self, model: &ModelConfig) -> Vec<String> {
        let values = model.hidden_size / self.heads;
        let mut words = vec![
            "decay per channel from the input".to_string(),
            format!("states of {} x {values} per head", self.expand_ratio),
        ];
        let more = enabled(&[
            (self.lower_bounds == LowerBounds::Used, "lower bounds of the gates"),
            (self.lower_bounds == LowerBounds::Stored, "lower bounds stored without effect"),
        ]);
        words.extend(more.into_iter().map(String::from));
        words
    }

    fn validate(&self, model: &ModelConfig, validator: &Validator<'_>) -> Result<()> {
        let width = model.hidden_size;
        validator.divisor("num_heads", self.heads, ("hidden_size", width))?;
        validator.range("expand_ratio", self.expand_ratio, 1, Validator::MAX_HEAD)?;
        let gates = self.heads * self.expand_ratio;
        validator.require(
            self.lower_bounds == LowerBounds::None || gates == width,
            "use_lower_bound",
            || format!("needs gates as wide as `hidden_size` {width}, not {gates}"),
        )?;
        validator.positive("norm_eps", self.output_norm_eps, 1.0)
    }

    /// The table of lower bounds `[L, D]`.
    fn declare_shared(&self, model: &ModelConfig, list: &mut ParamList) -> Option<ParamId> {
        let dims = vec![model.num_layers, model.hidden_size];
        let (name, start) = ("model.lower_bounds", Init::Constant(0.0));
        match self.lower_bounds {
            LowerBounds::None => None,
            LowerBounds::Stored => Some(list.buffer(ParamGroup::Mixer, name, dims, start)),
            LowerBounds::Used => Some(list.push(ParamGroup::Mixer, name, dims, false, start)),
        }
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        Box::new(Hgrn2Layer::declare(model, self, layer))
    }

    fn state(&self, model: &ModelConfig) -> StateSpec {
        StateSpec::Recurrent(self.shape(model.hidden_size))
    }

    fn continues_sequences(&self) -> bool {
        true
    }

    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64 {
        self.scan(model.hidden_size).train_flops(seq)
    }

    fn mlp_down_std(&self, model: &ModelConfig) -> f64 {
        model.deep_down_std()
    }
}
