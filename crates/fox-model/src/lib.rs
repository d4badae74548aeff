//! The models of fox: configurations, forward and backward passes, decode state, checkpoints.
//!
//! - [`mixers`]: token mixers (attention, linear recurrences), one folder each; more can be registered.
//! - [`ModelConfig`] describes a model; config.json files of the official FoX repository and of
//!   flash-linear-attention are read and written.
//! - [`Model`] runs it on any [`Device`](fox_tensor::Device): [`Model::forward`], [`Model::loss`],
//!   and [`Model::decode`] against a [`Cache`].
//! - [`CheckpointReader`] and [`write_checkpoint`] handle Hugging Face folders, one tensor in memory
//!   at a time.
//! - [`verify_dump`] verifies a model against a reference dump.
//!
//! ```
//! use fox_model::{ForwardOptions, Model, ModelConfig};
//! use fox_tensor::{Device, Segments, Tape};
//!
//! let mut config = ModelConfig::fox_pro(32, 2, 2);    // width, blocks, heads
//! config.vocab_size = 100;
//! let device = Device::naive();                       // any device; the oracle needs no other crate
//! let model = Model::init(&config, 1, &device)?;
//! let (ids, options) = ([5, 6, 7, 8], ForwardOptions::default());
//!
//! // All positions at once: logits [4, 100].
//! let mut tape = Tape::inference(&device);
//! let tokens = device.from_i32(&ids, [4])?;
//! let hidden = model.forward(&mut tape, &tokens, &Segments::uniform(1, 4), None, &options)?;
//! let logits = model.logits(&mut tape, &hidden.states)?.value().to_f64()?;
//!
//! // Token by token: the same logits at the end.
//! let mut cache = model.new_cache(1, 4)?;
//! let mut last = Vec::new();
//! for id in ids {
//!     last = model.decode(&[&[id]], &mut cache, &options)?.to_f64()?;
//! }
//! assert!(last.iter().zip(&logits[300..]).all(|(a, b)| (a - b).abs() < 1e-5));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
    TensorMismatch, WriteOptions, convert_checkpoint, copy_tokenizer_files, single_tensor,
    split_mlp, write_checkpoint,
};
pub use config::{Fields, MlpConfig, ModelConfig, Preset, SpecialTokens, Validator};
pub use error::{Error, Result};
pub use flops::{ATTENTION_BACKWARD, TrainFlops, attention_flops};
pub use fox_cache::{Cache, LayerState, PagePolicy, RecurrentState, SequenceState};
pub use memory::{MemoryEstimate, RecomputedMoments};
pub use mixers::delta::DeltaConfig;
pub use mixers::forgetting::{DecayTime, ForgetGate, ForgettingConfig, QkNorm};
pub use mixers::hgrn2::{Hgrn2Config, LowerBounds};
pub use mixers::hybrid::{HybridConfig, LayerKind, MlpRatios};
pub use mixers::kda::KdaConfig;
pub use mixers::mamba1::Mamba1Config;
pub use mixers::mamba2::Mamba2Config;
pub use mixers::path::{PathConfig, PathConv};
pub use mixers::wall::WallConfig;
pub use mixers::{Architecture, CheckpointLayout, Mixer, MixerConfig, ModelType};
pub use model::{ForwardOptions, ForwardOutput, Model, Pooling, Pruning, TokenDecoder, TokenLoss};
pub use observe::{AttentionView, Observer};
pub use params::{
    Init, ParamGroup, ParamList, ParamSpec, Parameters, Pass, PassGuard, Residency, WeightSource,
};
pub use retrofit::{RetrofitOptions, RetrofitReport, retrofit_checkpoint};
pub use verify::{Tolerances, VerifyCheck, VerifyReport, verify_dump};
