//! `fox info`: architecture, parameters and memory of a model.

mod cluster;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use fox_lab::args::hub::HubModel;
use fox_model::{MemoryEstimate, ModelConfig, ParamGroup, ParamSpec, Preset};
use fox_train::{Recipe, RunFolder, recipe};
use serde_json::json;

use crate::{hints, output};

/// Describe a model: architecture, parameters, memory
///
/// Memory, in single precision, for B sequences of T tokens, P parameters, L
/// blocks of width D:
///
///   training: weights 4P + gradients 4P + AdamW moments 8P + activations
///   4BT(La + 3D), where a is the number of values a block keeps per token
///   for the backward pass; with blocks recomputed in the backward pass,
///   activations are 4BT(2LD + a + 3D).
///
///   decoding: weights 4P + cache 4LB(Tc + s), where c = 2 H_kv d + H values
///   per token (keys, values, log gates) and s = the last raw keys and values
///   when the layer shifts them.
///
/// Scratch of single ops comes on top, and a cache that grew by doubling may
/// hold up to twice T.
///
/// With --gpus, MODEL is a recipe, and the figures are those of a training step
/// on many devices: how the batch and the sequences can be divided (data x
/// context), the memory and the bytes sent per rank, and the time of a step,
/// with and without sums of gradients during the backward pass. Speeds are given
/// or measured; latencies are not counted.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Checkpoint or run folder, config.json, ORG/NAME in the Hugging Face cache, a published model such as fox-pro-125m,
    /// or a recipe: a built-in name or a TOML file, with +VARIANTs
    #[arg(value_name = "MODEL")]
    model: String,
    /// Tokens per sequence for the memory figures; those of the recipe by default, or 2048
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    seq: Option<u64>,
    /// Sequences for the memory figures; those that the recipe computes at once by default, or 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    batch: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: cluster::ClusterArgs,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.cluster.is_given() {
        return cluster::run(&args.model, &args.cluster, args.json);
    }
    let NamedModel { config, format, recipe } = find(&args.model)?;
    let default = recipe.as_ref().map_or((1, 2048), |recipe| {
        (recipe.micro_batch() as u64, recipe.data.sequence_length as u64)
    });
    let (batch, seq) = (args.batch.unwrap_or(default.0), args.seq.unwrap_or(default.1));
    let info = ModelInfo {
        name: &args.model,
        format: &format,
        specs: config.param_specs(),
        memory: MemoryEstimate::new(&config, batch as usize, seq as usize)?,
        config: &config,
        recipe: recipe.as_ref(),
        batch,
        seq,
    };
    output::print(&if args.json { info.json() } else { info.text() })?;
    Ok(ExitCode::SUCCESS)
}

/// The described model.
struct NamedModel {
    config: ModelConfig,
    /// Where the configuration comes from.
    format: String,
    /// The recipe, if MODEL is one.
    recipe: Option<Recipe>,
}

/// A folder, a config.json, a published model, or a recipe.
fn find(model: &str) -> Result<NamedModel> {
    let cached = HubModel::parse(model).and_then(|model| model.cached());
    let path = cached.as_deref().unwrap_or(Path::new(model));
    if path.extension().is_some_and(|ending| ending == "toml") {
        return of_recipe(recipe::load(model, &[])?);
    }
    if path.is_dir() || path.is_file() {
        let export = path.join("export/config.json");
        let file = match path.is_dir() {
            false => path.to_path_buf(),
            true if export.is_file() => export,
            true if RunFolder::is_run(path) => return of_recipe(RunFolder::recipe(path)?),
            true => path.join("config.json"),
        };
        let (config, model_type) = ModelConfig::from_file(&file)?;
        return Ok(NamedModel { config, format: model_type.as_str().to_string(), recipe: None });
    }
    if let Some(preset) = Preset::by_name(model) {
        let (config, format) = (preset.config(), "published configuration".to_string());
        return Ok(NamedModel { config, format, recipe: None });
    }
    match recipe::load(model, &[]) {
        Err(fox_train::Error::UnknownRecipe { .. }) => bail!(hints::no_description(model)),
        recipe => of_recipe(recipe?),
    }
}

fn of_recipe(recipe: Recipe) -> Result<NamedModel> {
    Ok(NamedModel {
        config: cluster::model(&recipe)?,
        format: "recipe".into(),
        recipe: Some(recipe),
    })
}

struct ModelInfo<'a> {
    name: &'a str,
    format: &'a str,
    config: &'a ModelConfig,
    specs: Vec<ParamSpec>,
    memory: MemoryEstimate,
    recipe: Option<&'a Recipe>,
    batch: u64,
    seq: u64,
}

