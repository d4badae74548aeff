//! Training: from a recipe to a model that others can load.
//!
//! - [`Recipe`]: everything that decides what a run computes; [`load`](recipe::load) reads them by name or file.
//! - [`train`]: a run from beginning to end in a folder, which resumes to the same bits after any interruption.
//! - [`Stepper`], and its parts [`Updater`], [`Schedule`] and [`accumulate`]: for programs with a loop of their own.
//! - [`Optimizer`]: what an optimizer must be able to do; [`AdamW`] and [`Muon`] do it.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use fox_train::{Event, Job, recipe, train};
//!
//! let job = Job {
//!     recipe: recipe::load("tiny-fox-pro", &["training.tokens=1000000".into()])?,
//!     out: "runs/tiny".into(),
//!     device: fox_cpu::device(),
//!     command: vec![],
//! };
//! let outcome = train(&job, &mut |event| {
//!     if let Event::Step(step) = event {
//!         println!("{} {:?}", step.step, step.loss);
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! println!("{:?}", outcome.summary.evaluation);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod agreement;
pub mod checkpoint;
pub mod cluster;
pub mod data;
mod early;
mod error;
pub mod evaluate;
mod export;
mod files;
mod fit;
pub mod gates;
mod job;
pub mod messages;
pub mod metrics;
mod optimizer;
pub mod recipe;
pub mod reproduce;
mod run_folder;
mod schedule;
mod stages;
mod step;
mod stepper;
mod summary;
pub mod sweep;
mod timeline;
mod trainer;
mod tuning;

pub use error::{Error, Result};
pub use export::{export, export_run};
pub use job::{Event, Job, Observer, Outcome, Start};
pub use optimizer::{
    AdamW, Muon, Optimizer, OptimizerRecipe, Rule, Scale, StepInput, StepReport, Trained, Updater,
    optimizer_names,
};
pub use recipe::Recipe;
pub use run_folder::{Newest, RunFacts, RunFolder, finished_run};
pub use schedule::{Decay, Schedule};
pub use step::{BatchLoss, Portion, PortionLoss, gradient, segments};
pub use stepper::{StepOutcome, Stepper};
pub use summary::Summary;
pub use trainer::{train, train_in};
