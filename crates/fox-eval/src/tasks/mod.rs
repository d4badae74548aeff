//! Tasks: short questions as lm-evaluation-harness asks them, and LongBench.
//!
//! A task is a small file ([`TaskSpec`]): how contexts, continuations and answers are made from the columns of
//! a row ([`Template`]), and how they are judged ([`Metric`]). Those of the paper come with the program
//! ([`find`]); LongBench brings its own prompts ([`LongBench`]).

mod builtin;
mod data;
mod encode;
mod filters;
mod generate;
mod items;
mod likelihood;
mod longbench;
pub mod metrics;
mod output;
mod run;
mod shots;
mod spec;
mod template;

pub use builtin::{find, names};
pub use data::{data_in, find_data, read_rows, with_shots};
pub use encode::{Encoder, Truncation};
pub use generate::{Ending, greedy};
pub use likelihood::{Likelihood, Request, log_likelihoods};
pub(crate) use likelihood::{Scorer, Verdict};
pub use longbench::{LongBench, NAMES as LONGBENCH};
pub use metrics::{Figure, Metric};
pub use output::{TaskReport, result_on_file};
pub use run::{TaskOptions, TaskResult, run_task};
pub use spec::{Ask, Generate, Loglikelihood, MultipleChoice, Rolling, TaskSpec, Templates};
pub use template::{NoValue, Template};
