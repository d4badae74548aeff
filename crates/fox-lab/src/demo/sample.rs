//! A sample of the trained model.

use std::path::Path;

use anyhow::{Result, bail};
use fox_data::SyntheticTokenizer;
use fox_infer::{Engine, EngineOptions, Event, FinishReason, Request, Sampling};
use fox_model::Model;
use fox_tensor::Device;

/// Number of generated words.
const WORDS: usize = 90;

/// Continues a prompt with the model of a run folder; deterministic.
pub fn generate(folder: &Path, prompt: &[u32], device: &Device) -> Result<String> {
    let model = Model::from_checkpoint(&folder.join("export"), device)?;
    let engine = Engine::start(model, EngineOptions::default())?;
    let prompt = prompt.iter().map(|id| *id as i32).collect();
    let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
    let mut words = Vec::with_capacity(WORDS);
    for event in engine.submit(Request { sampling, ..Request::greedy(prompt, WORDS) })? {
        match event {
            Event::Token(scored) => words.push(scored.id as u32),
            Event::Finished(finished) => {
                if let FinishReason::Failed(reason) = finished.reason {
                    bail!(reason);
                }
            }
            _ => {}
        }
    }
    Ok(SyntheticTokenizer.decode(&words)?)
}
