//! `fox train --dry-run`: the whole recipe, and what it would take. Nothing is written.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_tensor::{Device, DeviceKind};
use fox_train::data::RunData;
use fox_train::own_messages::OwnConversations;
use fox_train::own_text;
use fox_train::{DryRun, Recipe, RunFolder, dry_run};
use serde_json::{Value, json};

use super::{Args, text};
use crate::output;

/// Prints the recipe as TOML, with what it would take as comments in front.
pub fn run(args: &Args, out: &Path, device: &Device) -> Result<ExitCode> {
    let (recipe, data, complete) = resolve(args, out, device)?;
    let found = dry_run(&recipe, &data, complete, device)?;
    recipe.notices.iter().for_each(|notice| output::note(notice));
    let mut printed = String::new();
    let named = args.data.as_ref().map(|path| path.display().to_string());
    let source = named.unwrap_or_else(|| data.train.identity());
    // Of text, only the beginning was read.
    let whole = !args.data.as_deref().is_some_and(text::is_text);
    let identity = whole.then(|| data.train.identity());
    if args.json {
        let figures = figures(&recipe, &source, &found, out, device);
        output::print(&format!("{}\n", serde_json::to_string_pretty(&figures)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    for line in summary(&recipe, &source, identity.as_deref(), &found, out, device).lines() {
        printed += &format!("# {line}\n");
    }
    output::print(&format!("{printed}\n{}", recipe.to_toml()?))?;
    Ok(ExitCode::SUCCESS)
}

/// The figures of a dry run by name, with the whole recipe.
fn figures(recipe: &Recipe, source: &str, found: &DryRun, out: &Path, device: &Device) -> Value {
    json!({
        "recipe": recipe.name,
        "run_folder": out,
        "device": device.to_string(),
        "data": source,
        "parameters": found.parameters,
        "tokens": recipe.training.tokens,
        "steps": recipe.steps(),
        "tokens_per_step": recipe.tokens_per_step(),
        "memory_bytes": found.memory,
        "free_bytes": found.free,
        "tokens_per_second": found.tokens_per_second,
        "seconds": found.seconds,
        "config": recipe,
    })
}

/// The recipe, its data, and whether these are complete: of text that is not prepared yet, the start is read.
fn resolve(args: &Args, out: &Path, device: &Device) -> Result<(Recipe, RunData, bool)> {
    let on_gpu = device.backend().kind() == DeviceKind::Cuda;
    if let Some(file) = args.conversations() {
        let recipe = args.recipe_of_conversations(&OwnConversations::read(file)?, on_gpu)?;
        let data = RunData::open(&recipe)?;
        return Ok((recipe, data, true));
    }
    let Some(path) = args.data.as_deref().filter(|path| text::is_text(path)) else {
        let recipe = args.recipe_for(args.data.as_deref(), on_gpu)?;
        let data = RunData::open(&recipe)?;
        return Ok((recipe, data, true));
    };
    if path == Path::new(text::STANDARD_INPUT) {
        bail!("a dry run does not read the standard input; name a file with --data");
    }
    let prepared = out.join(text::DATA);
    let sample = own_text::sample(path, args.text_tokenizer()?.as_deref())?;
    let recipe = match &args.recipe {
        Some(name) => args.load(name, Some(&prepared), &[])?,
        None => {
            let choice = own_text::choose_for_text(path, &sample, on_gpu)?;
            text::announce(&choice, on_gpu);
            args.load(choice.name, Some(&prepared), &choice.overrides)?
        }
    };
    let recipe = args.fitted(recipe, &sample.data, Some(sample.tokens))?;
    Ok((recipe, sample.data, sample.complete))
}

fn summary(
    recipe: &Recipe,
    source: &str,
    identity: Option<&str>,
    found: &DryRun,
    out: &Path,
    device: &Device,
) -> String {
    let row = |name: &str, value: String| vec![format!("  {name}"), value];
    let state = match identity {
        // The recipe for a text is an estimate until the text is prepared.
        None if RunFolder::is_run(out) => Ok("holds a run; the same one would go on"),
        _ => RunFolder::check(out, recipe, identity)
            .map(|goes_on| if goes_on { "holds a run, which would go on" } else { "new" }),
    };
    let folder = match state {
        Ok(state) => format!("{} ({state})", out.display()),
        Err(refused) => refused.to_string(),
    };
    let free = found.free.map_or_else(String::new, |free| {
        format!(" of {} that are free", output::bytes(free as f64))
    });
    let (rows, length) = found.measured;
    let table = [
        row("run folder", folder),
        row("parameters", output::grouped(found.parameters)),
        row("data", source.to_string()),
        row("tokens", output::grouped(recipe.training.tokens)),
        row("steps", output::grouped(recipe.steps())),
        row("tokens of a step", output::grouped(recipe.tokens_per_step())),
        row("memory", format!("{}{free}", output::bytes(found.memory))),
        row("tokens/s", output::grouped(found.tokens_per_second.round() as u64)),
        row(
            "time",
            format!("{}, evaluations and checkpoints not counted", output::duration(found.seconds)),
        ),
    ];
    // Words, not figures: all columns to the left.
    let lines: Vec<String> =
        table.iter().map(|cells| format!("{:<20}{}", cells[0], cells[1])).collect();
    format!(
        "{} on {device}, from steps of {rows} x {length} tokens; nothing was written\n{}\n",
        recipe.name,
        lines.join("\n")
    )
}
