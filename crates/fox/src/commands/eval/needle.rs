//! `fox eval needle`: what is found again in a long text.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::ValueEnum;
use fox_data::{SyntheticConfig, Tokenizer};
use fox_eval::files::file_stem;
use fox_eval::needle::{
    Cases, Grid, Mode, ModelReader, Needle, NeedleReport, SyntheticCases, TextCases, run_needle,
};
use fox_model::Pruning;

use super::subjects::{Opened, bar, text};
use crate::device::DeviceArgs;
use crate::output;

/// Hide a sentence in a long text and ask for it at the end
///
/// Scored by whether the greedy answer contains what was hidden, and by the log-probability of the right
/// answer, also against wrong ones where they are known. Models of the embedded corpus are asked for its
/// facts; others need a --haystack. A needle file is TOML with `needle`, `question`, `answer`, and
/// optionally `expected` (what the answer must contain) and `wrong` (a list).
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
    /// Folder for the results
    #[arg(long, value_name = "DIR", default_value = "eval-needle")]
    out: PathBuf,
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
    #[arg(long, value_name = "FILE", requires = "haystack")]
    needle: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ModeName {
    /// The needle contains the question
    Easy,
    /// The needle states the fact in other words
    Standard,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open()?;
    let grid = Grid {
        lengths: args.lengths.clone(),
        depths: Grid::even_depths(args.hay.depths),
        cases: args.cases,
    };
    let mut report: Option<NeedleReport> = None;
    for argument in &args.models {
        let opened = Opened::new(argument, &device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
        let cases = args.hay.cases(&tokenizer)?;
        let subject = opened.subject(None);
        subject.check_vocabulary("tokenizer", cases.vocab_size())?;
        let mut reader = ModelReader::new(subject, Pruning::Config);
        let decode = |ids: &[u32]| Ok(tokenizer.decode(ids)?);
        let path = args.out.join(format!("{}.scores.jsonl", file_stem(&opened.name)));
        let file = Some((path.as_path(), subject.fingerprint()?));
        let progress = bar(&opened.name, grid.total());
        let map = run_needle(&opened.name, &mut reader, &*cases, &grid, &decode, file, |done| {
            progress.set_position(done);
        })?;
        progress.finish_and_clear();
        report
            .get_or_insert_with(|| NeedleReport {
                cases: cases.identity(),
                chance: cases.chance(),
                grid: grid.clone(),
                maps: Vec::new(),
            })
            .maps
            .push(map);
    }
    let Some(report) = report else { bail!("no model was given") };
    let written = report.write(&args.out)?;
    if args.json {
        output::print(&format!("{:#}\n", serde_json::to_value(&report)?))?;
    } else {
        output::print(&table(&report))?;
        let names: Vec<String> = written.iter().map(|p| p.display().to_string()).collect();
        output::print(&format!("written: {}\n", names.join(", ")))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Hay {
    /// The cases for models of a tokenizer.
    pub fn cases(&self, tokenizer: &Tokenizer) -> Result<Box<dyn Cases>> {
        let mode = match self.mode {
            ModeName::Easy => Mode::Easy,
            ModeName::Standard => Mode::Standard,
        };
        match (&self.haystack, tokenizer) {
            (None, Tokenizer::Synthetic(_)) => {
                if let Mode::Standard = mode {
                    bail!(
                        "the embedded corpus states a fact as it asks for it; --mode standard needs a --haystack"
                    );
                }
                let config = SyntheticConfig::default().held_out();
                Ok(Box::new(SyntheticCases { config }))
            }
            (None, _) => {
                bail!("the model has a tokenizer of its own; give it a text with --haystack")
            }
            (Some(path), _) => {
                let needle = match &self.needle {
                    Some(file) => Needle::from_file(file)?,
                    None => Needle::default(),
                };
                Ok(Box::new(TextCases::new(&text(path)?, &needle, mode, tokenizer)?))
            }
        }
    }
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
                let margin = c.preferred.map_or(String::new(), |p| format!(" / {:.0}", 100.0 * p));
                format!("{:.0}{margin} ({:.2})", 100.0 * c.accuracy, c.log_prob)
            }));
            rows.push(row);
        }
    }
    let legend = "found % / preferred to all wrong answers % (log-probability per token)";
    format!("{}{legend}, chance {:.1}%\n", output::table(&rows), 100.0 * report.chance)
}
