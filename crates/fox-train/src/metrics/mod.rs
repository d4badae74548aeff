//! What is written down about a run: metrics.jsonl, and the same numbers as TensorBoard events.

mod events;
mod log;

pub use events::EventWriter;
pub use log::{Logged, MetricsLog};

use fox_tensor::MemoryStats;
use serde::{Deserialize, Serialize};

use crate::evaluate::Evaluation;

/// One line of metrics.jsonl.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// After a step.
    Train(StepRecord),
    /// After an evaluation.
    Eval(EvalRecord),
}

impl Record {
    /// The step it follows.
    pub fn step(&self) -> u64 {
        match self {
            Record::Train(record) => record.step,
            Record::Eval(record) => record.step,
        }
    }
}

/// What is known after a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Steps done, this one included.
    pub step: u64,
    /// Tokens consumed, this step's included.
    pub tokens: u64,
    /// Mean loss of the step's batch in nats per token; null when it is not finite.
    pub loss: Option<f64>,
    /// Learning rate of the step.
    pub lr: f64,
    /// Norm of the gradient before clipping; null when it is not finite.
    pub grad_norm: Option<f64>,
    /// Whether the update was left out because the gradient was not finite.
    pub skipped: bool,
    /// Steps left out since the beginning.
    pub skips: u64,
    /// Pass over the data, from 0.
    pub epoch: u64,
    /// Since the last line.
    pub tokens_per_second: f64,
    /// Time that the step's FLOPs would take as one matrix product, relative to the time it took.
    pub floor_fraction: f64,
    /// Norm of all trained parameters after the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub param_norm: Option<f64>,
    /// Device memory in bytes.
    pub memory: Memory,
    /// Seconds of training since the beginning, those before a resume included.
    pub seconds: f64,
    /// Seconds since 1970.
    pub time: f64,
    /// Part of the attention blocks left out, per layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pruned: Option<Vec<f64>>,
    /// Bytes of earlier keys, values and gates that processes which share sequences sent each other in the forward
    /// pass, and those of a full exchange, per layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchanged: Option<Vec<[u64; 2]>>,
    /// Median half-life of the forget gates in tokens, per layer and head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub half_lives: Option<Vec<Vec<f64>>>,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Held now.
    pub in_use: usize,
    /// The most that was ever held.
    pub peak: usize,
    /// Taken from the system.
    pub reserved: usize,
}

impl From<MemoryStats> for Memory {
    fn from(stats: MemoryStats) -> Self {
        Memory { in_use: stats.in_use, peak: stats.peak, reserved: stats.reserved }
    }
}

/// What is known after an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Steps done.
    pub step: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// The losses.
    #[serde(flatten)]
    pub evaluation: Evaluation,
    /// Seconds that the evaluation took.
    pub eval_seconds: f64,
    /// Seconds since 1970.
    pub time: f64,
}
