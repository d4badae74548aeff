//! `fox eval boundaries`: what heads forget where a text changes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use fox_eval::inspect::{
    Span, WINDOWS_PER_DOCUMENT, boundaries, boundary_pattern, boundary_windows,
};

use super::corpus::documents;
use super::subjects::{Named, results_in};
use crate::device::DeviceArgs;
use crate::output;
use crate::progress::Bar;

/// Measure the forget gates at boundaries of a text, such as new files or ends of functions
///
/// A boundary is the first token of a match of a regular expression (^ and $ match at every line). Log gates are averaged by
/// distance from it, and heads are ranked by how much less they keep over a boundary than over as many tokens elsewhere. OUT
/// gets the numbers as JSON, a chart of the gates by distance, and the forget matrix of the first heads in the window with
/// the most boundaries, which are marked.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folders, each PATH or NAME=PATH
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Regular expression of a boundary; may be given several times
    #[arg(long, value_name = "REGEX", required = true, allow_hyphen_values = true)]
    boundary: Vec<String>,
    /// Text or prepared data; the run's held-out split without it
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 4096,
          value_parser = clap::value_parser!(u32).range(2..))]
    length: u32,
    /// Windows with boundaries to read, at most
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..))]
    windows: u32,
    /// Tokens before a boundary
    #[arg(long, value_name = "N", default_value_t = 16)]
    before: u32,
    /// Tokens from a boundary on
    #[arg(long, value_name = "N", default_value_t = 64)]
    after: u32,
    /// Heads with a forget matrix
    #[arg(long, value_name = "N", default_value_t = 3)]
    pictures: usize,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Folder for the results; eval-boundaries in the run folder of a single run, or else here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Heads in the printed table.
const ROWS: usize = 12;

impl Args {
    fn results(&self) -> PathBuf {
        results_in(self.out.as_deref(), &self.models, "eval-boundaries")
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let patterns =
        args.boundary.iter().map(|text| boundary_pattern(text)).collect::<Result<Vec<_>, _>>()?;
    let device = args.device.open()?;
    let span = Span { before: args.before as usize, after: args.after as usize };
    let (length, count) = (args.length as usize, args.windows as usize);
    let mut numbers = Vec::new();
    for model in Named::all(&args.models)? {
        let opened = model.open(&device)?;
        let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
        let subject = opened.subject(None);
        subject.check_vocabulary("tokenizer", tokenizer.vocab_size())?;
        let data = documents(
            args.data.as_deref(),
            &opened,
            Ok(tokenizer.clone()),
            WINDOWS_PER_DOCUMENT * length,
            args.windows.into(),
        )?;
        for (i, pattern) in patterns.iter().enumerate() {
            let windows = boundary_windows(&*data, &tokenizer, pattern, span, length, count)?;
            let progress = Bar::new(&opened.name, windows.len() as u64);
            let found =
                boundaries(&subject, &windows, pattern.as_str(), span, args.pictures, |done| {
                    progress.set(done)
                })?;
            progress.finish();
            let stem = format!("{}-{}", opened.name, i + 1);
            let written = found.write(&args.results(), &stem)?;
            if args.json {
                numbers.push(found.json());
                continue;
            }
            let names: Vec<String> = written.iter().map(|p| p.display().to_string()).collect();
            output::print(&format!(
                "{}: {} boundaries {:?} in {} windows of {length} tokens; kept: weight of earlier keys after {} tokens\n\
                 {}written: {}\n",
                found.model,
                found.count,
                found.pattern,
                found.windows,
                args.before + args.after,
                output::table(&found.table(ROWS)),
                names.join(", ")
            ))?;
        }
    }
    if args.json {
        output::print(&format!("{:#}\n", serde_json::Value::from(numbers)))?;
    }
    Ok(ExitCode::SUCCESS)
}
