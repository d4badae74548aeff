//! From experiments and a scale to runs.

use std::path::{Path, PathBuf};

use toml::Value;

use super::{EXPERIMENTS, Experiment, Measure, PlannedStart, RATES, RowPlan, ScalePlan, Shape};
use crate::sweep::folder_name;
use crate::{Error, Recipe, Result, recipe};

/// What is asked for besides the scale.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// Experiments by name; all of the paper's when empty.
    pub only: Vec<String>,
    /// Folder of runs and report.
    pub out: PathBuf,
    /// Tokens instead of the scale's.
    pub tokens: Option<u64>,
    /// Seeds instead of the scale's.
    pub seeds: Option<u64>,
    /// Prepared data; the embedded corpus without.
    pub data: Option<PathBuf>,
    /// Held-out pieces; the held-out part of the data without.
    pub heldout: Option<PathBuf>,
}

/// A run that the learning rate is still missing of.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRun {
    /// Its experiment, among the plan's.
    pub experiment: usize,
    /// Its row in the experiment.
    pub row: usize,
    /// Its seed.
    pub seed: u64,
    /// Tokens to train on.
    pub tokens: u64,
    /// The recipe's name, with variants.
    pub spec: String,
    /// The model whose learning rate it takes, where `lr` is not given.
    pub rate: String,
    /// Its peak learning rate, where none is searched.
    pub lr: Option<f64>,
    /// What it begins with instead of random weights.
    pub start: Option<PlannedStart>,
    /// What is measured when it is trained.
    pub measures: Vec<Measure>,
    /// Whether nothing else may run meanwhile.
    pub alone: bool,
    /// Its settings but for the learning rate, and those that tell it from others of its recipe.
    settings: Vec<String>,
    told: Vec<String>,
}

impl PlannedRun {
    /// `key=value` for `fox train`.
    pub fn settings(&self, lr: f64) -> Vec<String> {
        let mut settings = self.settings.clone();
        settings.push(format!("optimizer.peak_lr={lr:e}"));
        settings
    }

    /// The name of its folder: equal for equal runs only.
    pub fn folder(&self, lr: f64) -> String {
        let told: String = self.told.iter().map(|setting| format!("_{setting}")).collect();
        let alone = if self.alone { "_alone" } else { "" };
        let tokens = self.tokens;
        folder_name(&format!("{}_{tokens}{told}_lr{lr:e}_seed{}{alone}", self.spec, self.seed))
    }

    /// The whole recipe.
    pub fn recipe(&self, lr: f64, data: Option<&Path>) -> Result<Recipe> {
        let mut recipe = recipe::load(&self.spec, &self.settings(lr))?;
        recipe.data.path = data.map(Path::to_path_buf);
        Ok(recipe)
    }
}

/// All runs of a reproduction.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How large.
    pub scale: ScalePlan,
    /// What was asked for besides.
    pub options: PlanOptions,
    /// The experiments that were asked for, the search for rates first.
    pub experiments: Vec<Experiment>,
    /// The runs but for those of the search.
    pub runs: Vec<PlannedRun>,
    /// One per model whose rate is searched; each is run at several rates.
    pub searches: Vec<PlannedRun>,
    /// Length of the training sequences.
    pub training_length: usize,
}

