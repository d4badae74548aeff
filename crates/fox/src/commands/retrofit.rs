//! `fox retrofit`: forget gates for a model that was trained without them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_model::{ModelConfig, RetrofitOptions, retrofit_checkpoint};
use fox_train::RunFolder;

use crate::{output, subjects};

/// Add forget gates to an attention model trained without them
///
/// The weights of the gates are 0 and their biases are those of a memory far beyond the lengths that the model was
/// trained for, so that OUT computes what IN computes. RoPE stays. Then `fox train RECIPE --init OUT` tunes it, e.g.
/// with --set training.rates.gates=10.0, and with --set training.rope_fade=[0,1e8] lets RoPE fade out.
///
/// OUT has fox's native format. It is written aside and renamed when it is complete; an OUT that is not empty is
/// refused. Tokenizer, chat template and generation settings are carried along.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder, checkpoint folder or ORG/NAME in the Hugging Face cache of an attention model: llama, mistral, qwen2,
    /// qwen3, or a Transformer of any other format
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Folder to write
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Memory lengths in tokens, one for all heads or one for each; by default a million times the length that
    /// config.json names
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    memory: Vec<f64>,
    /// Decay times log-spaced over the heads instead, as training.gate_init sets them: `spread` (1 token to the length
    /// that config.json names) or SHORTEST,LONGEST in tokens. OUT then computes something else than IN until it is tuned
    #[arg(long, value_name = "START", conflicts_with = "memory")]
    gate_init: Option<String>,
    /// Add an output gate as well; it starts at one half, and the output projection with twice its weights
    #[arg(long)]
    output_gate: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let input = RunFolder::model_folder(&subjects::located(&args.input)?)?;
    let memory = match &args.gate_init {
        None => args.memory.clone(),
        Some(start) => decay_times(start, &input)?,
    };
    let options = RetrofitOptions { memory, output_gate: args.output_gate };
    let made = retrofit_checkpoint(&input, &args.output, &options)?;
    if args.json {
        let result = serde_json::json!({
            "input": args.input, "from": made.from.as_str(), "output": args.output,
            "to": made.to.as_str(), "parameters": made.parameters, "added": made.added,
            "decay_per_token": made.decay,
        });
        output::print(&format!("{}\n", serde_json::to_string_pretty(&result)?))?;
        return Ok(ExitCode::SUCCESS);
    }
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

/// Decay times of the heads of the model in `input`, log-spaced.
fn decay_times(start: &str, input: &Path) -> Result<Vec<f64>> {
    let (config, _) = ModelConfig::from_file(&input.join("config.json"))?;
    let pair = start.split_once(',').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (min, max): (f64, f64) = match (start, pair) {
        ("spread", _) => (1.0, config.max_position_embeddings as f64),
        (_, Some((min, max))) if min <= max => (min, max),
        _ => bail!("--gate-init {start}: give `spread` or SHORTEST,LONGEST in tokens, e.g. 8,512"),
    };
    // Models that have no heads are refused by the retrofit itself.
    let heads = config.mixer.forgetting().map_or(1, |mixer| mixer.heads);
    let time = |h: usize| min * (max / min).powf(h as f64 / (heads.max(2) - 1) as f64);
    Ok((0..heads).map(time).collect())
}
