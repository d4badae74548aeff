//! Mixers: the halves of the blocks that look along time.
//!
//! A mixer is a folder here, or another crate that calls [`register`]. It has
//!
//! - a configuration, [`MixerConfig`]: the options, the rules they obey, the parameters of a layer, what a
//!   layer remembers while decoding ([`StateSpec`]), its arithmetic, and its words for people;
//! - a layer, [`Mixer`]: the forward pass, and the values that training saves;
//! - a [`MixerFamily`]: the file formats ([`Format`]) it is stored in, and models that are built by name.
//!
//! Nothing outside of such a folder matches over mixers. To add one here, write its folder and list it
//! below; `examples/own_mixer.rs` of `fox-train` adds one from outside, in one file.

pub mod delta;
pub mod forgetting;
pub mod hgrn2;
pub mod hybrid;
pub mod kda;
pub mod mamba1;
pub mod mamba2;
pub mod path;
pub mod wall;

/// The families that are always there.
static BUILT_IN: [&MixerFamily; 8] = [
    &forgetting::FAMILY,
    &delta::FAMILY,
    &hgrn2::FAMILY,
    &mamba2::FAMILY,
    &kda::FAMILY,
    &path::FAMILY,
    &wall::FAMILY,
    &hybrid::FAMILY,
];

mod convolution;
mod format;
mod mixer;
mod registry;
mod scan;

pub use convolution::ShortConv;
pub use format::{
    CheckpointLayout, CommonFields, FileFormat, Format, MlpWidthFields, ModelType, enabled,
};
pub use fox_cache::{
    AttentionStateSpec, BlockStateSpec, ConvStateSpec, RecurrentStateSpec, StateSpec,
};
pub use mixer::{
    BlockNames, LayerParams, Mixer, MixerConfig, MixerContext, MixerData, MixerOutput,
    SavedActivations,
};
pub use registry::{Architecture, MixerFamily, families, register};
pub use scan::{ScanShape, saved_states, scan};
use scan::{delta_norm, head_norm, write_strength, xavier_bound};