impl Plan {
    /// Puts the experiments together.
    ///
    /// # Errors
    /// An experiment that does not exist, a recipe that does not load.
    pub fn new(scale: ScalePlan, options: PlanOptions) -> Result<Plan> {
        for name in &options.only {
            Experiment::load(name)?;
        }
        let mut experiments = Vec::new();
        for (name, _) in EXPERIMENTS {
            let experiment = Experiment::load(name)?;
            let named = options.only.iter().any(|n| n == name);
            let asked = named || (options.only.is_empty() && !experiment.extra);
            // Every other experiment needs the rates.
            if asked || *name == RATES {
                experiments.push(experiment.filled(&scale.window, &scale.memory));
            }
        }
        let base = format!("fox-pro-{}", scale.suffix);
        let mut table = recipe::load_table(&base)?;
        recipe::merge(&mut table, scale.set.clone());
        let training_length = recipe::parse_table(&base, table)?.data.sequence_length;
        let mut plan = Plan {
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
            let shape = experiment.shape;
            for (r, row) in experiment.rows.iter().enumerate() {
                if shape == Shape::Rates {
                    searches.push(self.run((e, experiment), (r, row), 0)?);
                    continue;
                }
                let repeated = if row.repeated { self.seeds() } else { 1 };
                for seed in 0..repeated {
                    runs.push(self.run((e, experiment), (r, row), seed)?);
                }
            }
        }
        // First seeds of all rows first: a report of what is there has every row.
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
        (r, row): (usize, &RowPlan),
        seed: u64,
    ) -> Result<PlannedRun> {
        let spec = with_suffix(&row.model, &self.scale.suffix);
        let mut table = recipe::load_table(&spec)?;
        recipe::merge(&mut table, self.scale.set.clone());
        let mut told = Vec::new();
        for (key, factor) in &row.times {
            // What the recipe leaves to a rule follows the rule.
            let Some(value) = at(&table, key) else { continue };
            let whole = value.as_integer().ok_or_else(|| {
                Error::value(&spec, key, "is no whole number, so it cannot be multiplied")
            })?;
            let product = (whole as f64 * factor).round() as i64;
            told.push(format!("{key}={product}"));
        }
        told.extend(row.set.iter().map(|(key, value)| format!("{key}={value}")));
        let tokens = (experiment.share * self.tokens() as f64).round().max(1.0) as u64;
        let warmup = (self.scale.warmup * tokens as f64) as u64;
        let mut settings = flat(&self.scale.set);
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
        settings.extend(told.iter().cloned());
        let mut told: Vec<String> = told.iter().map(|setting| short(setting)).collect();
        let own = recipe::load(&spec, &settings)?;
        let start = match &row.start {
            None => None,
            Some(plan) => {
                let earlier = experiment.rows[..r].iter().position(|row| row.name == plan.row);
                let Some(first) = earlier else {
                    let detail = format!("is `{}`, which is no earlier row", plan.row);
                    return Err(Error::value(&row.name, "start.row", detail));
                };
                let run = self.run((e, experiment), (first, &experiment.rows[first]), seed)?;
                let start = PlannedStart::new(plan, run, self.training_length, &self.options.out)?;
                let (more, tells) = start.settings(plan, tokens, own.data.sequence_length)?;
                settings.extend(more);
                told.extend(tells);
                Some(start)
            }
        };
        // Pictures and needles of one seed are enough where many other things are compared.
        let all = experiment.shape == Shape::Longer;
        let first = |measure: &Measure| all || seed == 0 || *measure == Measure::Loss;
        let run = PlannedRun {
            experiment: e,
            row: r,
            seed,
            tokens,
            spec,
            rate: row.rate().to_string(),
            lr: row.lr.map(|times| times * own.optimizer.peak_lr),
            start,
            measures: experiment.evaluate.iter().copied().filter(first).collect(),
            alone: experiment.shape == Shape::Pruning,
            settings,
            told,
        };
        // Whatever is wrong with it is said before anything is trained.
        run.recipe(1e-3, self.options.data.as_deref())?;
        Ok(run)
    }

    /// Tokens of a run whose experiment has a share of 1.
    pub fn tokens(&self) -> u64 {
        self.options.tokens.unwrap_or(self.scale.tokens)
    }

    /// Seeds of rows that are repeated.
    pub fn seeds(&self) -> u64 {
        self.options.seeds.unwrap_or(self.scale.seeds)
    }

