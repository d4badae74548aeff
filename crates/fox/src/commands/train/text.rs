//! `fox train --data TEXT`: text is prepared in the run folder, and a recipe chosen where none is named.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use fox_base::durable::NewFile;
use fox_data::{HeldOut, PrepareOptions, PrepareReport, Replace};
use fox_train::RunFolder;
use fox_train::own_messages::OwnConversations;
use fox_train::own_text::{self, RecipeChoice};

use crate::commands::prepare::prepare_with_bar;
use crate::output;

/// The name of the standard input.
pub const STANDARD_INPUT: &str = "-";
/// Prepared text in a run folder, and text from the standard input.
pub const DATA: &str = "data";
const INPUT: &str = "input.txt";

/// Whether this is text, and not prepared data.
pub fn is_text(path: &Path) -> bool {
    path == Path::new(STANDARD_INPUT) || own_text::is_text(path)
}

/// Prepares a text in its run folder, or verifies the preparation there. Returns the folder of the shards. A folder with
/// checkpoints of a run on another version of the text is left as it is, and `run` becomes another one.
pub fn prepare(
    text: &Path,
    run: &mut PathBuf,
    tokenizer: Option<&str>,
    stop: &AtomicBool,
) -> Result<PathBuf> {
    RunFolder::check_for_text(run)?;
    let text = match text == Path::new(STANDARD_INPUT) {
        true => copy_input(run)?,
        false => text.to_path_buf(),
    };
    let first = run.clone();
    let mut number = 1;
    loop {
        let options = options(&text, run, tokenizer)?;
        match prepare_with_bar(&options, stop) {
            Ok(report) => {
                announce_data(&text, &options, &report);
                return Ok(options.out);
            }
            Err(error) if !is_different(&error) => return Err(error),
            Err(_) => {}
        }
        number += 1;
        let mut name = first.clone().into_os_string();
        name.push(format!("-{number}"));
        let next = PathBuf::from(name);
        output::note(&format!(
            "{} was trained on another version of {}, so this run is {} (--init {} starts from its weights)",
            run.display(),
            text.display(),
            next.display(),
            run.display(),
        ));
        RunFolder::check_for_text(&next)?;
        *run = next;
    }
}

/// What is prepared in a run folder. Without a checkpoint that depends on it, it is replaced when the text has changed.
fn options(text: &Path, run: &Path, tokenizer: Option<&str>) -> Result<PrepareOptions> {
    let mut options = own_text::prepare_options(text, &run.join(DATA), tokenizer)?;
    if !RunFolder::has_checkpoint(run) {
        options.replace = Replace::Always;
    }
    Ok(options)
}

fn is_different(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<fox_data::Error>();
    matches!(cause, Some(fox_data::Error::DifferentPreparation { .. }))
}

/// Prints what was prepared, unless it was there before.
fn announce_data(text: &Path, options: &PrepareOptions, report: &PrepareReport) {
    let data = &options.out;
    if !report.already_complete {
        let index = &report.index;
        let held_out = match options.held_out {
            HeldOut::Ends { .. } => "the end of each document",
            _ => "documents",
        };
        output::note(&format!(
            "prepared {} in {}: {} tokens ({}) to train on, {} held out ({held_out})",
            text.display(),
            data.display(),
            output::grouped(index.train.tokens()),
            index.tokenizer.split(':').next().unwrap_or_default(),
            output::grouped(index.heldout.tokens()),
        ));
    }
}

/// Writes the standard input into the run folder, whole or not at all. A resumed run reads its copy.
fn copy_input(run: &Path) -> Result<PathBuf> {
    let path = run.join(INPUT);
    if path.exists() {
        output::note(&format!(
            "the text is in {} already; the standard input is not read",
            path.display()
        ));
        return Ok(path);
    }
    fs::create_dir_all(run).with_context(|| format!("cannot create {}", run.display()))?;
    let mut file = NewFile::create(&path)?;
    let (mut stdin, mut empty) = (io::stdin().lock(), true);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match stdin.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => file.write_all(&buffer[..n])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e).context("cannot read the standard input"),
        }
        empty = false;
    }
    if empty {
        bail!("the standard input is empty; pipe a text into it, or name a file with --data");
    }
    file.finish()?;
    Ok(path)
}

/// Prints how conversations are divided.
pub fn announce_conversations(file: &Path, own: &OwnConversations) {
    let held_out = if own.heldout.is_some() { "every twentieth" } else { "none" };
    output::note(&format!(
        "{} has conversations: {} to train on, held out: {held_out}; only the answers have a loss",
        file.display(),
        output::grouped(own.count()),
    ));
}

/// Prints the recipe that was chosen.
pub fn announce(choice: &RecipeChoice, on_gpu: bool) {
    output::note(&format!(
        "auto-selected recipe {} ({} tokens, {}){}",
        choice.name,
        output::grouped(choice.tokens),
        if on_gpu { "GPU" } else { "CPU" },
        choice.overrides.iter().map(|set| format!(" --set {set}")).collect::<String>(),
    ));
}
