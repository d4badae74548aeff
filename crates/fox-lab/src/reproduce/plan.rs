//! The runs of all experiments at a scale.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use fox_train::{Recipe, recipe};
use toml::Value;

use super::{
    EXPERIMENTS, Experiment, Layout, Measurement, PlannedStart, RATES, RowConfig, ScaleConfig,
};
use crate::graph::{TrainRun, folder_name};
use crate::sweep::recipe_settings;

/// Steps of a run whose speed is measured alone.
const ALONE_STEPS: u64 = 12;
/// Its learning rate: no influence on the speed, and no model diverges.
pub(crate) const ALONE_RATE: f64 = 1e-4;

/// Options of a reproduction besides the scale.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReproductionOptions {
    /// Experiments by name; empty for all of the paper.
    pub only: Vec<String>,
    /// Folder of runs and report.
    pub out: PathBuf,
    /// Tokens per run; the scale's by default.
    pub tokens: Option<u64>,
    /// Seeds; the scale's by default.
    pub seeds: Option<u64>,
    /// Prepared data; the embedded corpus by default.
    pub data: Option<PathBuf>,
    /// Held-out segments; the held-out documents of the data by default.
    pub heldout: Option<PathBuf>,
}

/// A run, whose learning rate may have to be searched first.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRun {
    /// Index of its experiment.
    pub experiment: usize,
    /// Index of its row in the experiment.
    pub row: usize,
    /// Its seed.
    pub seed: u64,
    /// Tokens to train on.
    pub tokens: u64,
    /// Name of the recipe, with variants.
    pub spec: String,
    /// The model whose searched learning rate it uses, unless `lr` is given.
    pub rate: String,
    /// Its peak learning rate, if none is searched.
    pub lr: Option<f64>,
    /// The checkpoint it starts from; random weights by default.
    pub start: Option<PlannedStart>,
    /// Measurements after training.
    pub measurements: Vec<Measurement>,
    /// Whether nothing else may run at the same time.
    pub exclusive: bool,
    /// Overrides of the recipe, except for the learning rate.
    settings: Vec<String>,
    /// The overrides that distinguish it from other runs of the recipe, as parts of its folder name.
    distinct: Vec<String>,
}

impl PlannedRun {
    /// `key=value` overrides of the recipe.
    fn settings(&self, lr: f64) -> Vec<String> {
        let mut settings = self.settings.clone();
        settings.push(format!("optimizer.peak_lr={lr:e}"));
        settings
    }

    /// The name of its folder: equal only for equal runs.
    pub fn folder(&self, lr: f64) -> String {
        let distinct: String = self.distinct.iter().map(|part| format!("_{part}")).collect();
        let exclusive = if self.exclusive { "_alone" } else { "" };
        let (spec, tokens, seed) = (&self.spec, self.tokens, self.seed);
        folder_name(&format!("{spec}_{tokens}{distinct}_lr{lr:e}_seed{seed}{exclusive}"))
    }

    /// The recipe, without data.
    pub fn recipe(&self, lr: f64) -> Result<Recipe> {
        Ok(recipe::load(&self.spec, &self.settings(lr))?)
    }

    /// A few steps of the recipe with nothing else on the device: their throughput and memory.
    pub(crate) fn alone(&self) -> Result<PlannedRun> {
        let tokens = ALONE_STEPS * self.recipe(ALONE_RATE)?.tokens_per_step();
        let mut run = PlannedRun { tokens, exclusive: true, ..self.clone() };
        run.distinct.push("speed".into());
        run.settings.extend([
            format!("training.tokens={tokens}"),
            "schedule.warmup_tokens=0".into(),
            "metrics.every=4".into(),
            "metrics.details_every=0".into(),
            "checkpoints.every=0".into(),
        ]);
        Ok(run)
    }

    /// The training run at a learning rate.
    pub(crate) fn train_run(&self, lr: f64, options: &ReproductionOptions) -> TrainRun {
        let label = self.folder(lr);
        TrainRun {
            spec: self.spec.clone(),
            settings: self.settings(lr),
            data: options.data.clone(),
            folder: options.out.join("runs").join(&label),
            label,
        }
    }
}