    /// The runs of a row, seed after seed.
    pub fn runs_of(&self, experiment: usize, row: usize) -> impl Iterator<Item = &PlannedRun> {
        self.runs.iter().filter(move |run| run.experiment == experiment && run.row == row)
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

/// Sections of keys as `section.key=value`.
fn flat(table: &toml::Table) -> Vec<String> {
    let section = |(section, keys): (&String, &Value)| -> Vec<String> {
        let keys = keys.as_table().into_iter().flatten();
        keys.map(|(key, value)| format!("{section}.{key}={value}")).collect()
    };
    table.iter().flat_map(section).collect()
}

/// `data.sequence_length=512` as part of a folder's name.
fn short(setting: &str) -> String {
    let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
    format!("{}{}", key.rsplit('.').next().unwrap_or(key), value.replace('"', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(options: PlanOptions) -> Result<Plan> {
        Plan::new(ScalePlan::load("laptop")?, options)
    }

    fn only(names: &[&str]) -> PlanOptions {
        let only = names.iter().map(ToString::to_string).collect();
        PlanOptions { only, ..PlanOptions::default() }
    }

    #[test]
    fn everything_at_every_scale() {
        for (name, _) in super::super::SCALES {
            let scale = ScalePlan::load(name).unwrap();
            let plan = Plan::new(scale.clone(), PlanOptions::default()).unwrap();
            assert_eq!(plan.experiments.len(), EXPERIMENTS.len() - 1, "all but the one extra");
            assert_eq!(plan.searches.len(), 7);
            let main = plan.runs.iter().filter(|run| run.experiment == 1).count() as u64;
            assert_eq!(main, 4 * scale.seeds + 4, "{name}");
            let table3 = plan.runs.iter().filter(|run| run.experiment == 2).count();
            assert_eq!(table3, 15, "{name}");
        }
    }

    #[test]
    fn only_what_is_asked_for_and_its_rates() {
        let plan = plan(only(&["gates"])).unwrap();
        let names: Vec<&str> = plan.experiments.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["rates", "gates"]);
        assert_eq!(plan.searches.len(), 1);
        assert_eq!(plan.searches[0].rate, "fox-llama");
        assert_eq!(plan.runs.len(), 1 + 3 + 3);
        assert!(plan.runs.iter().any(|run| run.spec == "fox-llama-1m+fixed-256"));
    }

    #[test]
    fn budgets_and_factors() {
        let options = PlanOptions { tokens: Some(1_000_000), seeds: Some(5), ..only(&["lengths"]) };
        let plan = plan(options).unwrap();
        let half = plan.runs.iter().find(|run| run.folder(1e-3).contains("length128")).unwrap();
        assert_eq!(half.tokens, 300_000);
        let recipe = half.recipe(2e-3, None).unwrap();
        assert_eq!((recipe.data.sequence_length, recipe.training.batch), (128, 16));
        assert_eq!((recipe.training.tokens, recipe.schedule.warmup_tokens), (300_000, 30_000));
        assert_eq!((recipe.optimizer.peak_lr, recipe.evaluation.length), (2e-3, Some(256)));
    }

    #[test]
    fn equal_runs_have_equal_folders_and_others_do_not() {
        let mut plan = plan(PlanOptions::default()).unwrap();
        plan.runs.extend(self::plan(only(&["longer"])).unwrap().runs);
        let folders: Vec<String> = plan.runs.iter().map(|run| run.folder(1e-3)).collect();
        for (i, a) in plan.runs.iter().enumerate() {
            for (j, b) in plan.runs.iter().enumerate() {
                let same = a.recipe(1e-3, None).unwrap() == b.recipe(1e-3, None).unwrap();
                assert_eq!(same && a.alone == b.alone, folders[i] == folders[j]);
            }
        }
    }

    #[test]
    fn a_second_stage_begins_with_the_first_of_its_seed() {
        let options = PlanOptions {
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
            (run.clone(), run.recipe(run.lr.unwrap(), None).unwrap())
        };
        let (first, recipe) = recipe_of("Transformer, first stage", 1);
        assert_eq!((recipe.data.sequence_length, recipe.training.batch), (64, 32));
        assert_eq!((first.lr, recipe.training.init), (Some(2.5e-3), None));
        let (_, recipe) = recipe_of("larger RoPE base", 1);
        let export = Path::new("out/runs").join(first.folder(2.5e-3)).join("export");
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
    fn unknown_names_get_one_sentence() {
        let error = plan(only(&["table4"])).unwrap_err().to_string();
        assert!(
            error.starts_with("there is no experiment `table4`; choose from rates, main"),
            "{error}"
        );
        let error = ScalePlan::load("huge").unwrap_err().to_string();
        assert_eq!(error, "there is no scale `huge`; choose from laptop, small, 125m");
    }
}
