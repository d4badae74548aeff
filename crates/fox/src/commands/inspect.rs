//! `fox inspect`: what a model forgets and what it looks at.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use fox_data::{Detokenizer, Tokenizer};
use fox_eval::files::write_whole;
use fox_eval::inspect::{InspectOptions, inspect};
use fox_lab::provenance;

use super::eval::corpus::{documents, first_tokens, has_own, text};
use super::eval::subjects::{Opened, results_in};
use crate::device::DeviceArgs;
use crate::output;
use crate::pretrained::{or_pretrained, sample};
use crate::tolerance::log_tolerance;

/// Inspect forget gates, attention and pruning on a text
///
/// Writes one self-contained page: half-life of every head, gates over the text, the forget matrix F and
/// the attention map A of chosen heads, entropy, and the attention blocks that pruning skips. Pictures are
/// averaged over blocks, so 64k tokens give a page as small as 2k. The raw numbers stand beside it as JSON.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint or run folder; the pretrained model of the repository by default
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Text to read: a file, a folder, or the words themselves in quotes; without it a held-out document of the run's own
    /// data, or of the embedded corpus
    #[arg(long, value_name = "PATH|WORDS")]
    text: Option<String>,
    /// Tokens to read, at most
    #[arg(long, value_name = "N", default_value_t = 2048,
          value_parser = clap::value_parser!(u32).range(1..))]
    length: u32,
    /// Heads to picture as LAYER:HEAD,...; chosen by half-life without it
    #[arg(long, value_name = "L:H,...", value_delimiter = ',', value_parser = parse_head)]
    heads: Vec<(usize, usize)>,
    /// Tolerance of the pruning that is counted, natural log
    #[arg(long, value_name = "X", default_value_t = -10.0, allow_negative_numbers = true,
          value_parser = log_tolerance)]
    log_pruning_tolerance: f32,
    /// Tokenizer: bytes, gpt2, json-gpt2, synthetic or a file; the checkpoint's own without it
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    /// Page to write; the numbers go to the same name with .json. Without it inspect.html in the run folder of a run, or
    /// else here
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print the numbers as JSON
    #[arg(long)]
    json: bool,
}

/// Tokens beyond which reading takes long enough to say so.
const LONG: usize = 8192;

