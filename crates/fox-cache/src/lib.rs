//! The decode state of a model: KV cache and recurrent state, eviction and memory accounting.
//!
//! - A layer describes its state with a [`StateSpec`]; [`Cache::new`] and [`Cache::paged`] build the states of all
//!   layers from these.
//! - A step op by op begins with [`Cache::begin`], passes every layer its [`LayerState`], and ends with
//!   [`Cache::commit`]. A step that fails before changes nothing and can be repeated.
//! - A sequence that decodes in one of the [`Slots`] of the device is a [`SlotSequence`]; [`SequenceState`] is either of
//!   both.
//! - [`PagePolicy`] decides what is evicted: keys whose fraction of every later softmax is provably below a tolerance.
//!   [`bound`] has the bound on the logits behind it.
//! - [`CacheMeter`] counts the bytes of all states, shared pages once; [`Budget`] decides whether another sequence may
//!   start.
//!
//! The memory of a layer and of a sequence:
//!
//! ```
//! use fox_cache::{AttentionStateSpec, Cache, PagePolicy, StateSpec};
//! use fox_tensor::{AttentionWeights, Device};
//!
//! let layer = StateSpec::Attention(AttentionStateSpec {
//!     heads: 12,
//!     kv_heads: 12,
//!     head_dim: 64,
//!     gated: true,
//!     k_shift: true,
//!     v_shift: true,
//!     window: None,
//!     weights: AttentionWeights::Softmax,
//!     transition: 0,
//!     conv: None,
//! });
//! // Keys, values, and a log gate per head.
//! assert_eq!(layer.values_per_token(), 2 * 12 * 64 + 12);
//!
//! let policy = PagePolicy::keep_all();
//! let cache = Cache::paged([layer.clone(), layer], &policy, &Device::naive())?;
//! assert_eq!((cache.batch(), cache.lens(), cache.usage(0).tokens), (1, &[0][..], 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
pub mod bound;
mod budget;
mod cache;
mod error;
mod eviction;
mod layer;
mod meter;
mod paged;
mod pages;
mod recurrent;
mod recycled;
mod rows;
mod slot;
mod spec;

pub use blocks::{BlockState, OpenRows};
pub use budget::{Budget, SequenceCost};
pub use cache::{Cache, Usage};
pub use error::{Error, Result};
pub use eviction::{EvictionRule, PagePolicy};
pub use layer::LayerState;
pub use meter::{CacheMeter, Lease};
pub use paged::PagedState;
pub use pages::LayerPages;
pub use recurrent::RecurrentState;
pub use rows::RowState;
pub use slot::{FreeSlots, SequenceState, Slot, SlotSequence, Slots};
pub use spec::{AttentionStateSpec, BlockStateSpec, ConvStateSpec, RecurrentStateSpec, StateSpec};
