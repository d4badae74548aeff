//! The training loop: steps, log records, evaluations, checkpoints, and the final export.

use std::f64::consts::LN_2;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use fox_base::durable;
use fox_data::Batch;
use fox_dist::Group;
use fox_model::{Model, TrainFlops};

use crate::checkpoint::CheckpointStore;
use crate::evaluate::Evaluator;
use crate::export::{Companions, export_from};
use crate::gates::{half_lives, pruned_fractions};
use crate::metrics::{EvalRecord, MetricsLog, Record, StepRecord};
use crate::recipe::Weights;
use crate::run_folder::{EXPORT, RunFolder};
use crate::run_spec::{Event, Observer, Outcome, Start};
use crate::stages::Stages;
use crate::step::{BatchLoss, segments};
use crate::stepper::{StepOutcome, Stepper};
use crate::summary::Summary;
use crate::timeline::Timeline;
use crate::{Error, Recipe, Result, sharded_save, tuning};

/// Time and work since the last line of the log.
#[derive(Default)]
pub(crate) struct Throughput {
    seconds: f64,
    tokens: u64,
    flops: f64,
}

/// The files of a run, which one process alone writes.
pub(crate) struct RunFiles {
    pub(crate) folder: RunFolder,
    pub(crate) log: MetricsLog,
}

/// A run under way.
pub(crate) struct TrainLoop<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) flops: TrainFlops,
    pub(crate) start: Start,
    pub(crate) stepper: Stepper,
    pub(crate) stages: Stages,
    pub(crate) evaluator: Option<Evaluator>,
    pub(crate) store: CheckpointStore,
    /// In the first process.
    pub(crate) records: Option<RunFiles>,
    pub(crate) group: Arc<Group>,
    pub(crate) throughput: Throughput,
    pub(crate) observe: &'a mut Observer<'a>,
    /// Whether someone has asked this process to stop.
    pub(crate) asked: bool,
    /// Whether all processes stop: they do after the same step.
    pub(crate) stop: bool,
    /// Still to be written, by the first process.
    pub(crate) timeline: Option<Timeline>,
}

