//! `fox convert`: the same model in another format.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fox_model::{CheckpointLayout, CheckpointReader, FileDtype, WriteOptions, convert_checkpoint};

use fox_train::RunFolder;

use crate::{output, subjects};

/// Write a checkpoint in another format
///
/// Tokenizer, chat template and generation settings are carried along. One tensor is in memory at a time. OUT
/// is written aside and renamed when it is complete; an OUT that is not empty is refused, and so is
/// a model with options that the format cannot express.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder, checkpoint folder (official, flash-linear-attention, Hugging Face or fox) or ORG/NAME in the Hugging Face
    /// cache
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Folder to write
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Format to write
    #[arg(long, value_parser = layouts())]
    to: CheckpointLayout,
    /// Element type of the tensors
    #[arg(long, value_enum, default_value_t = DtypeName::F32)]
    dtype: DtypeName,
    /// Split the tensors into files of at most this size, e.g. 500MB or 2GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_shard_size: Option<u64>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The layouts that other software reads, by name.
fn layouts() -> impl TypedValueParser<Value = CheckpointLayout> {
    let all = CheckpointLayout::foreign();
    let value = |layout: &CheckpointLayout| PossibleValue::new(layout.name).help(layout.owner);
    PossibleValuesParser::new(all.iter().map(value).collect::<Vec<_>>()).try_map(move |name| {
        all.iter().find(|layout| layout.name == name).copied().ok_or("no such layout")
    })
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeName {
    F32,
    Bf16,
    F16,
    /// Matrices in 8 bits with a scale for every 64 columns; read by fox alone
    Int8,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut reader =
        CheckpointReader::open(&RunFolder::model_folder(&subjects::located(&args.input)?)?)?;
    let config = reader.config().clone();
    // A model that has this layout already keeps its type.
    let from = reader.model_type();
    let model_type = match from.layout() == args.to {
        true => from,
        false => config.default_model_type(args.to),
    };
    let dtype = match args.dtype {
        DtypeName::F32 => FileDtype::F32,
        DtypeName::Bf16 => FileDtype::Bf16,
        DtypeName::F16 => FileDtype::F16,
        DtypeName::Int8 => FileDtype::Int8,
    };
    let options = WriteOptions { model_type, dtype, max_shard_bytes: args.max_shard_size };
    convert_checkpoint(&mut reader, &args.output, &options)
        .with_context(|| format!("cannot convert {}", args.input.display()))?;
    let total: usize = reader.specs().iter().map(|spec| spec.count()).sum();
    if args.json {
        let result = serde_json::json!({
            "input": args.input, "from": from.as_str(), "output": args.output,
            "to": model_type.as_str(), "parameters": total,
        });
        output::print(&format!("{}\n", serde_json::to_string_pretty(&result)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&format!(
        "{} ({}) -> {} ({}), {} parameters\n",
        args.input.display(),
        from.as_str(),
        args.output.display(),
        model_type.as_str(),
        output::grouped(total),
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Bytes from a number with an optional unit.
fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        _ => bail!("the unit must be one of B, KB, MB, GB, KiB, MiB, GiB"),
    };
    let number: u64 = digits.trim().parse().context("the size must be a whole number")?;
    match number.checked_mul(factor) {
        Some(size) if size > 0 => Ok(size),
        _ => bail!("the size must be above 0 and below 16 EiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes_with_units() {
        let size = |text| parse_size(text).ok();
        assert_eq!(size("17"), Some(17));
        assert_eq!(size("5GB"), Some(5_000_000_000));
        assert_eq!(size("2 gib"), Some(2 << 30));
        for bad in ["", "0", "GB", "1.5GB", "-1", "9TB", "99999999999GB"] {
            assert_eq!(size(bad), None, "{bad}");
        }
    }
}