const GROUPS: [(ParamGroup, &str); 5] = [
    (ParamGroup::Embedding, "embedding"),
    (ParamGroup::Mixer, "mixer"),
    (ParamGroup::Mlp, "mlp"),
    (ParamGroup::Norm, "norm"),
    (ParamGroup::Head, "head"),
];

impl ModelInfo<'_> {
    fn count(&self, keep: impl Fn(&ParamSpec) -> bool) -> usize {
        self.specs.iter().filter(|spec| keep(spec)).map(ParamSpec::count).sum()
    }

    fn text(&self) -> String {
        let (c, m) = (self.config, &self.memory);
        let ((count, width), key_heads) = (c.heads(), c.mixer.key_heads(c));
        let heads = match key_heads == count {
            true => format!("{count} x {width}"),
            false => format!("{count} x {width} ({key_heads} for keys)"),
        };
        let row = |name: &str, value: String| vec![format!("  {name}"), value];
        let architecture = [
            row("width", output::grouped(c.hidden_size)),
            row("blocks", output::grouped(c.num_layers)),
            row("heads", heads),
            row(
                "mlp width",
                if c.has_mlp() { output::grouped(c.mlp_width()) } else { "none".into() },
            ),
            row("vocabulary", output::grouped(c.vocab_size)),
        ];
        let mut parameters: Vec<_> = GROUPS
            .iter()
            .map(|(group, name)| row(name, output::grouped(self.count(|s| s.group == *group))))
            .collect();
        parameters.push(row("total", output::grouped(self.count(|_| true))));
        parameters.push(row("with weight decay", output::grouped(self.count(|s| s.decay))));
        parameters.push(row("not trained", output::grouped(self.count(|s| !s.trainable))));
        let memory = [
            row("weights", output::bytes(m.weights)),
            row("gradients", output::bytes(m.gradients)),
            row("optimizer", output::bytes(m.optimizer)),
            row("activations", output::bytes(m.activations)),
            row("activations, blocks recomputed", output::bytes(m.activations_recomputed)),
            row("decode cache", output::bytes(m.cache)),
            row("to train", output::bytes(m.train())),
            row("to train, blocks recomputed", output::bytes(m.train_recomputed())),
            row("to decode", output::bytes(m.decode())),
            row("to train on a GPU in bf16", output::bytes(m.train_bf16)),
            row("to train on a GPU in bf16, recomputed", output::bytes(m.train_bf16_recomputed)),
        ];
        let training = self.recipe.map_or_else(String::new, |recipe| {
            let training = [
                row("tokens", output::grouped(recipe.training.tokens)),
                row("steps", output::grouped(recipe.steps())),
                row("tokens of a step", output::grouped(recipe.tokens_per_step())),
            ];
            format!("training\n{}", output::table(&training))
        });
        format!(
            "{} ({})\n{}  {}\nparameters\n{}{training}memory for {} x {} tokens, f32\n{}",
            self.name,
            self.format,
            output::table(&architecture),
            c.options().join(", "),
            output::table(&parameters),
            self.batch,
            self.seq,
            output::table(&memory),
        )
    }

    fn json(&self) -> String {
        let (c, m) = (self.config, &self.memory);
        let (heads, head_dim) = c.heads();
        let mut parameters = serde_json::Map::new();
        for (group, name) in GROUPS {
            parameters.insert(name.to_string(), json!(self.count(|s| s.group == group)));
        }
        parameters.insert("total".into(), json!(self.count(|_| true)));
        parameters.insert("decayed".into(), json!(self.count(|s| s.decay)));
        parameters.insert("not_trained".into(), json!(self.count(|s| !s.trainable)));
        let document = json!({
            "model": self.name,
            "format": self.format,
            "hidden_size": c.hidden_size,
            "num_hidden_layers": c.num_layers,
            "num_heads": heads,
            "num_kv_heads": c.mixer.key_heads(c),
            "head_dim": head_dim,
            "intermediate_size": c.mlp_width(),
            "vocab_size": c.vocab_size,
            "options": c.options(),
            "parameters": parameters,
            "training": self.recipe.map(|recipe| json!({
                "tokens": recipe.training.tokens, "steps": recipe.steps(),
                "tokens_per_step": recipe.tokens_per_step(),
            })),
            "memory": {
                "batch": self.batch, "seq": self.seq,
                "weights_bytes": m.weights, "gradients_bytes": m.gradients,
                "optimizer_bytes": m.optimizer, "activations_bytes": m.activations,
                "activations_recomputed_bytes": m.activations_recomputed,
                "cache_bytes": m.cache, "train_bytes": m.train(),
                "train_recomputed_bytes": m.train_recomputed(), "decode_bytes": m.decode(),
                "train_bf16_bytes": m.train_bf16,
                "train_bf16_recomputed_bytes": m.train_bf16_recomputed,
            },
        });
        format!("{document:#}\n")
    }
}
