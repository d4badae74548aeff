//! `fox train`: a recipe on some data, in a run folder that can be resumed.

mod dry_run;
mod list;
mod process_group;
mod progress;
mod report;
mod text;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use fox_dist::{Group, Placement};
use fox_tensor::DeviceKind;
use fox_train::data::RunData;
use fox_train::own_messages::{self, OwnConversations};
use fox_train::own_text;
use fox_train::recipe::Weights;
use fox_train::{Recipe, RunFolder, RunSpec, Summary, recipe, train_in};

use crate::device::DeviceArgs;
use crate::{hints, output, signals, subjects};

/// The exit code of a run whose weights or gradients stayed non-finite.
const DIVERGED: u8 = 3;
/// The exit code of a run that was stopped by a signal.
const STOPPED: u8 = 130;
pub use progress::Progress;

/// Train a model from a recipe or on your own text, or resume a run
///
/// RECIPE is a TOML file or the name of a built-in recipe, followed by any number of variants, e.g.
/// tiny-fox-pro, fox-pro-125m+rope or my.toml+no-kv-shift. Without --data the embedded synthetic corpus
/// is read.
///
/// --data may also be text: a file (any UTF-8 text, JSON lines, also compressed), a folder of such files, or - for the
/// standard input. It is prepared in the run folder first; without a RECIPE one is chosen by the size of the data and
/// by what computes, and named. A finished run is extended by the same command with more tokens.
///
/// The run folder gets config.toml (the whole recipe), run.json, metrics.jsonl, tensorboard/,
/// checkpoints/ and, at the end, export/ (a Hugging Face folder with the tokenizer) and summary.json. The same command
/// resumes a run that was stopped, killed or lost power from its last checkpoint, bit for bit.
#[derive(clap::Args)]
pub struct Args {
    /// Recipe: a TOML file or a built-in name, with +VARIANTs
    #[arg(value_name = "RECIPE", required_unless_present_any = ["list", "export", "data"])]
    recipe: Option<String>,
    /// Text, prepared data (fox prepare) or a Zarr array; the embedded corpus by default
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// For text: bytes, gpt2, json-gpt2, or the file or folder of a tokenizer; without it the recipe's, the one of
    /// --init, or one that fits the text's size
    #[arg(long, value_name = "NAME", requires = "data")]
    tokenizer: Option<String>,
    /// Initialize from this checkpoint: a Hugging Face folder, a run folder, or ORG/NAME in the Hugging Face cache; its
    /// model replaces the recipe's, --set model.KEY=VALUE still changes options
    #[arg(long, value_name = "CHECKPOINT")]
    init: Option<PathBuf>,
    /// Run folder; runs/RECIPE by default, or runs/ and the name of the data without a recipe
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Tokens to train on, e.g. 3e6 (training.tokens); more than before extend a finished run
    #[arg(long, value_name = "N", value_parser = parse_tokens, conflicts_with = "epochs")]
    tokens: Option<u64>,
    /// Epochs over the data of --data instead, e.g. 2 or 0.5
    #[arg(long, value_name = "N", value_parser = parse_epochs, requires = "data")]
    epochs: Option<f64>,
    /// Sequences in a step (training.batch)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Peak learning rate (optimizer.peak_lr)
    #[arg(long, value_name = "X", value_parser = parse_rate)]
    lr: Option<f64>,
    /// Change a key of the recipe, e.g. training.tokens=1e6
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print the whole recipe and the memory and time it would take, from a few steps that are not kept; write nothing
    #[arg(long, conflicts_with_all = ["list", "export"])]
    dry_run: bool,
    /// Train the matching Transformer (RoPE instead of forget gates) as well, in DIR-transformer, and compare
    #[arg(long, conflicts_with_all = ["dry_run", "init", "export", "list"])]
    baseline: bool,
    /// Print only the result
    #[arg(long)]
    quiet: bool,
    /// Print the result, or the figures of --dry-run, as JSON
    #[arg(long, conflicts_with_all = ["list", "export"])]
    json: bool,
    /// List the built-in recipes and variants
    #[arg(long)]
    list: bool,
    /// Write the newest checkpoint of the run in --out as a Hugging Face folder and stop
    #[arg(long, value_name = "DIR", requires = "out")]
    export: Option<PathBuf>,
    /// Which weights --export writes; by default those that evaluation.weights of the recipe names
    #[arg(long, value_name = "WHICH", requires = "export")]
    weights: Option<WhichWeights>,
}

