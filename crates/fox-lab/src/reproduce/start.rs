//! Runs that start from the weights of another run.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use toml::Value;

use super::{PlannedRun, StartConfig};
use crate::graph::EXPORT;

/// Rotations within the old length above which YaRN keeps a frequency.
const KEPT_ROTATIONS: f64 = 32.0;

/// The checkpoint that a run starts from.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStart {
    /// The run that produces it.
    pub run: Box<PlannedRun>,
    /// Memory, in tokens, of forget gates that are added.
    pub memory: Option<f64>,
    /// The checkpoint: the export of that run, or a copy with gates.
    pub folder: PathBuf,
}

impl PlannedStart {
    /// The start from `run`, whose learning rate must be fixed, in the folder `out` of a reproduction.
    pub(super) fn new(
        config: &StartConfig,
        run: PlannedRun,
        training_length: usize,
        out: &Path,
    ) -> Result<PlannedStart> {
        let lr = run.lr.with_context(|| {
            format!("{}: `lr` is missing; a row that others start from needs one", config.row)
        })?;
        let memory = config.memory.map(|times| times * training_length as f64);
        let first = run.folder(lr);
        let folder = match memory {
            None => out.join("runs").join(first).join(EXPORT),
            Some(memory) => out.join("starts").join(format!("{first}_gates{memory}")),
        };
        Ok(PlannedStart { run: Box::new(run), memory, folder })
    }

    /// The export of the earlier run.
    pub fn export(&self, out: &Path) -> PathBuf {
        out.join("runs").join(self.run.folder(self.run.lr.unwrap_or_default())).join(EXPORT)
    }

    /// Overrides of a run of `tokens` tokens and sequences of `length` that starts here, and their form in its folder name.
    pub(super) fn settings(
        &self,
        config: &StartConfig,
        tokens: u64,
        length: usize,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let folder = Value::from(self.folder.display().to_string());
        let mut settings = vec![format!("training.init={folder}")];
        let mut name = vec![format!("from_{}", self.run.folder(self.run.lr.unwrap_or_default()))];
        if let Some(memory) = self.memory {
            name.push(format!("gates{memory}"));
        }
        if let Some(fractions) = config.fade {
            let [from, to] = fractions.map(|fraction| (fraction * tokens as f64) as u64);
            settings.push(format!("training.rope_fade=[{from}, {to}]"));
            name.push(format!("fade{from}-{to}"));
        }
        if config.stretch {
            let original = self.run.recipe(0.0)?.data.sequence_length;
            let factor = length as f64 / original as f64;
            settings.push("model.model_type=fox".into());
            settings.push(format!(
                "model.rope_scaling={{ rope_type = \"llama3\", factor = {factor:.1}, low_freq_factor = 1.0, \
                 high_freq_factor = {KEPT_ROTATIONS:.1}, original_max_position_embeddings = {original} }}"
            ));
            name.push(format!("stretch{factor}"));
        }
        Ok((settings, name))
    }
}