/// All runs of the experiments at a scale.
#[derive(Clone, Debug)]
pub struct Reproduction {
    /// Model size, token budget and evaluation lengths.
    pub scale: ScaleConfig,
    /// Other options.
    pub options: ReproductionOptions,
    /// The experiments, the learning-rate search first.
    pub experiments: Vec<Experiment>,
    /// The runs, except for those of searches.
    pub runs: Vec<PlannedRun>,
    /// One per model whose learning rate is searched.
    pub searches: Vec<PlannedRun>,
    /// Length of the training sequences.
    pub training_length: usize,
}

impl Reproduction {
    /// Plans the runs of the experiments.
    ///
    /// # Errors
    /// An unknown experiment, an invalid recipe.
    pub fn new(scale: ScaleConfig, options: ReproductionOptions) -> Result<Reproduction> {
        for name in &options.only {
            Experiment::load(name)?;
        }
        let mut experiments = Vec::new();
        for (name, _) in EXPERIMENTS {
            let experiment = Experiment::load(name)?;
            let named = options.only.iter().any(|n| n == name);
            let included = named || (options.only.is_empty() && !experiment.extra);
            // All other experiments need the learning rates.
            if included || *name == RATES {
                experiments.push(experiment.filled(&scale.window, &scale.memory));
            }
        }
        add_searches(&mut experiments);
        let base = format!("fox-pro-{}", scale.suffix);
        let mut table = recipe::load_table(&base)?;
        recipe::merge(&mut table, scale.set.clone());
        let training_length = recipe::parse_table(&base, table)?.data.sequence_length;
        let mut plan = Reproduction {
            scale,
            options,
            experiments,
            runs: Vec::new(),
            searches: Vec::new(),
            training_length,
        };
        plan.add_runs()?;
        Ok(plan)
    }

    fn add_runs(&mut self) -> Result<()> {
        let (mut runs, mut searches) = (Vec::new(), Vec::new());
        for (e, experiment) in self.experiments.iter().enumerate() {
            for (r, row) in experiment.rows.iter().enumerate() {
                if experiment.shape == Layout::Rates {
                    searches.push(self.run((e, experiment), (r, row), 0)?);
                    continue;
                }
                let repeated = if row.repeated { self.seeds() } else { 1 };
                for seed in 0..repeated {
                    runs.push(self.run((e, experiment), (r, row), seed)?);
                }
            }
        }
        // The first seeds of all rows come first, so that an early report has every row.
        runs.sort_by_key(|run: &PlannedRun| (run.experiment, run.seed));
        let search_only = self.options.only.iter().any(|name| name == RATES);
        if !search_only && !self.options.only.is_empty() {
            let needed = |model: &str| {
                runs.iter().any(|run: &PlannedRun| run.lr.is_none() && run.rate == model)
            };
            searches.retain(|search| needed(&search.rate));
        }
        (self.runs, self.searches) = (runs, searches);
        Ok(())
    }