/// Weights of a run.
#[derive(Clone, Copy, clap::ValueEnum)]
enum WhichWeights {
    /// As the last step left them
    Raw,
    /// Their average (training.ema)
    Ema,
}

impl From<WhichWeights> for Weights {
    fn from(which: WhichWeights) -> Self {
        match which {
            WhichWeights::Raw => Weights::Raw,
            WhichWeights::Ema => Weights::Ema,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.list {
        output::print(&list::list()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let (Some(to), Some(run)) = (&args.export, &args.out) {
        let weights = args.weights.map(Weights::from);
        let step = match fox_train::export_run(run, to, weights, &args.device.open()?) {
            Err(fox_train::Error::NoRun { .. }) => bail!(hints::no_run(run)),
            step => step?,
        };
        output::print(&format!("{}: the model after step {step}\n", to.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(what) = args.data.as_deref().and_then(hints::folder_as_data) {
        bail!(what);
    }
    let mut out = args.out()?;
    let placement = Placement::from_env()?;
    if args.dry_run {
        if placement.is_some() {
            bail!("a dry run is one process; `fox info RECIPE --gpus N` plans several");
        }
        return dry_run::run(args, &out, &args.device.open()?);
    }
    let open = || args.device.open_at(placement.as_ref());
    // A GPU takes a while to open. Several processes meet before it, so that none waits for one that is lost meanwhile.
    let opened = match placement.is_some() && args.recipe.is_some() {
        true => None,
        false => Some(open()?),
    };
    let speaks = placement.as_ref().is_none_or(|place| place.rank == 0);
    let trains = Arc::new(AtomicBool::new(false));
    let training = Arc::clone(&trains);
    let stop = signals::on_stop(move || match training.load(Ordering::Relaxed) {
        true if speaks => say_stopping(),
        true => {}
        false => output::note("\nstopping; what is prepared stays"),
    })?;
    let on_gpu = opened.as_ref().is_some_and(|device| device.backend().kind() == DeviceKind::Cuda);
    let mut recipe = args.recipe(&mut out, on_gpu, placement.is_some(), &stop)?;
    if !args.sets("schedule.warmup_tokens") {
        RunFolder::keep_older_warmup(&out, &mut recipe)?;
    }
    let baseline = match args.baseline {
        true if placement.is_some() => bail!("--baseline is for one process; leave it out here"),
        true => Some(recipe.transformer_baseline()?),
        false => None,
    };
    // Before they meet: each says the same sentence, and none takes another's mistake for a loss.
    recipe.check_ranks(placement.as_ref().map_or(1, |place| place.size))?;
    // The runs of an experiment are what their recipe gives from the beginning.
    if speaks && !fox_lab::events::enabled() {
        RunFolder::extend(&out, &recipe)?;
    }
    trains.store(true, Ordering::Relaxed);
    let group = process_group::join(placement.as_ref(), &recipe)?;
    let device = match opened {
        Some(device) => device,
        None => open().inspect_err(|error| group.fail(&format!("{error:#}")))?,
    };
    let command: Vec<String> = std::env::args().collect();
    let spec =
        RunSpec { recipe, out: out.clone(), device: device.clone(), command: command.clone() };
    let Some(summary) = train_one(&spec, &group, args.quiet, speaks, &stop)? else {
        return Ok(ExitCode::from(DIVERGED));
    };
    // With a baseline there is one JSON document at the end.
    if speaks && !(args.json && baseline.is_some() && summary.finished) {
        output::print(&match args.json {
            true => format!("{}\n", serde_json::to_string_pretty(&summary)?),
            false => report::text(&summary, &out),
        })?;
    }
    if !summary.finished {
        return Ok(ExitCode::from(STOPPED));
    }
    let Some(recipe) = baseline else { return Ok(ExitCode::SUCCESS) };
    let mut other = out.clone().into_os_string();
    other.push("-transformer");
    let spec = RunSpec { recipe, out: PathBuf::from(other), device, command };
    if !fox_lab::events::enabled() {
        RunFolder::extend(&spec.out, &spec.recipe)?;
    }
    let alone = Arc::new(Group::alone());
    let Some(compared) = train_one(&spec, &alone, args.quiet, true, &stop)? else {
        return Ok(ExitCode::from(DIVERGED));
    };
    if args.json {
        let both = serde_json::json!({ "model": summary, "baseline": compared });
        output::print(&format!("{}\n", serde_json::to_string_pretty(&both)?))?;
    } else {
        output::print(&report::text(&compared, &spec.out))?;
    }
    if !compared.finished {
        return Ok(ExitCode::from(STOPPED));
    }
    if !args.json {
        output::print(&report::comparison((&summary, &out), (&compared, &spec.out)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One run from beginning to end; `None` where its weights or gradients stayed non-finite.
fn train_one(
    spec: &RunSpec,
    group: &Arc<Group>,
    quiet: bool,
    speaks: bool,
    stop: &AtomicBool,
) -> Result<Option<Summary>> {
    let mut progress = Progress::new(quiet || !speaks);
    let trained = train_in(spec, group, &mut |event| {
        if speaks {
            progress.show(event);
        }
        match stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    progress.finish();
    match trained {
        Err(error @ (fox_train::Error::NotFinite { .. } | fox_train::Error::Diverged { .. })) => {
            output::fatal(&error.to_string(), true);
            Ok(None)
        }
        other => Ok(Some(other?.summary)),
    }
}

impl Args {
    fn out(&self) -> Result<PathBuf> {
        match (&self.out, &self.recipe, &self.data) {
            (Some(out), ..) => Ok(out.clone()),
            (None, Some(name), _) => Ok(default_out(name)),
            (None, None, Some(data)) if data != Path::new(text::STANDARD_INPUT) => {
                Ok(Path::new("runs").join(data.file_stem().unwrap_or_else(|| "text".as_ref())))
            }
            (None, None, Some(_)) => bail!("name a folder for the run with --out"),
            (None, None, None) => bail!("name a recipe; `fox train --list` shows them"),
        }
    }

    /// The recipe that is named or fits the data, which are prepared first if they are text.
    fn recipe(
        &self,
        out: &mut PathBuf,
        on_gpu: bool,
        ranks: bool,
        stop: &AtomicBool,
    ) -> Result<Recipe> {
        let mut data = self.data.clone();
        if let Some(file) = self.conversations() {
            if ranks {
                bail!(
                    "several processes cannot divide {}; give a recipe with data.messages.path and leave --data out",
                    file.display()
                );
            }
            RunFolder::check_for_text(out)?;
            let own = OwnConversations::divide(file, &out.join(text::DATA))?;
            text::announce_conversations(file, &own);
            return self.recipe_of_conversations(&own, on_gpu);
        }
        if let Some(text) = self.data.as_deref().filter(|path| text::is_text(path)) {
            if ranks {
                bail!(
                    "several processes cannot prepare {} at once; do it before with `fox prepare`",
                    text.display()
                );
            }
            let prepared = text::prepare(text, out, self.text_tokenizer()?.as_deref(), stop)?;
            data = Some(prepared);
        } else if self.tokenizer.is_some() {
            bail!("--tokenizer is for text; the data that --data names were prepared with theirs");
        }
        self.recipe_for(data.as_deref(), on_gpu)
    }

    /// The file of --data, if it holds conversations.
    fn conversations(&self) -> Option<&Path> {
        self.data.as_deref().filter(|path| own_messages::is_conversations(path))
    }

    /// The recipe that is named, or the one that fits conversations.
    fn recipe_of_conversations(&self, own: &OwnConversations, on_gpu: bool) -> Result<Recipe> {
        let mut chosen = own.overrides();
        let recipe = match &self.recipe {
            Some(name) => {
                let has_tokenizer = self.init.is_some() || self.tokenizer.is_some();
                if !has_tokenizer && recipe::load(name, &[])?.data.tokenizer.is_none() {
                    chosen.push("data.tokenizer=bytes".into());
                }
                name
            }
            None => {
                let choice = own.choose(on_gpu)?;
                text::announce(&choice, on_gpu);
                chosen.extend(choice.overrides);
                choice.name
            }
        };
        if let Some(name) = &self.tokenizer {
            chosen.push(format!("data.tokenizer={name}"));
        }
        let recipe = self.load(recipe, None, &chosen)?;
        let data = RunData::open(&recipe)?;
        self.fitted(recipe, &data, None)
    }

    /// The recipe that is named, or the one that fits prepared data; adapted to the data.
    fn recipe_for(&self, data: Option<&Path>, on_gpu: bool) -> Result<Recipe> {
        let recipe = match (&self.recipe, data) {
            (Some(name), _) => self.load(name, data, &[])?,
            (None, None) => bail!("name a recipe; `fox train --list` shows them"),
            (None, Some(path)) => {
                let choice = own_text::choose(path, on_gpu)?;
                text::announce(&choice, on_gpu);
                self.load(choice.name, data, &choice.overrides)?
            }
        };
        match data {
            Some(_) => {
                let data = RunData::open(&recipe)?;
                self.fitted(recipe, &data, None)
            }
            None => Ok(recipe),
        }
    }

    /// Adapts a recipe to its data, and sets the tokens of --epochs. The data may be a sample of so many tokens.
    fn fitted(&self, mut recipe: Recipe, data: &RunData, sampled: Option<u64>) -> Result<Recipe> {
        let fixed = |key: &str| self.sets(key);
        recipe.fit_to(data, fixed);
        if let Some(epochs) = self.epochs {
            let warmup = recipe.schedule.warmup_tokens;
            let epoch = sampled.map_or_else(|| data.epoch_tokens(&recipe), Ok)?;
            recipe.set_tokens((epochs * epoch as f64).ceil().max(1.0) as u64);
            if fixed("schedule.warmup_tokens") {
                recipe.schedule.warmup_tokens = warmup;
            }
        }
        Ok(recipe)
    }

    /// Whether the command line itself has a value of a key.
    fn sets(&self, key: &str) -> bool {
        self.all_overrides(&[]).iter().any(|text| text.trim_start().starts_with(key))
    }

    /// Overrides: those that were chosen for the user, then the shortcuts, then --set.
    fn all_overrides(&self, chosen: &[String]) -> Vec<String> {
        let shortcuts = [
            self.tokens.map(|n| format!("training.tokens={n}")),
            self.batch.map(|n| format!("training.batch={n}")),
            self.lr.map(|x| format!("optimizer.peak_lr={x}")),
        ];
        chosen
            .iter()
            .cloned()
            .chain(shortcuts.into_iter().flatten())
            .chain(self.overrides.clone())
            .collect()
    }

    /// A recipe with the command line's data and changes; what was chosen for the user comes before what they ask for.
    fn load(&self, name: &str, data: Option<&Path>, chosen: &[String]) -> Result<Recipe> {
        if let Some(what) = hints::folder_as_recipe(name) {
            bail!(what);
        }
        let overrides = self.all_overrides(chosen);
        match self.init()? {
            Some(init) => Ok(with_data(recipe::load_from(name, &init, &overrides)?, data)),
            None => load(name, data, &overrides),
        }
    }

    /// The checkpoint to start from; a name is that of a model in the Hugging Face cache.
    fn init(&self) -> Result<Option<PathBuf>> {
        self.init.as_deref().map(subjects::located).transpose()
    }

    /// The tokenizer for a text: what is asked for, what the recipe says, or that of the checkpoint to begin with.
    fn text_tokenizer(&self) -> Result<Option<String>> {
        if self.tokenizer.is_some() {
            return Ok(self.tokenizer.clone());
        }
        if let Some(name) = &self.recipe
            && let Some(tokenizer) = self.load(name, None, &[])?.data.tokenizer
        {
            return Ok(Some(tokenizer));
        }
        let Some(init) = self.init()? else { return Ok(None) };
        let export = init.join("export");
        let folder = if export.is_dir() { export } else { init };
        Ok(Some(folder.display().to_string()))
    }
}

/// Printed at the first signal.
fn say_stopping() {
    output::note("\nstopping after this step with a checkpoint; once more to stop at once");
}

/// A recipe with the command line's data and changes.
pub fn load(name: &str, data: Option<&Path>, overrides: &[String]) -> Result<Recipe> {
    Ok(with_data(recipe::load(name, overrides)?, data))
}

fn with_data(mut recipe: Recipe, data: Option<&Path>) -> Recipe {
    if let Some(path) = data {
        recipe.data.path = Some(path.to_path_buf());
    }
    recipe
}

/// `runs/` and the recipe's name without its folder and ending.
fn default_out(name: &str) -> PathBuf {
    let stem = name.rsplit(['/', '\\']).next().unwrap_or(name).replace(".toml", "");
    Path::new("runs").join(stem)
}

/// A number of tokens: `3000000`, `3_000_000` or `3e6`.
fn parse_tokens(text: &str) -> Result<u64> {
    match text.replace('_', "").parse::<f64>() {
        Ok(x) if (1.0..=1e18).contains(&x) && x.fract() == 0.0 => Ok(x as u64),
        _ => bail!("a whole number of tokens, at least 1, e.g. 3000000 or 3e6"),
    }
}

fn parse_epochs(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= 1e9 => Ok(x),
        _ => bail!("a number above 0, e.g. 2 or 0.5"),
    }
}

fn parse_rate(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x.is_finite() => Ok(x),
        _ => bail!("a number above 0, e.g. 1e-3"),
    }
}
