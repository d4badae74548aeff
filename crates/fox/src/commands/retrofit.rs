//! `fox retrofit`: forget gates for a model that was trained without them.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use fox_model::{RetrofitOptions, retrofit_checkpoint};

use crate::output;

/// Add forget gates to an attention model that was trained without them
///
/// The weights of the gates are 0 and their biases are those of a memory far beyond the lengths that the model was
/// trained for, so that OUT computes what IN computes. RoPE stays. Then `fox train RECIPE --init OUT` tunes it, e.g.
/// with --set training.rates.gates=10.0, and with --set training.rope_fade=[0,1e8] lets RoPE fade out.
///
/// OUT has fox's own format. It is written aside and renamed when it is complete; an OUT that holds something
/// already is refused. Tokenizer, chat template and generation settings are carried along.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder of an attention model: llama, mistral, qwen2, qwen3, or a Transformer of any other format
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Folder to write
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Memory lengths in tokens, one for all heads or one for each; by default a million times the length that
    /// config.json names
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    memory: Vec<f64>,
    /// Add an output gate as well; it begins with one half, and the output projection with twice its weights
    #[arg(long)]
    output_gate: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let options = RetrofitOptions { memory: args.memory.clone(), output_gate: args.output_gate };
    let made = retrofit_checkpoint(&args.input, &args.output, &options)?;
    output::print(&format!(
        "{} ({}) -> {} ({}), {} parameters, {} of them new; a gate forgets {:.1e} nat per token\n",
        args.input.display(),
        made.from.as_str(),
        args.output.display(),
        made.to.as_str(),
        output::grouped(made.parameters),
        output::grouped(made.added),
        made.decay,
    ))?;
    Ok(ExitCode::SUCCESS)
}