    fn run(
        &self,
        (e, experiment): (usize, &Experiment),
        (r, row): (usize, &RowConfig),
        seed: u64,
    ) -> Result<PlannedRun> {
        let spec = with_suffix(&row.model, &self.scale.suffix);
        let mut table = recipe::load_table(&spec)?;
        recipe::merge(&mut table, self.scale.set.clone());
        let mut overrides = Vec::new();
        for (key, factor) in &row.times {
            // Keys that the recipe does not set follow from others.
            let Some(value) = at(&table, key) else { continue };
            let value = value.as_integer().with_context(|| {
                format!("{spec}: `{key}` is not an integer, so it cannot be multiplied")
            })?;
            let product = (value as f64 * factor).round() as i64;
            overrides.push(format!("{key}={product}"));
        }
        overrides.extend(row.set.iter().map(|(key, value)| format!("{key}={value}")));
        let share = match experiment.shape {
            Layout::Rates => self.scale.search.unwrap_or(experiment.share),
            _ => experiment.share,
        };
        let tokens = (share * self.tokens() as f64).round().max(1.0) as u64;
        let warmup = (self.scale.warmup * tokens as f64) as u64;
        let mut settings = recipe_settings(&self.scale.set);
        settings.extend([
            format!("training.tokens={tokens}"),
            format!("training.seed={seed}"),
            format!("data.shuffle_seed={seed}"),
            format!("schedule.warmup_tokens={warmup}"),
            format!("evaluation.length={}", self.training_length),
        ]);
        if let Some(path) = &self.options.heldout {
            settings.push(format!("data.heldout={}", Value::from(path.display().to_string())));
        }
        let mut distinct: Vec<String> = overrides.iter().map(|setting| short(setting)).collect();
        settings.extend(overrides);
        let base = recipe::load(&spec, &settings)?;
        let start = match &row.start {
            None => None,
            Some(config) => {
                let earlier = experiment.rows[..r].iter().position(|row| row.name == config.row);
                let Some(first) = earlier else {
                    bail!(
                        "{}: `start.row` is `{}`, which is not an earlier row",
                        row.name,
                        config.row
                    );
                };
                let run = self.run((e, experiment), (first, &experiment.rows[first]), seed)?;
                let start =
                    PlannedStart::new(config, run, self.training_length, &self.options.out)?;
                let (more, name) = start.settings(config, tokens, base.data.sequence_length)?;
                settings.extend(more);
                distinct.extend(name);
                Some(start)
            }
        };
        // Heads and speed are measured for one seed, needles where they are the main result for all.
        let all = experiment.shape == Layout::Longer;
        let repeated = [Measurement::Loss, Measurement::Candidates];
        let included = |m: &Measurement| all || seed == 0 || repeated.contains(m);
        let run = PlannedRun {
            experiment: e,
            row: r,
            seed,
            tokens,
            spec,
            rate: row.rate().to_string(),
            lr: row.lr.map(|times| times * base.optimizer.peak_lr),
            start,
            measurements: experiment.evaluate.iter().copied().filter(included).collect(),
            exclusive: experiment.shape == Layout::Pruning,
            settings,
            distinct,
        };
        // Invalid overrides are reported before anything is trained.
        run.recipe(1e-3)?;
        Ok(run)
    }

    /// Tokens of a run of an experiment with `share = 1`.
    pub fn tokens(&self) -> u64 {
        self.options.tokens.unwrap_or(self.scale.tokens)
    }

    /// Seeds of repeated rows.
    pub fn seeds(&self) -> u64 {
        self.options.seeds.unwrap_or(self.scale.seeds)
    }

    /// The runs of a row, in order of their seeds.
    pub(crate) fn runs_of(
        &self,
        experiment: usize,
        row: usize,
    ) -> impl Iterator<Item = &PlannedRun> {
        self.runs.iter().filter(move |run| run.experiment == experiment && run.row == row)
    }
}

/// Adds a search for every model whose rate is needed and not listed.
fn add_searches(experiments: &mut [Experiment]) {
    let Some((searches, others)) = experiments.split_first_mut() else { return };
    for row in others.iter().flat_map(|experiment| &experiment.rows) {
        let known = searches.rows.iter().any(|search| search.rate() == row.rate());
        if row.lr.is_some() || known {
            continue;
        }
        let model = row.rate().to_string();
        searches.rows.push(RowConfig::search(row.name.clone(), model));
    }
}

/// `fox-pro+rope` with the suffix `26m` is `fox-pro-26m+rope`.
fn with_suffix(model: &str, suffix: &str) -> String {
    match model.split_once('+') {
        Some((base, variants)) => format!("{base}-{suffix}+{variants}"),
        None => format!("{model}-{suffix}"),
    }
}

/// The value at `section.key`.
fn at<'a>(table: &'a toml::Table, key: &str) -> Option<&'a Value> {
    let (section, key) = key.split_once('.')?;
    table.get(section)?.as_table()?.get(key)
}

/// `data.sequence_length=512` in a folder name: `sequence_length512`.
fn short(setting: &str) -> String {
    let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
    format!("{}{}", key.rsplit('.').next().unwrap_or(key), value.replace('"', ""))
}

#[cfg(test)]
mod tests {
    use super::super::Figure;
    use super::*;

    fn plan(options: ReproductionOptions) -> Result<Reproduction> {
        Reproduction::new(ScaleConfig::load("laptop")?, options)
    }

