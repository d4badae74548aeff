//! The models of the demo.

use fox_data::SyntheticConfig;

use super::Options;
use crate::graph::TrainRun;

/// Default training tokens of each run: the demo then takes less than four minutes on two cores.
pub const TOKENS: u64 = 1_200_000;

/// The corpus: that of recipes without data.
pub const CORPUS: SyntheticConfig = SyntheticConfig::DEFAULT;

/// Tokens of a step.
const STEP: u64 = 2048;

/// Tokens of warm-up.
const WARMUP: u64 = 100_000;

/// Overrides of every recipe, because the recipes are made for longer runs.
const OVERRIDES: [&str; 7] = [
    // Two wide heads learn recall sooner than four narrow ones.
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
pub struct DemoModel {
    /// Name in tables and legends.
    pub name: &'static str,
    /// Its recipe.
    pub recipe: &'static str,
    /// Prefix of its run folders.
    folder: &'static str,
    /// The override of its position encoding.
    setting: &'static str,
}

impl DemoModel {
    /// All models, FoX first.
    pub fn all() -> Vec<DemoModel> {
        let rope = |name, folder, setting| DemoModel {
            name,
            recipe: "tiny-transformer-pro+muon",
            folder,
            setting,
        };
        vec![
            DemoModel {
                name: "FoX",
                recipe: "tiny-fox-pro+muon",
                folder: "fox",
                // Gates that start half open hide all but the last few tokens for most of the demo.
                setting: "training.gate_init=[64, 4096]",
            },
            rope("Transformer (RoPE 10k)", "rope-10k", "model.rope_base=10000.0"),
            rope("Transformer (RoPE 500k)", "rope-500k", "model.rope_base=500000.0"),
        ]
    }

    /// The training run with a seed.
    pub fn train_run(&self, options: &Options, seed: u64) -> TrainRun {
        let Options { length, tokens, .. } = options;
        let mut settings: Vec<String> = OVERRIDES.map(String::from).to_vec();
        settings.extend([
            self.setting.to_string(),
            format!("training.seed={seed}"),
            format!("data.shuffle_seed={seed}"),
            format!("data.sequence_length={length}"),
            format!("training.batch={}", (STEP / length).max(1)),
            format!("training.tokens={tokens}"),
            format!("schedule.warmup_tokens={}", WARMUP.min(*tokens)),
        ]);
        TrainRun {
            label: format!("{} seed {seed}", self.name),
            spec: self.recipe.to_string(),
            settings,
            data: None,
            folder: options.out.join(format!("{}-seed-{seed}", self.folder)),
        }
    }
}
