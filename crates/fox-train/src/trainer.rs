//! A run from beginning to end: what it needs is loaded or resumed here; train_loop.rs has its steps.
//!
//! [`train`] is all that a program needs. It reports through a callback and stops in good order,
//! with a checkpoint, when the callback asks for it.

use std::sync::Arc;
use std::time::Duration;

use fox_dist::Group;
use fox_model::{ModelConfig, TrainFlops};
use fox_tensor::speed::matmul_rate_within;
use fox_tensor::{Device, WeightFormat};

use crate::checkpoint::{CheckpointStore, Resumed, RunState};
use crate::data::RunData;
use crate::evaluate::Evaluator;
use crate::export::Companions;
use crate::metrics::MetricsLog;
use crate::optimizer::Updater;
use crate::recipe::{Exchange, Weights};
use crate::run_folder::{EXPORT, RunFolder, RunInfo, StartInfo};
use crate::run_spec::{Observer, Outcome, RunSpec, Start};
use crate::sharded_weights::ResidentParams;
use crate::stages::Stages;
use crate::stepper::Stepper;
use crate::summary::Summary;
use crate::timeline::Timeline;
use crate::train_loop::{RunFiles, Throughput, TrainLoop, unix_time};
use crate::{Error, Recipe, Result, memory_check, tuning};

/// A recipe that was checked against its data, its device and the number of processes. Training and dry runs share the
/// checks.
pub(crate) struct ValidatedRun {
    pub config: ModelConfig,
    pub stages: Stages,
    pub evaluator: Option<Evaluator>,
}

impl ValidatedRun {
    pub fn new(recipe: &Recipe, data: &RunData, device: &Device, ranks: usize) -> Result<Self> {
        recipe.check_length()?;
        recipe.check_ranks(ranks)?;
        let config = recipe.model_config(data.train.vocab_size())?;
        recipe.check_tuning(&config)?;
        recipe.check_context(&config)?;
        memory_check::check(recipe, &config, device, ranks)?;
        let stages = Stages::new(data, recipe)?;
        let masking = recipe.masking(&config)?;
        let evaluator = data.evaluator(recipe)?.map(|evaluator| evaluator.masked(masking));
        Ok(ValidatedRun { config, stages, evaluator })
    }
}

/// When the ops of one step ran, in a run folder.
const TIMELINE: &str = "timeline.json";

/// What a user should know before a run, not after it.
const NO_HELD_OUT: &str = "WARNING: no data are held out, so overfitting will not be visible; hold out a fraction of the text when it is prepared, or name other data in data.heldout";

/// How long a run may measure the device before it begins.
pub(crate) const RATE_LIMIT: Duration = Duration::from_millis(150);

/// Trains, or resumes a run that was interrupted. A finished run is only read.
///
/// # Errors
/// A recipe, data or folder that do not fit; a disk that is full; gradients that stay non-finite. The
/// last good checkpoint stays in all cases.
pub fn train(spec: &RunSpec, observe: &mut Observer<'_>) -> Result<Outcome> {
    train_in(spec, &Arc::new(Group::alone()), observe)
}

/// [`train`] as one of several processes that all call this with the same recipe and data. Each computes the gradient of
/// its rows of every batch and updates the parameters it owns. The first one writes the run folder; the others
/// report to their callback, too, and any of them may stop the run.
///
/// # Errors
/// As [`train`], and the loss of a process, which ends all of them.
pub fn train_in(spec: &RunSpec, group: &Arc<Group>, observe: &mut Observer<'_>) -> Result<Outcome> {
    let outcome = run(spec, group, observe);
    match &outcome {
        Ok(_) => group.leave()?,
        Err(error) => {
            // A device may be the first to notice that a rank is gone.
            let device = matches!(
                error,
                Error::Tensor(_) | Error::Model(_) | Error::Group(fox_dist::Error::Tensor(_))
            );
            if let Some(words) = device.then(|| group.loss()).flatten() {
                return Err(fox_dist::Error::Lost(words).into());
            }
            // Other errors of the group have been said already.
            if device || !matches!(error, Error::Group(_)) {
                group.fail(&error.to_string());
            }
        }
    }
    outcome
}

