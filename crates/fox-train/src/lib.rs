//! Training: from a recipe to a model that others can load.
//!
//! - [`Recipe`]: everything that decides what a run computes; [`load`](recipe::load) reads them by name or file.
//! - [`train`]: a run from beginning to end in a folder, which resumes to the same bits after any interruption.
//! - [`dry_run`]: the memory and time a run would take.
//! - [`Stepper`], and its parts [`Updater`], [`Schedule`] and [`gradient`]: for programs with their own loop.
//! - [`Optimizer`]: what an optimizer must be able to do; [`AdamW`] and [`Muon`] do it.
//!
//! ```
//! use std::ops::ControlFlow;
//! use fox_train::{Event, RunSpec, recipe, train};
//!
//! let set = ["training.tokens=4096", "schedule.warmup_tokens=512", "data.sequence_length=128"];
//! let folder = tempfile::tempdir()?;
//! let spec = RunSpec {
//!     recipe: recipe::load("tiny-fox-pro", &set.map(String::from))?,
//!     out: folder.path().join("run"),
//!     device: fox_cpu::device(),
//!     command: vec![],
//! };
//! let outcome = train(&spec, &mut |event| {
//!     if let Event::Step(step) = event {
//!         println!("{} {:?}", step.step, step.loss);
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! assert_eq!(outcome.summary.tokens, 4096);
//! println!("{:?}", outcome.summary.evaluation);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/train.rs` makes a model of a text file.

pub mod checkpoint;
pub mod cluster;
pub mod data;
mod dry_run;
mod error;
pub mod evaluate;
mod export;
mod files;
mod fit;
pub mod gates;
pub mod masking;
mod memory_check;
pub mod messages;
pub mod metrics;
mod optimizer;
mod overlapped_reduce;
pub mod own_messages;
pub mod own_text;
pub mod recipe;
mod run_folder;
mod run_paths;
mod run_spec;
mod schedule;
mod sharded_save;
mod sharded_weights;
mod stages;
mod step;
mod stepper;
mod summary;
mod timeline;
mod train_loop;
mod trainer;
mod tuning;

pub use dry_run::{DryRun, dry_run};
pub use error::{Error, Result};
pub use export::{Companions, export, export_run};
pub use optimizer::{
    AdamW, Muon, Optimizer, OptimizerRecipe, Rule, Scale, StepInput, StepReport, Trained, Updater,
    optimizer_names,
};
pub use recipe::Recipe;
pub use run_folder::{NewestCheckpoint, RunFolder, RunInfo, finished_run};
pub use run_spec::{Event, Observer, Outcome, RunSpec, Start};
pub use schedule::{Decay, Schedule};
pub use step::{BatchLoss, RankShard, ShardLoss, gradient, segments};
pub use stepper::{StepOutcome, Stepper};
pub use summary::Summary;
pub use trainer::{train, train_in};
