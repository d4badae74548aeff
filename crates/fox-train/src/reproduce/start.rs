//! Runs that begin with what another one ended with.

use std::path::{Path, PathBuf};

use toml::Value;

use super::{PlannedRun, StartPlan};
use crate::run_folder::EXPORT;
use crate::{Error, Result};

/// Turns within the old length above which YaRN keeps a frequency.
const FAST: f64 = 32.0;

/// What a run begins with.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStart {
    /// The run that comes first.
    pub run: Box<PlannedRun>,
    /// Memory, in tokens, of the forget gates that its model is given.
    pub memory: Option<f64>,
    /// The checkpoint: the export of the first run, or the folder for the same with gates.
    pub folder: PathBuf,
}

impl PlannedStart {
    /// The start of a run from `run`, whose rate must be known, in the folder `out` of a reproduction.
    pub(super) fn new(
        plan: &StartPlan,
        run: PlannedRun,
        training_length: usize,
        out: &Path,
    ) -> Result<PlannedStart> {
        let lr = run.lr.ok_or_else(|| {
            Error::value(&plan.row, "lr", "is missing; a row that others start from needs one")
        })?;
        let memory = plan.memory.map(|times| times * training_length as f64);
        let first = run.folder(lr);
        let folder = match memory {
            None => out.join("runs").join(first).join(EXPORT),
            Some(memory) => out.join("starts").join(format!("{first}_gates{memory}")),
        };
        Ok(PlannedStart { run: Box::new(run), memory, folder })
    }

    /// The export of the first run.
    pub fn export(&self, out: &Path) -> PathBuf {
        out.join("runs").join(self.run.folder(self.run.lr.unwrap_or_default())).join(EXPORT)
    }

    /// Settings of a run of `tokens` tokens with sequences of `length` that begins here, and what its name tells of
    /// them.
    pub(super) fn settings(
        &self,
        plan: &StartPlan,
        tokens: u64,
        length: usize,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let folder = Value::from(self.folder.display().to_string());
        let mut settings = vec![format!("training.init={folder}")];
        let mut told = vec![format!("from_{}", self.run.folder(self.run.lr.unwrap_or_default()))];
        if let Some(memory) = self.memory {
            told.push(format!("gates{memory}"));
        }
        if let Some(parts) = plan.fade {
            let [from, to] = parts.map(|part| (part * tokens as f64) as u64);
            settings.push(format!("training.rope_fade=[{from}, {to}]"));
            told.push(format!("fade{from}-{to}"));
        }
        if plan.stretch {
            let original = self.run.recipe(0.0, None)?.data.sequence_length;
            let factor = length as f64 / original as f64;
            settings.push("model.model_type=fox".into());
            settings.push(format!(
                "model.rope_scaling={{ rope_type = \"llama3\", factor = {factor:.1}, low_freq_factor = 1.0, \
                 high_freq_factor = {FAST:.1}, original_max_position_embeddings = {original} }}"
            ));
            told.push(format!("stretch{factor}"));
        }
        Ok((settings, told))
    }
}
