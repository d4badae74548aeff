//! `fox eval accuracy`: right answers to small tasks.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_data::task::{Setting, TaskConfig};
use fox_eval::accuracy::{AccuracyReport, CellScore, ModelAccuracy, RunAccuracy, score_task};
use fox_eval::files::{file_stem, kept};
use fox_model::ForwardOptions;
use fox_tensor::Device;
use fox_train::{Recipe, RunFolder};

use super::print_report;
use super::subjects::{ModelRun, Named, Opened, results_in};
use crate::device::DeviceArgs;
use crate::output;
use crate::progress::Bar;

/// Score models on the small task they were trained on, by length and difficulty
///
/// RUN is a folder of `fox train` with a recipe that has a [data.task], e.g. task-mqar+fox-pro. The test sets are those of
/// the recipe: fixed cases for every length and difficulty, none of which is trained on. Counted are the answers that are
/// right, and the cases all of whose answers are right. Runs that differ in their seed alone are one row. Intervals are
/// 95%: Wilson's over cases for one run, Student's over seeds for several. OUT gets accuracy.json, answers.svg and
/// cases.svg; finished cases are not repeated.
#[derive(clap::Args)]
pub struct Args {
    /// Run folders, each PATH or NAME=PATH
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<String>,
    /// Lengths and difficulties, e.g. 512x0.98; those of the recipe without it
    #[arg(long, value_name = "LENGTHxDIFFICULTY,...", value_delimiter = ',', value_parser = parse_setting)]
    settings: Vec<Setting>,
    /// Cases for each of them; as many as the recipe says without it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    cases: Option<u64>,
    /// Folder for the results; eval-accuracy in the run folder of a single run, or else here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A run with its scores, and what it shares with runs of other seeds.
struct Scored {
    run: RunAccuracy,
    recipe: String,
    without_seed: String,
}

impl Args {
    fn results(&self) -> PathBuf {
        results_in(self.out.as_deref(), &self.runs, "eval-accuracy")
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let (mut report, mut scored) = (AccuracyReport::default(), Vec::new());
    let mut first: Option<(String, TaskConfig)> = None;
    for model in Named::all(&args.runs)? {
        let (run, task) = scored_run(args, &model, &device)?;
        match &first {
            None => {
                report = described(&task);
                first = Some((run.run.name.clone(), task));
            }
            Some((name, other)) if !same_tests(other, &task) => bail!(
                "{} was trained on another task than {name} ({} and {}); score one task at a time",
                run.run.name,
                task.name,
                other.name
            ),
            Some(_) => {}
        }
        scored.push(run);
    }
    report.models = by_recipe(scored);
    let written = report.write(&args.results())?;
    let mut text = output::table(&report.table(|cell| cell.answers, "answers right (%)"));
    if report.has_several_answers() {
        text += &output::table(&report.table(|cell| cell.cases, "cases right (%)"));
    }
    text += &format!("{}\n", report.legend());
    print_report(args.json, serde_json::to_value(&report), &text, &written)
}

/// Opens a run and scores it; results on file are used.
fn scored_run(args: &Args, model: &Named, device: &Device) -> Result<(Scored, TaskConfig)> {
    let opened = model.open(device)?;
    let asked = opened.run.as_ref().and_then(|run| Some((run, run.recipe.data.task.clone()?)));
    let Some((run, mut task)) = asked else {
        bail!(
            "{} is not a run of a task; train one, e.g. `fox train task-mqar+fox-pro`, and give its folder",
            opened.name
        );
    };
    if !args.settings.is_empty() {
        task.test.clone_from(&args.settings);
    }
    task.test_cases = args.cases.unwrap_or(task.test_cases);
    if let Err(problem) = task.check() {
        bail!("task {}: {} {}", task.name, problem.key, problem.detail);
    }
    let scored = Scored {
        run: RunAccuracy {
            name: opened.name.clone(),
            seed: run.recipe.training.seed,
            scores: scores(&args.results(), &opened, run, &task)?,
        },
        recipe: recipe_name(&run.folder, &task),
        without_seed: without_seed(&run.recipe)?,
    };
    Ok((scored, task))
}

fn scores(
    out: &Path,
    opened: &Opened,
    run: &ModelRun,
    task: &TaskConfig,
) -> Result<Vec<CellScore>> {
    let subject = opened.subject(None);
    subject.check_vocabulary("task", task.vocabulary as usize)?;
    let settings: Vec<(usize, f64)> = task.test.iter().map(|s| (*s).into()).collect();
    let evaluation = format!(
        "model {:016x} on {} test cases of each of {settings:?} of task {} seed {} vocabulary {}",
        subject.fingerprint()?,
        task.test_cases,
        task.name,
        task.seed,
        task.vocabulary
    );
    let path = out.join(format!("{}.accuracy.json", file_stem(&opened.name)));
    Ok(kept(&path, &evaluation, || {
        let pruning = run.recipe.forward_options().pruning;
        let options = ForwardOptions { pruning, ..ForwardOptions::default() };
        let progress = Bar::new(&opened.name, task.test_cases * task.test.len() as u64);
        let mut read = |cases: &[_]| subject.answers(cases, &options);
        let scores = score_task(task, &task.test, task.test_cases, &mut read, |done| {
            progress.set(done);
        })?;
        progress.finish();
        Ok(scores)
    })?)
}

/// The report of a task, without models.
fn described(task: &TaskConfig) -> AccuracyReport {
    let kind = task.task();
    AccuracyReport {
        task: task.name.clone(),
        difficulty: kind.map_or("", |kind| kind.difficulty()).to_string(),
        chance: kind.map_or(0.0, |kind| kind.chance(task.vocabulary)),
        trained_on: task.train.iter().map(|setting| (*setting).into()).collect(),
        models: Vec::new(),
    }
}

/// Whether two runs are asked the same questions.
fn same_tests(a: &TaskConfig, b: &TaskConfig) -> bool {
    let tests =
        |t: &TaskConfig| (t.name.clone(), t.seed, t.vocabulary, t.test.clone(), t.test_cases);
    tests(a) == tests(b)
}

/// The recipe's name as it was given, without folders and ending, and without the task: all rows have the same.
fn recipe_name(run: &Path, task: &TaskConfig) -> String {
    let name = RunFolder::info(run).map_or_else(|_| String::new(), |info| info.recipe);
    let name = name.rsplit(['/', '\\']).next().unwrap_or(&name).replace(".toml", "");
    let model = name.strip_prefix(&format!("task-{}+", task.name)).map(String::from);
    model.unwrap_or(name)
}

/// All that decides a run but its seeds.
fn without_seed(recipe: &Recipe) -> Result<String> {
    let mut recipe = recipe.clone();
    recipe.training.seed = 0;
    recipe.data.shuffle_seed = 0;
    Ok(recipe.to_toml()?)
}

/// One row per recipe, in the order in which they were named.
fn by_recipe(scored: Vec<Scored>) -> Vec<ModelAccuracy> {
    let mut groups: Vec<Vec<Scored>> = Vec::new();
    for run in scored {
        match groups.iter_mut().find(|group| group[0].without_seed == run.without_seed) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    let label = |group: &[Scored]| match group {
        [run] => run.run.name.clone(),
        runs => format!("{} ({} seeds)", runs[0].recipe, runs.len()),
    };
    let labels: Vec<String> = groups.iter().map(|group| label(group)).collect();
    let is_unique = |label: &String| labels.iter().filter(|other| *other == label).count() == 1;
    let mut models = Vec::new();
    for (group, label) in groups.into_iter().zip(&labels) {
        let name = match is_unique(label) {
            true => label.clone(),
            false => format!("{label} as {}", group[0].run.name),
        };
        models.push(ModelAccuracy::new(&name, group.into_iter().map(|run| run.run).collect()));
    }
    models
}

fn parse_setting(text: &str) -> Result<Setting, String> {
    let (length, difficulty) = text.split_once('x').unwrap_or((text, "0"));
    match (length.trim().parse(), difficulty.trim().parse()) {
        (Ok(length), Ok(difficulty)) => Ok(Setting { length, difficulty }),
        _ => Err("a length and a difficulty are needed, e.g. 512x0.98".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_length_and_difficulty() {
        assert_eq!(parse_setting("512x0.98"), Ok(Setting { length: 512, difficulty: 0.98 }));
        assert_eq!(parse_setting("40"), Ok(Setting { length: 40, difficulty: 0.0 }));
        for bad in ["", "x", "a x 3", "12x"] {
            assert!(parse_setting(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn runs_of_other_seeds_are_one_row() {
        let run = |name: &str, without_seed: &str| Scored {
            run: RunAccuracy { name: name.into(), seed: 0, scores: Vec::new() },
            recipe: "task-mqar".into(),
            without_seed: without_seed.into(),
        };
        let runs =
            vec![run("a0", "a"), run("b0", "b"), run("a1", "a"), run("b1", "b"), run("c", "c")];
        let models = by_recipe(runs);
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["task-mqar (2 seeds) as a0", "task-mqar (2 seeds) as b0", "c"]);
        assert_eq!(models[0].runs.len(), 2);
    }
}
