//! The models of fox: what they are, how they compute, what they remember while decoding, and how
//! they are stored.
//!
//! - [`mixers`] are the halves of the blocks that look along time, one folder each; more can be registered.
//! - [`ModelConfig`] describes a model; config.json files of the official FoX repository and of
//!   flash-linear-attention are read and written.
//! - [`Model`] runs it on any [`Device`](fox_tensor::Device): [`Model::forward`], [`Model::loss`],
//!   and [`Model::decode`] against a [`Cache`].
//! - [`CheckpointReader`] and [`write_checkpoint`] handle Hugging Face folders, one tensor in memory
//!   at a time.
//! - [`verify_dump`] proves a model against a reference dump.

mod block;
mod checkpoint;
mod config;
mod error;
mod flops;
mod memory;
pub mod mixers;
mod model;
mod observe;
mod params;
mod retrofit;
mod state;
mod verify;

pub use checkpoint::{
    CheckpointReader, FileDtype, FileTensor, SafetensorsFile, SafetensorsRanges, SafetensorsWriter,
    TensorProblem, WriteOptions, convert_checkpoint, copy_companions, split_mlp, whole_tensor,
    write_checkpoint,
};
pub use config::{Fields, MlpConfig, ModelConfig, Preset, Rules, SpecialTokens};
pub use error::{Error, Result};
pub use flops::{ATTENTION_BACKWARD, TrainFlops, attention_flops};
pub use fox_cache::{Cache, LayerState, PagePolicy, RecurrentState};
pub use memory::MemoryEstimate;
pub use mixers::delta::DeltaConfig;
pub use mixers::forgetting::{DecayTime, ForgetGate, ForgettingConfig, QK_NORM_EPS, QkNorm};
pub use mixers::hgrn2::{Hgrn2Config, LowerBounds};
pub use mixers::hybrid::{HybridConfig, LayerKind, MlpRatios};
pub use mixers::mamba1::Mamba1Config;
pub use mixers::mamba2::Mamba2Config;
pub use mixers::{Architecture, CheckpointLayout, Mixer, MixerConfig, ModelType};
pub use model::{ForwardOptions, Hidden, Model, Pruning, TokenLoss};
pub use observe::{AttentionView, Observer};
pub use params::{Init, ParamGroup, ParamList, ParamSpec, Parameters};
pub use retrofit::{Retrofit, Retrofitted, retrofit_checkpoint};
pub use verify::{Check, Report, Tolerances, verify_dump};
