//! The models of fox: what they are, how they compute, what they remember while decoding, and how
//! they are stored.
//!
//! - [`ModelConfig`] describes a model; config.json files of the official FoX repository and of
//!   flash-linear-attention are read and written.
//! - [`Model`] runs it on any [`Device`](fox_tensor::Device): [`Model::forward`], [`Model::loss`],
//!   and [`Model::decode`] against a [`Cache`].
//! - [`CheckpointReader`] and [`write_checkpoint`] handle Hugging Face folders, one tensor in memory
//!   at a time.
//! - [`verify_dump`] proves a model against a reference dump.

mod block;
mod bound;
mod cache;
mod checkpoint;
mod config;
mod error;
mod flops;
mod memory;
mod mixers;
mod model;
mod observe;
mod paged;
mod params;
mod recurrent_state;
mod verify;

pub use cache::Cache;
pub use checkpoint::{
    CheckpointReader, FileDtype, SafetensorsFile, TensorProblem, WriteOptions, file_tensors,
    write_checkpoint,
};
pub use config::{
    DecayTime, DeltaConfig, ForgetGate, ForgettingConfig, Hgrn2Config, Layout, LowerBounds,
    Mamba2Config, MixerConfig, MlpConfig, ModelConfig, ModelType, PRESETS, Preset, QK_NORM_EPS,
    QkNorm, SpecialTokens,
};
pub use error::{Error, Result};
pub use flops::{ATTENTION_BACKWARD, TrainFlops, attention_flops};
pub use memory::{MemoryEstimate, MemoryShape};
pub(crate) use model::declare;
pub use model::{ForwardOptions, Hidden, Model, Pruning, TokenLoss};
pub use observe::{AttentionView, Observer};
pub use paged::{PagePolicy, paged_cache_bytes};
pub use params::{Init, ParamGroup, ParamSpec, Parameters};
pub use verify::{Check, Report, Tolerances, relative_error, verify_dump};