    fn only(names: &[&str]) -> ReproductionOptions {
        let only = names.iter().map(ToString::to_string).collect();
        ReproductionOptions { only, ..ReproductionOptions::default() }
    }

    #[test]
    fn plans_all_experiments_at_every_scale() {
        for (name, _) in super::super::scale::SCALES {
            let scale = ScaleConfig::load(name).unwrap();
            let plan = Reproduction::new(scale.clone(), ReproductionOptions::default()).unwrap();
            assert_eq!(plan.experiments.len(), EXPERIMENTS.len() - 3, "all but the extra ones");
            assert_eq!(plan.searches.len(), 7);
            let main = plan.runs.iter().filter(|run| run.experiment == 1).count() as u64;
            assert_eq!(main, 4 * scale.seeds + 4, "{name}");
            let table3 = plan.runs.iter().filter(|run| run.experiment == 2).count();
            assert_eq!(table3, 15, "{name}");
        }
    }

    #[test]
    fn plans_selected_experiments_and_their_searches() {
        let plan = plan(only(&["gates"])).unwrap();
        let names: Vec<&str> = plan.experiments.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["rates", "gates"]);
        assert_eq!(plan.searches.len(), 1);
        assert_eq!(plan.searches[0].rate, "fox-llama");
        assert_eq!(plan.runs.len(), 2 + 3 + 3);
        assert!(plan.runs.iter().any(|run| run.spec == "fox-llama-1m+fixed-256"));
    }

    #[test]
    fn searches_every_named_rate() {
        let scale = ScaleConfig { search: Some(0.5), ..ScaleConfig::load("laptop").unwrap() };
        let options = ReproductionOptions { tokens: Some(100_000), ..only(&["successors"]) };
        let plan = Reproduction::new(scale, options).unwrap();
        let rows = &plan.experiments[1].rows;
        assert_eq!((rows.len(), plan.searches.len()), (18, 18), "every row has its own rate");
        for search in &plan.searches {
            assert_eq!(search.tokens, 50_000);
            assert_eq!(search.spec, with_suffix(&search.rate, "1m"));
        }
        let muon = plan.runs.iter().find(|run| run.spec == "fox-pro-1m+muon").unwrap();
        assert_eq!(muon.rate, "fox-pro+muon");
    }

    #[test]
    fn speed_is_measured_alone_once_per_row() {
        let plan = plan(only(&["start"])).unwrap();
        let timed: Vec<&PlannedRun> =
            plan.runs.iter().filter(|r| r.measurements.contains(&Measurement::Speed)).collect();
        assert_eq!((plan.runs.len(), timed.len()), (3 * plan.seeds() as usize, 3));
        for run in timed {
            let alone = run.alone().unwrap();
            let (recipe, long) = (alone.recipe(1e-4).unwrap(), run.recipe(1e-4).unwrap());
            assert_eq!((alone.exclusive, recipe.steps()), (true, ALONE_STEPS));
            assert_eq!(recipe.model, long.model);
            assert_eq!(recipe.tokens_per_step(), long.tokens_per_step());
            assert_ne!(alone.folder(1e-4), run.folder(1e-4));
        }
    }

    #[test]
    fn claims_name_rows_that_measure_their_figure() {
        for (name, _) in EXPERIMENTS {
            let experiment = Experiment::load(name).unwrap();
            for claim in &experiment.claims {
                for row in [&claim.better, &claim.worse] {
                    assert!(experiment.rows.iter().any(|r| r.name == *row), "{name}: {row}");
                }
                let needed = match claim.at {
                    Figure::Inside | Figure::Beyond => Measurement::Loss,
                    Figure::Recall => Measurement::Candidates,
                    Figure::Speed => Measurement::Speed,
                };
                assert!(experiment.evaluate.contains(&needed), "{name}: {claim:?}");
            }
        }
    }

    /// The successors are compared at nearly equal numbers of parameters.
    #[test]
    fn successors_have_the_size_of_their_scale() {
        for (scale, low, high) in [("laptop", 0.8e6, 1e6), ("minutes", 25.5e6, 28e6)] {
            let scale = ScaleConfig::load(scale).unwrap();
            let plan = Reproduction::new(scale, only(&["successors"])).unwrap();
            for run in &plan.runs {
                let config = run.recipe(1e-3).unwrap().model_config(256).unwrap();
                let count: usize = config.param_specs().iter().map(|spec| spec.count()).sum();
                assert!((low..high).contains(&(count as f64)), "{}: {count}", run.spec);
            }
        }
    }

    #[test]
    fn applies_budgets_and_factors() {
        let options =
            ReproductionOptions { tokens: Some(1_000_000), seeds: Some(5), ..only(&["lengths"]) };
        let plan = plan(options).unwrap();
        let half = plan.runs.iter().find(|run| run.folder(1e-3).contains("length128")).unwrap();
        assert_eq!(half.tokens, 300_000);
        let recipe = half.recipe(2e-3).unwrap();
        assert_eq!((recipe.data.sequence_length, recipe.training.batch), (128, 16));
        assert_eq!((recipe.training.tokens, recipe.schedule.warmup_tokens), (300_000, 30_000));
        assert_eq!((recipe.optimizer.peak_lr, recipe.evaluation.length), (2e-3, Some(256)));
    }

    #[test]
    fn folder_names_identify_runs() {
        let mut plan = plan(ReproductionOptions::default()).unwrap();
        plan.runs.extend(self::plan(only(&["longer"])).unwrap().runs);
        let folders: Vec<String> = plan.runs.iter().map(|run| run.folder(1e-3)).collect();
        for (i, a) in plan.runs.iter().enumerate() {
            for (j, b) in plan.runs.iter().enumerate() {
                let same = a.recipe(1e-3).unwrap() == b.recipe(1e-3).unwrap();
                assert_eq!(same && a.exclusive == b.exclusive, folders[i] == folders[j]);
            }
        }
    }

    #[test]
    fn second_stage_initializes_from_first() {
        let options = ReproductionOptions {
            tokens: Some(100_000),
            seeds: Some(2),
            out: PathBuf::from("out"),
            ..only(&["longer"])
        };
        let plan = plan(options).unwrap();
        assert!(plan.searches.is_empty());
        assert_eq!(plan.runs.len(), 2 * 7);
        let rows = &plan.experiments[1].rows;
        let recipe_of = |name: &str, seed: u64| {
            let run = plan.runs.iter().find(|run| rows[run.row].name == name && run.seed == seed);
            let run = run.unwrap();
            (run.clone(), run.recipe(run.lr.unwrap()).unwrap())
        };
        let (first, recipe) = recipe_of("Transformer, first stage", 1);
        assert_eq!((recipe.data.sequence_length, recipe.training.batch), (64, 32));
        assert_eq!((first.lr, recipe.training.init), (Some(2.5e-3), None));
        let (_, recipe) = recipe_of("larger RoPE base", 1);
        let export = PathBuf::from("out/runs").join(first.folder(2.5e-3)).join("export");
        assert_eq!(recipe.training.init, Some(export));
        assert_eq!((recipe.data.sequence_length, recipe.training.batch), (512, 4));
        let (run, recipe) = recipe_of("gates added, RoPE faded out", 1);
        let start = run.start.unwrap();
        assert_eq!((*start.run).clone(), first);
        assert_eq!(start.memory, Some(2.0 * 256.0));
        assert_eq!(recipe.training.init, Some(start.folder));
        assert_eq!(recipe.training.rope_fade, Some([0, 50_000]));
        let (_, recipe) = recipe_of("RoPE frequencies of YaRN", 0);
        let rope = recipe.model_config(64).unwrap().mixer.forgetting().unwrap().rope.unwrap();
        let scaling = rope.scaling.unwrap();
        assert_eq!((scaling.factor, scaling.original_length), (8.0, 64));
        assert_eq!((scaling.low_freq_factor, scaling.high_freq_factor), (1.0, 32.0));
    }

    #[test]
    fn rejects_unknown_names() {
        let error = plan(only(&["table4"])).unwrap_err().to_string();
        assert!(
            error.starts_with("there is no experiment `table4`; choose from rates, main"),
            "{error}"
        );
        let error = ScaleConfig::load("huge").unwrap_err().to_string();
        assert_eq!(error, "there is no scale `huge`; choose from laptop, minutes, small, 125m");
    }
}