fn run(spec: &RunSpec, group: &Arc<Group>, observe: &mut Observer<'_>) -> Result<Outcome> {
    let recipe = &spec.recipe;
    let data = RunData::open(recipe)?;
    let ValidatedRun { config, stages, evaluator } =
        ValidatedRun::new(recipe, &data, &spec.device, group.size())?;
    let identity = data.train.identity();
    group.check_same(&identity, "other data", "give all ranks the same data")?;
    let exchange = match recipe.parallel.exchange {
        Exchange::Device => group.connect(&spec.device)?,
        Exchange::Host => group.by_host(),
    };
    let store = CheckpointStore::of_run(&spec.out, recipe);
    if recipe.training.init.is_some() && store.steps()?.is_empty() {
        // Before the folder belongs to a run that cannot begin.
        recipe.check_init(&config, &data)?;
    }
    let folder = match group.is_first() {
        true => Some(RunFolder::open(&spec.out, recipe, &identity)?),
        false => None,
    };
    let (optimizer, ema) = (&recipe.optimizer, recipe.training.ema);
    let resumed = match store.resume_in(optimizer, ema, &spec.device, group)? {
        Some(resumed) => resumed,
        None => {
            let kept = ResidentParams::new(recipe.parallel.shard, group);
            let keeps = kept.of(&config);
            let mut model = recipe.initial_model_where(&config, &spec.device, &|id| keeps[id.0])?;
            let mut updater =
                Updater::in_group(optimizer, ema, model.params(), &spec.device, group)?;
            if kept.is_sharded() {
                updater.shard_weights(&mut model);
            }
            let state = RunState::start(stages.start());
            Resumed { model, updater, state, notices: Vec::new() }
        }
    };
    let Resumed { mut model, updater, state, mut notices } = resumed;
    notices.extend(recipe.notices.iter().cloned());
    if data.heldout.is_none() {
        notices.push(NO_HELD_OUT.to_owned());
    }
    model.pack_weights(WeightFormat::F32)?;
    stages.check(&state)?;
    let over = state.step >= recipe.steps() && spec.out.join(EXPORT).exists();
    let finished = match group.is_first() {
        true => Summary::read(&spec.out)?.filter(|run| over && run.steps == state.step),
        false => None,
    };
    if let (Some(folder), true) = (&folder, state.step < recipe.steps()) {
        folder.reopen()?;
    }
    if let Some(summary) = group.broadcast_value(finished)? {
        tuning::settle_rope(&mut model, recipe.training.rope_strength(state.tokens))?;
        if recipe.evaluation.weights == Weights::Ema {
            updater.put_average(&mut model)?;
        }
        return Ok(Outcome { model, tokenizer: data.tokenizer, summary });
    }
    recipe.give_teacher(&mut model)?;
    // Generated data have no end.
    let has_epochs = recipe.data.path.is_some() || recipe.data.messages.is_some();
    let start = Start {
        recipe: recipe.name.clone(),
        parameters: model.params().count(),
        steps: recipe.steps(),
        tokens_per_step: recipe.tokens_per_step(),
        from_step: state.step,
        gemm_rate: matmul_rate_within(&spec.device, RATE_LIMIT)?,
        device: spec.device.to_string(),
        processes: group.size(),
        link: group.link_speed(&spec.device)?,
        exchange,
        data: identity,
        epoch_tokens: has_epochs.then(|| data.epoch_tokens(recipe)).transpose()?,
    };
    let records = match folder {
        None => None,
        Some(folder) => {
            notices.extend(folder.note_start(run_info(spec, &data, &start))?);
            let (log, damage) = MetricsLog::open(folder.path(), state.step)?;
            notices.extend(damage);
            Some(RunFiles { folder, log })
        }
    };
    let session = TrainLoop {
        timeline: recipe.metrics.timeline.then(|| Timeline::new(spec.out.join(TIMELINE))),
        recipe,
        flops: TrainFlops::new(model.config()),
        records,
        group: group.clone(),
        throughput: Throughput::default(),
        start,
        stepper: Stepper::new(recipe, model, updater, state)?,
        stages,
        evaluator,
        store,
        observe,
        asked: false,
        stop: false,
    };
    let RunData { tokenizer, chat, .. } = data;
    session.run(&notices, Companions { tokenizer, chat, init: recipe.init_folder()? })
}

fn run_info(spec: &RunSpec, data: &RunData, start: &Start) -> RunInfo {
    RunInfo {
        recipe: start.recipe.clone(),
        data: start.data.clone(),
        tokenizer: data.train.tokenizer_identity(),
        parameters: start.parameters,
        starts: vec![StartInfo {
            version: env!("CARGO_PKG_VERSION").to_string(),
            command: spec.command.clone(),
            device: start.device.clone(),
            processes: start.processes,
            link: start.link,
            exchange: start.exchange.clone(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            from_step: start.from_step,
            time: unix_time(),
        }],
    }
}