impl TrainLoop<'_> {
    /// Runs the remaining steps, exports the model and writes the summary.
    pub(crate) fn run(mut self, notices: &[String], companions: Companions) -> Result<Outcome> {
        for notice in notices {
            self.report(&Event::Notice(notice));
        }
        let start = self.start.clone();
        self.report(&Event::Started(&start));
        self.agree_to_stop()?;
        if self.stepper.state.step < start.steps && !self.stop {
            self.steps()?;
        }
        let finished = self.stepper.state.step >= start.steps;
        if finished {
            self.check_end(self.param_norm()?)?;
            self.export(&companions)?;
        }
        let Stepper { state, .. } = &self.stepper;
        let summary = match &self.records {
            None => None,
            Some(RunFiles { folder, .. }) => {
                let mut summary = Summary::collect(&self.start, state, finished, folder.path())?;
                let bytes = match (&self.evaluator, &companions.tokenizer) {
                    (Some(evaluator), Some(tokenizer)) => evaluator.bytes_per_token(tokenizer)?,
                    _ => None,
                };
                if let (Some(evaluation), Some(bytes)) = (&summary.evaluation, bytes) {
                    summary.bits_per_byte = Some(evaluation.loss / LN_2 / bytes);
                }
                if finished {
                    summary.write(folder.path())?;
                }
                Some(summary)
            }
        };
        let gone = || fox_dist::Error::Refused("rank 0 sent no summary of the run".into());
        let summary = self.group.broadcast_value(summary)?.ok_or_else(gone)?;
        Ok(Outcome { model: self.stepper.model, tokenizer: companions.tokenizer, summary })
    }

    /// Steps until the end or until someone asks to stop; ends with a checkpoint.
    fn steps(&mut self) -> Result<()> {
        let mut batches = self.stages.prefetch(&self.stepper.state, 2)?;
        while self.stepper.state.step < self.start.steps && !self.stop {
            let begin = Instant::now();
            let Some(batch) = batches.next() else {
                let loader = self.stages.loader(self.stepper.state.step);
                let batches = loader.batches().unwrap_or(0);
                return Err(Error::DataEnd { batches });
            };
            let batch = batch?;
            self.step(&batch, begin)?;
            self.agree_to_stop()?;
            let step = self.stepper.state.step;
            let (last, change) = (step == self.start.steps, self.stages.change_after(step));
            let due = |every: u64| last || (every > 0 && step.is_multiple_of(every));
            if change || due(self.recipe.evaluation.every) {
                self.evaluate()?;
                self.agree_to_stop()?;
            }
            if due(self.recipe.checkpoints.every) || self.stop {
                self.checkpoint()?;
                self.agree_to_stop()?;
            }
            if change && !last {
                batches = self.stages.prefetch(&self.stepper.state, 2)?;
                let length = self.stages.loader(step).config().window;
                self.report(&Event::Notice(&format!("step {step}: sequences of {length} tokens")));
            }
        }
        Ok(())
    }

    fn step(&mut self, batch: &Batch, begin: Instant) -> Result<()> {
        let watched = self.timeline.take_if(|timeline| timeline.is_due());
        let device = self.stepper.model.device().clone();
        if watched.is_some() {
            device.backend().profile(true);
        }
        let StepOutcome { lr, loss, report } = self.stepper.step(batch)?;
        if let Some(timeline) = watched {
            let words = timeline.write(&device, self.group.is_first())?;
            self.report(&Event::Notice(&words));
        }
        let seconds = begin.elapsed().as_secs_f64();
        self.stepper.state.seconds += seconds;
        let state = self.stepper.state;
        self.throughput.seconds += seconds;
        self.throughput.tokens += batch.inputs.len() as u64;
        self.throughput.flops += self.flops.of(&segments(batch, 0, batch.batch)?);
        let finite = |x: f64| x.is_finite().then_some(x);
        let record = StepRecord {
            step: state.step,
            tokens: state.tokens,
            loss: finite(loss.mean),
            lr,
            grad_norm: finite(report.grad_norm),
            skipped: report.skipped,
            skips: state.skips,
            epoch: self.stages.loader(state.step - 1).epoch_of(batch.number()),
            tokens_per_second: self.throughput.tokens as f64 / self.throughput.seconds,
            floor_fraction: self.throughput.flops
                / (self.start.gemm_rate * self.group.size() as f64)
                / self.throughput.seconds,
            memory: self.stepper.model.device().memory().into(),
            seconds: state.seconds,
            time: unix_time(),
            ..StepRecord::default()
        };
        self.record(record, batch, &loss)?;
        if state.skips_in_a_row >= self.recipe.training.max_skips {
            let (steps, last) = (state.skips_in_a_row, state.step);
            return Err(Error::NotFinite { steps, last });
        }
        Ok(())
    }

    /// Writes a line when it is due, with details when those are due, and reports the step.
    fn record(&mut self, mut record: StepRecord, batch: &Batch, loss: &BatchLoss) -> Result<()> {
        let step = record.step;
        let edge = step == 1 || step == self.start.steps;
        let due = |every: u64| every > 0 && (step.is_multiple_of(every) || edge);
        let details = due(self.recipe.metrics.details_every);
        let written = due(self.recipe.metrics.every) || details || record.skipped;
        if written {
            self.throughput = Throughput::default();
        }
        // Where weights are sharded, all processes take part.
        let sharded = self.stepper.model.params().is_sharded();
        if written && (self.records.is_some() || sharded) {
            record.param_norm = Some(self.param_norm()?);
            record.exchanged = Some(loss.traffic.iter().map(|t| [t.fetched, t.full]).collect())
                .filter(|layers: &Vec<_>| !layers.is_empty());
            if details {
                record.pruned = Some(pruned_fractions(&loss.tiles)?);
                // As many tokens as a process has in memory anyhow.
                let tokens = batch.time / self.recipe.parallel.context;
                let options = self.stepper.options_now();
                let lives = half_lives(&self.stepper.model, batch, tokens, &options);
                let reason = |error| self.stepper.updater.weights_failure().unwrap_or(error);
                record.half_lives = Some(lives.map_err(reason)?);
            }
            self.write(&Record::Train(record.clone()))?;
        }
        self.report(&Event::Step(&record));
        if record.skipped {
            let notice = format!(
                "step {step}: the gradient is not finite, the update is left out ({} in all)",
                record.skips
            );
            self.report(&Event::Notice(&notice));
        }
        Ok(())
    }

    fn param_norm(&self) -> Result<f64> {
        self.stepper.updater.param_norm(&self.stepper.model)
    }

    fn evaluate(&mut self) -> Result<()> {
        let Some(evaluator) = &self.evaluator else { return Ok(()) };
        let begin = Instant::now();
        let options = self.stepper.options_now();
        let Stepper { model, updater, .. } = &mut self.stepper;
        let run = |model: &Model| evaluator.run_in(model, &options, &self.group);
        let found = match self.recipe.evaluation.weights {
            Weights::Raw => run(model),
            Weights::Ema => updater.with_average(model, run),
        };
        let evaluation = found.map_err(|error| updater.weights_failure().unwrap_or(error))?;
        let record = EvalRecord {
            step: self.stepper.state.step,
            tokens: self.stepper.state.tokens,
            evaluation,
            eval_seconds: begin.elapsed().as_secs_f64(),
            time: unix_time(),
        };
        self.write(&Record::Eval(record.clone()))?;
        self.report(&Event::Evaluated(&record));
        self.check_end(record.evaluation.loss)
    }

    /// Refuses to end with a model that computes nothing; before the end there is hope.
    fn check_end(&self, figure: f64) -> Result<()> {
        let step = self.stepper.state.step;
        match figure.is_finite() || step < self.start.steps {
            true => Ok(()),
            false => Err(Error::Diverged { step }),
        }
    }

    fn checkpoint(&mut self) -> Result<()> {
        // A checkpoint must never be ahead of the lines that belong to it.
        if let Some(records) = &mut self.records {
            records.folder.check_present()?;
            records.log.sync()?;
        }
        let Stepper { model, updater, state, .. } = &self.stepper;
        let path = self.store.write(model, updater, state)?;
        let step = state.step;
        self.report(&Event::Checkpoint { step, path: &path });
        Ok(())
    }

    /// Leaves the weights that were asked for in the model, and in the folder.
    fn export(&mut self, companions: &Companions) -> Result<()> {
        let Stepper { model, updater, .. } = &mut self.stepper;
        if self.recipe.evaluation.weights == Weights::Ema {
            updater.put_average(model)?;
        }
        let strength = self.recipe.training.rope_strength(self.stepper.state.tokens);
        tuning::settle_rope(&mut self.stepper.model, strength)?;
        let Stepper { model, updater, .. } = &self.stepper;
        let Some(records) = &self.records else {
            return sharded_save::send_to_first(model, updater);
        };
        records.folder.check_present()?;
        let folder = records.folder.path().join(EXPORT);
        let vacant = durable::is_vacant(&folder)?;
        let exported = match vacant {
            true => sharded_save::at_first(model, updater, |values| {
                export_from(model, values, companions, &folder)
            }),
            false => sharded_save::at_first(model, updater, |_| Ok(())),
        };
        exported?;
        if vacant {
            self.report(&Event::Exported(&folder));
        }
        Ok(())
    }

    /// Writes a line of the log, in the process that has it.
    fn write(&mut self, record: &Record) -> Result<()> {
        self.records.as_mut().map_or(Ok(()), |records| records.log.write(record))
    }

    fn report(&mut self, event: &Event<'_>) {
        self.asked |= (self.observe)(event).is_break();
    }

    /// Stops all processes when one was asked to, at the same place of the program: each waits for the others in what
    /// comes next.
    fn agree_to_stop(&mut self) -> Result<()> {
        self.stop = self.group.any(self.asked)?;
        Ok(())
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
