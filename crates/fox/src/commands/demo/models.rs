//! The models of the demo.

use std::path::{Path, PathBuf};

use anyhow::Result;
use fox_data::SyntheticConfig;
use fox_train::{Recipe, recipe};

use super::Args;

/// Training tokens of each model, chosen so that the whole demo takes less than four minutes on two cores.
pub const TOKENS: u64 = 1_200_000;

/// What the demo reads: the corpus that recipes read when they name no data.
pub const CORPUS: SyntheticConfig = SyntheticConfig::DEFAULT;

/// Tokens of a step.
const STEP: u64 = 2048;

/// Tokens of warm-up.
const WARMUP: u64 = 100_000;

/// What the demo sets for every model besides: the recipes are made for longer runs.
const CHANGES: [&str; 7] = [
    // Two wide heads find what was said earlier sooner than four narrow ones.
    "model.num_heads=2",
    "model.intermediate_size=256",
    "evaluation.every=0",
    "evaluation.sequences=64",
    "checkpoints.every=200",
    "metrics.details_every=0",
    "optimizer.peak_lr=5e-3",
];

/// One of the models.
#[derive(Clone, Copy)]
pub struct Contestant {
    /// In tables and legends.
    pub name: &'static str,
    /// The recipe it is trained with.
    pub recipe: &'static str,
    /// Its run folders begin with this.
    folder: &'static str,
    /// What only this model has set: its idea of position.
    change: &'static str,
}

impl Contestant {
    /// FoX first.
    pub fn all() -> Vec<Contestant> {
        let rope = |name, folder, change| Contestant {
            name,
            recipe: "tiny-transformer-pro+muon",
            folder,
            change,
        };
        vec![
            Contestant {
                name: "FoX",
                recipe: "tiny-fox-pro+muon",
                folder: "fox",
                // Gates that begin half open hide everything but the last few tokens for most of the demo.
                change: "training.gate_init=[64, 4096]",
            },
            rope("Transformer (RoPE 10k)", "rope-10k", "model.rope_base=10000.0"),
            rope("Transformer (RoPE 500k)", "rope-500k", "model.rope_base=500000.0"),
        ]
    }

    /// The run folder of a seed.
    pub fn folder(&self, out: &Path, seed: u64) -> PathBuf {
        out.join(format!("{}-seed-{seed}", self.folder))
    }

    /// Everything its training depends on.
    pub fn recipe(&self, args: &Args, seed: u64) -> Result<Recipe> {
        let mut changes: Vec<String> = CHANGES.map(String::from).to_vec();
        changes.extend([
            self.change.to_string(),
            format!("training.seed={seed}"),
            format!("data.shuffle_seed={seed}"),
            format!("data.sequence_length={}", args.length),
            format!("training.batch={}", (STEP / args.length).max(1)),
            format!("training.tokens={}", args.tokens),
            format!("schedule.warmup_tokens={}", args.tokens.min(WARMUP)),
        ]);
        Ok(recipe::load(self.recipe, &changes)?)
    }
}
