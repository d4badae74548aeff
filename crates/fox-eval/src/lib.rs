//! Evaluation of language models: what they predict at every position, what they find again in a long
//! text, and what they forget.
//!
//! - [`loss`]: loss at every position, its slope, and perplexities, with bootstrap intervals.
//! - [`needle`]: what a model finds again in a long text.
//! - [`ruler`]: RULER's thirteen task families and PhoneBook.
//! - [`tasks`]: questions with right answers, and LongBench.
//! - [`accuracy`]: answers to small tasks with exact answers, by length and difficulty.
//! - [`inspect`]: forget gates, half-lives, attention, pruning.
//! - [`compare`]: all of this side by side.
//! - [`report`]: a document with text, tables and charts ([`fox_plot`]), as HTML, Markdown, JSON and terminal text.
//! - [`stats`]: quantiles, bootstrap, Wilson's and Student's intervals.
//!
//! The loss of a model at every position of synthetic documents:
//!
//! ```
//! use fox_data::{Dataset, SyntheticConfig, SyntheticDataset};
//! use fox_eval::Subject;
//! use fox_eval::loss::{LossCurve, LossOptions, evaluate_loss};
//! use fox_model::{Model, ModelConfig, Pruning};
//!
//! let data = SyntheticDataset::new(SyntheticConfig::default().held_out());
//! let mut config = ModelConfig::fox_pro(32, 1, 2);
//! config.vocab_size = data.vocab_size();
//! let model = Model::init(&config, 1, &fox_cpu::device())?;
//! let subject = Subject { name: "untrained", model: &model, training_length: None };
//!
//! let options = LossOptions { length: 128, documents: 4, pruning: Pruning::Config, mask_every: 8 };
//! let sums = evaluate_loss(&subject, &data, &options, None, |_documents_done| ())?;
//! let curve = LossCurve::new("untrained", &sums, None);
//! assert_eq!((curve.documents, curve.per_position.len()), (4, 128));
//! // Before training all tokens are about as likely.
//! let uniform = (config.vocab_size as f64).ln();
//! assert!((curve.mean.value - uniform).abs() < 0.5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod accuracy;
pub mod compare;
pub mod csv;
pub mod error;
pub mod files;
pub mod inspect;
pub mod learning;
pub mod loss;
pub mod needle;
pub mod report;
pub mod ruler;
mod score_log;
pub mod stats;
mod subject;
pub mod tasks;
mod words;

pub use error::{Error, Result};
pub use subject::Subject;