pub fn run(args: &Args) -> Result<ExitCode> {
    let out = results_in(args.out.as_deref(), args.model.as_slice(), "inspect.html");
    let numbers = out.with_extension("json");
    if out == numbers {
        bail!("--out {} is where the numbers go; name the page, e.g. inspect.html", out.display());
    }
    if out.is_dir() {
        bail!("--out {} is a folder; name a file for the page", out.display());
    }
    let device = args.device.open()?;
    let model = or_pretrained(args.model.as_deref())?;
    let opened = Opened::new(&model, &device)?;
    let tokenizer = opened.tokenizer(args.tokenizer.as_deref())?;
    let subject = opened.subject(None);
    subject.check_vocabulary("tokenizer", tokenizer.vocab_size())?;
    let ids = tokens(args, &opened, &tokenizer)?;
    let options = InspectOptions {
        heads: args.heads.clone(),
        log_pruning_tolerance: args.log_pruning_tolerance,
        ..InspectOptions::default()
    };
    if ids.len() > LONG {
        output::note(&format!("reading {} tokens", output::grouped(ids.len() as u64)));
    }
    let seen = inspect(&subject, &ids, &options)?;
    let mut page = seen.report(&|id| token_name(&tokenizer, id), &texts(&tokenizer, &ids)?);
    let beside = "the numbers are in the JSON file beside this page.";
    page.footer(&provenance::footer(&device.to_string(), &provenance::command(), beside));
    write_whole(&out, page.html().as_bytes())?;
    write_whole(&numbers, serde_json::to_string(&seen.json())?.as_bytes())?;
    if args.json {
        output::print(&format!("{}\n", seen.json()))?;
        return Ok(ExitCode::SUCCESS);
    }

    let mut rows =
        vec![["head", "half-life", "reach", "entropy", "pruned"].map(String::from).to_vec()];
    rows.extend(seen.heads.iter().map(|h| {
        vec![
            h.name(),
            h.half_life.map_or("-".into(), |l| format!("{:.1}", l.median)),
            h.half_life.map_or("-".into(), |l| l.reach.name().to_string()),
            format!("{:.2}", h.entropy),
            format!("{:.0}%", 100.0 * h.pruned()),
        ]
    }));
    output::print(&format!(
        "{}{} tokens, {:.1}% of the attention blocks pruned\nwritten: {}, {}\n",
        output::table(&rows),
        ids.len(),
        100.0 * seen.pruned(),
        out.display(),
        numbers.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// The text at a path, or several words that are the text.
fn given_text(given: &str) -> Result<String> {
    let path = Path::new(given);
    if path.exists() {
        return text(path);
    }
    if given.trim().is_empty() {
        bail!("--text: the text is empty; give a file, a folder, or several words in quotes");
    }
    if given.split_whitespace().count() < 2 {
        bail!(
            "{given} does not exist; --text takes a file, a folder, or several words in quotes as the text itself"
        );
    }
    output::note("--text does not name a file or folder; these words are the text");
    Ok(given.to_string())
}

/// The start marker and the first tokens of the text.
fn tokens(args: &Args, opened: &Opened, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let length = args.length as usize;
    let mut ids = match (&args.text, sample(&opened.folder)) {
        (Some(given), _) => tokenizer.encode(&given_text(given)?)?,
        (None, Some(path)) => tokenizer.encode(&text(&path)?)?,
        (None, None) if has_own(opened, tokenizer) => {
            first_tokens(&*documents(None, opened, Ok(tokenizer.clone()), length, 1)?, length)?
        }
        (None, None) => {
            bail!("the model was not trained on the embedded corpus; give it a text with --text")
        }
    };
    if ids.is_empty() {
        bail!("the text is empty");
    }
    without_filling(&mut ids, tokenizer.bos());
    // Encoders have no start marker.
    if !opened.model.config().is_encoder() {
        ids.insert(0, tokenizer.bos());
    }
    ids.truncate(length);
    Ok(ids)
}

/// Drops the markers that fill up a conversation, all but the one that ends it.
fn without_filling(ids: &mut Vec<u32>, marker: u32) {
    let last = ids.iter().rposition(|id| *id != marker).unwrap_or(0);
    ids.truncate(last + 2);
}

/// The name of a token: its text, or its number where that is a part of a character.
fn token_name(tokenizer: &Tokenizer, id: u32) -> String {
    let text = tokenizer.decode(&[id]).unwrap_or_default();
    match tokenizer {
        Tokenizer::Bytes(_) if text.contains(char::REPLACEMENT_CHARACTER) => {
            format!("byte 0x{id:02X}")
        }
        _ if text.is_empty() => "marker".into(),
        _ => text,
    }
}

/// What every token adds to the text: a character of several tokens belongs to its last one.
fn texts(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Vec<String>> {
    let mut detokenizer = Detokenizer::new(tokenizer);
    let added = |id: &u32| -> Result<String> {
        let mut text = String::new();
        detokenizer.push(*id, &mut text)?;
        Ok(text)
    };
    ids.iter().map(added).collect()
}

fn parse_head(text: &str) -> Result<(usize, usize)> {
    let (layer, head) = text.split_once(':').context("a head is LAYER:HEAD, e.g. 0:3")?;
    Ok((
        layer.parse().context("the layer is a number")?,
        head.parse().context("the head is a number")?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_of_several_bytes_are_whole() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let ids = tokenizer.encode("a—b").unwrap();
        assert_eq!(texts(&tokenizer, &ids).unwrap(), ["a", "", "", "—", "b"]);
        let names: Vec<String> = ids.iter().map(|id| token_name(&tokenizer, *id)).collect();
        assert_eq!(names, ["a", "byte 0xE2", "byte 0x80", "byte 0x94", "b"]);
        assert_eq!(token_name(&tokenizer, tokenizer.bos()), "marker");
    }

    #[test]
    fn markers_that_fill_up_are_dropped() {
        for (ids, kept) in [
            (vec![1, 9, 2, 9, 9, 9], vec![1, 9, 2, 9]),
            (vec![1, 2], vec![1, 2]),
            (vec![9, 9, 9], vec![9, 9]),
        ] {
            let mut ids = ids;
            without_filling(&mut ids, 9);
            assert_eq!(ids, kept);
        }
    }

    #[test]
    fn heads_are_layer_and_number() {
        assert_eq!(parse_head("3:12").ok(), Some((3, 12)));
        for bad in ["", "3", "3:", "a:b", "-1:2"] {
            assert!(parse_head(bad).is_err(), "{bad}");
        }
    }
}
