//! `fox eval needle`: what is found again in a long text.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::ValueEnum;
use fox_data::Tokenizer;
use fox_eval::files::file_stem;
use fox_eval::needle::{
    Cases, Grid, Mode, ModelReader, Needle, NeedleMap, NeedleReport, SyntheticCases, TextCases,
    run_needle,
};

use super::corpus::{documents, has_own, synthetic_config, text, text_of};
use super::print_report;
use super::subjects::{Named, Opened, results_in};
use crate::device::DeviceArgs;
use crate::output;
use crate::progress::Bar;

/// Hide a sentence in a long text and ask for it at the end
///
/// Scored by whether the greedy answer contains what was hidden, and by the log-probability of the right
/// answer, also against wrong ones where they are known. With --candidates the answer is one word out of N, another one in
/// every case, and its rank among the N is reported: a curve between chance and 100% for models that are too small to
/// repeat a sentence. Models of the embedded corpus, as the run's recipe has it, are
/// asked for its facts; for other runs the needle lies in their held-out split, or in the --haystack.
/// A run that is not finished is evaluated at its newest checkpoint. A needle file is TOML with `needle`, `question`, `answer`, and
/// optionally `expected` (what the answer must contain), `wrong` (a list), `words` and `keys` (lists; {word} and {key} in
/// the other fields stand for one of them, which differs from case to case).
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folders, each PATH or NAME=PATH
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Lengths of the prompt in tokens
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "256,512,1024,2048")]
    lengths: Vec<usize>,
    /// Cases per length and depth
    #[arg(long, value_name = "N", default_value_t = 8)]
    cases: u64,
    #[command(flatten)]
    hay: Hay,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Folder for the results; eval-needle in the run folder of a single run, or else here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is hidden where.
#[derive(clap::Args)]
pub struct Hay {
    /// Number of depths, evenly from the start to the end
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub depths: usize,
    /// Whether the needle contains the question
    #[arg(long, value_enum, default_value_t = ModeName::Easy)]
    mode: ModeName,
    /// Text to hide the needle in: a file or folder
    #[arg(long, value_name = "PATH")]
    pub haystack: Option<PathBuf>,
    /// A needle of your own
    #[arg(long, value_name = "FILE", requires = "haystack", conflicts_with = "candidates")]
    needle: Option<PathBuf>,
    /// Ask for one word out of N (2 to 64), another one in every case
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=64))]
    candidates: Option<u8>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ModeName {
    /// The needle contains the question
    Easy,
    /// The needle states the fact in other words
    Standard,
}

impl Args {
    fn results(&self) -> PathBuf {
        results_in(self.out.as_deref(), &self.models, "eval-needle")
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let grid = Grid {
        lengths: args.lengths.clone(),
        depths: Grid::even_depths(args.hay.depths),
        cases: args.cases,
    };
    let mut report: Option<NeedleReport> = None;
    for model in Named::all(&args.models)? {
        let opened = model.open(&device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
        let cases = args.hay.cases(&opened, &tokenizer, &grid)?;
        let subject = opened.subject(None);
        subject.check_vocabulary("tokenizer", cases.vocab_size())?;
        let mut reader = ModelReader::new(subject, opened.pruning());
        let decode = |ids: &[u32]| Ok(tokenizer.decode(ids)?);
        let path = args.results().join(format!("{}.scores.jsonl", file_stem(&opened.name)));
        let file = Some((path.as_path(), subject.fingerprint()?));
        let progress = Bar::new(&opened.name, grid.total());
        let map = run_needle(&opened.name, &mut reader, &*cases, &grid, &decode, file, |done| {
            progress.set(done);
        })?;
        progress.finish();
        add(&mut report, &*cases, &grid, map)?;
    }
    let Some(report) = report else { bail!("no model was given") };
    let written = report.write(&args.results())?;
    print_report(args.json, serde_json::to_value(&report), &table(&report), &written)
}

impl Hay {
    /// The cases for a model.
    pub fn cases(
        &self,
        opened: &Opened,
        tokenizer: &Tokenizer,
        grid: &Grid,
    ) -> Result<Box<dyn Cases>> {
        let mode = match self.mode {
            ModeName::Easy => Mode::Easy,
            ModeName::Standard => Mode::Standard,
        };
        if let (None, None, Some(config)) =
            (&self.haystack, self.candidates, synthetic_config(opened, tokenizer))
        {
            if let Mode::Standard = mode {
                bail!(
                    "the embedded corpus states a fact as it asks for it; --mode standard needs a --haystack"
                );
            }
            return Ok(Box::new(SyntheticCases { config: config.held_out() }));
        }
        let longest = grid.lengths.iter().copied().max().unwrap_or(0);
        let hay = haystack(self.haystack.as_deref(), opened, tokenizer, longest, grid.cases)?;
        let needle = match (&self.needle, self.candidates) {
            (Some(file), _) => Needle::from_file(file)?,
            (None, Some(candidates)) => Needle::one_word(candidates.into())?,
            (None, None) => Needle::default(),
        };
        Ok(Box::new(TextCases::new(&hay, &needle, mode, tokenizer)?))
    }
}

/// The text around the needles: that at `path`, or about `cases` times `length` tokens of the run's held-out split.
pub fn haystack(
    path: Option<&Path>,
    opened: &Opened,
    tokenizer: &Tokenizer,
    length: usize,
    cases: u64,
) -> Result<String> {
    match path {
        Some(path) => text(path),
        None if has_own(opened, tokenizer) => {
            let data = documents(None, opened, Ok(tokenizer.clone()), length, cases)?;
            text_of(&*data, tokenizer, length as u64 * cases.max(1))
        }
        None => {
            bail!(
                "the model was not trained on the embedded corpus; give it a text with --haystack"
            )
        }
    }
}

/// Adds the map of a model to those of others with the same cases.
pub fn add(
    report: &mut Option<NeedleReport>,
    cases: &dyn Cases,
    grid: &Grid,
    map: NeedleMap,
) -> Result<()> {
    let report = report.get_or_insert_with(|| NeedleReport {
        cases: cases.identity(),
        chance: cases.chance(),
        grid: grid.clone(),
        maps: Vec::new(),
    });
    if report.cases != cases.identity() {
        bail!(
            "{} has other needles than {}, so what they find cannot be compared; evaluate them one by one, or hide \
             the same needle for both with --haystack",
            map.model,
            report.maps[0].model
        );
    }
    report.maps.push(map);
    Ok(())
}

/// One row per model and depth, one column per length.
fn table(report: &NeedleReport) -> String {
    let mut head = vec!["needles found (%)".to_string(), "depth".into()];
    head.extend(report.grid.lengths.iter().map(usize::to_string));
    let mut rows = vec![head];
    for map in &report.maps {
        for (d, depth) in report.grid.depths.iter().enumerate() {
            let mut row = vec![map.model.clone(), format!("{:.0}%", 100.0 * depth)];
            let cells = map.cells.iter().skip(d).step_by(report.grid.depths.len());
            row.extend(cells.map(|c| {
                let preferred =
                    c.preferred.map_or(String::new(), |p| format!(" / {:.0}", 100.0 * p));
                let rank = c.rank.map_or(String::new(), |r| format!(" / {r:.1}"));
                format!("{:.0}{preferred}{rank} ({:.2})", 100.0 * c.accuracy, c.log_prob)
            }));
            rows.push(row);
        }
    }
    let legend =
        "found % / preferred to all wrong answers % / mean rank (log-probability per token)";
    format!("{}{legend}, chance {:.1}%\n", output::table(&rows), 100.0 * report.chance)
}
