//! `generation_config.json` of a checkpoint: ids that end an answer, and sampling defaults.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result, Sampling};

const FILE: &str = "generation_config.json";
/// Far above every real file; a hostile one must not fill the memory.
const MAX_BYTES: u64 = 1 << 20;
/// Far above the number of end ids of every real model.
const MAX_END_IDS: usize = 64;

/// What a checkpoint recommends for generating with it. Fields that are not set leave the caller's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end an answer.
    pub eos: Vec<i32>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads the file of a checkpoint folder; without one, nothing is set.
    ///
    /// # Errors
    /// A file that is not valid JSON, and values of a wrong type or out of range.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let bad = |detail: String| Error::GenerationConfig { path: path.clone(), detail };
        let mut text = String::new();
        match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            opened => opened
                .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
                .map_err(|error| bad(error.to_string()))?,
        };
        if text.len() as u64 > MAX_BYTES {
            return Err(bad(format!("it is larger than {MAX_BYTES} bytes")));
        }
        Self::parse(&text).map_err(bad)
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        let fields: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("not a JSON object ({error})"))?;
        let present = |name: &str| fields.get(name).filter(|value| !value.is_null());
        let number = |name: &str| {
            let wrong = |value: &Value| format!("`{name}` must be a number, not {value}");
            present(name)
                .map(|value| value.as_f64().map(|x| x as f32).ok_or_else(|| wrong(value)))
                .transpose()
        };
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| i32::try_from(id).ok());
            id.ok_or_else(|| format!("`eos_token_id` must be an id or a list of ids, not {value}"))
        };
        let eos: Vec<i32> = match present("eos_token_id") {
            None => Vec::new(),
            Some(Value::Array(list)) if list.len() <= MAX_END_IDS => {
                list.iter().map(id).collect::<std::result::Result<_, _>>()?
            }
            Some(Value::Array(_)) => {
                return Err(format!("`eos_token_id` has more than {MAX_END_IDS} ids"));
            }
            Some(one) => vec![id(one)?],
        };
        let top_k = match present("top_k") {
            None => None,
            // Some files write "all" as -1.
            Some(value) if value.as_i64() == Some(-1) => Some(0),
            Some(value) => match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
                Some(count) => Some(count),
                None => return Err(format!("`top_k` must be a whole number, not {value}")),
            },
        };
        let config = GenerationConfig {
            eos,
            temperature: match present("do_sample") {
                Some(Value::Bool(false)) => Some(0.0),
                _ => number("temperature")?,
            },
            top_k,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        };
        config.sampling(Sampling::default()).check().map_err(|refusal| refusal.to_string())?;
        Ok(config)
    }

    /// Sampling parameters: those of the checkpoint, and `otherwise` where it sets none.
    pub fn sampling(&self, otherwise: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(otherwise.temperature),
            top_k: self.top_k.unwrap_or(otherwise.top_k),
            top_p: self.top_p.unwrap_or(otherwise.top_p),
            min_p: self.min_p.unwrap_or(otherwise.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(otherwise.repetition_penalty),
            ..otherwise
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_published_files() {
        // As of Llama 3.1 Instruct and of GPT-2.
        let llama = r#"{"bos_token_id": 128000, "do_sample": true, "eos_token_id": [128001, 128008, 128009],
                        "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"}"#;
        let config = GenerationConfig::parse(llama).unwrap();
        assert_eq!(config.eos, [128_001, 128_008, 128_009]);
        let sampling = config.sampling(Sampling { seed: 5, top_k: 3, ..Sampling::default() });
        let expected =
            Sampling { temperature: 0.6, top_p: 0.9, top_k: 3, seed: 5, ..Sampling::default() };
        assert_eq!(sampling, expected);
        let config = GenerationConfig::parse(r#"{"eos_token_id": 50256, "top_k": null}"#).unwrap();
        assert_eq!(config.eos, [50_256]);
        assert_eq!(config.sampling(Sampling::default()), Sampling::default());
        let greedy =
            GenerationConfig::parse(r#"{"do_sample": false, "temperature": 0.6}"#).unwrap();
        assert_eq!(greedy.sampling(Sampling::default()).temperature, 0.0);
    }

    #[test]
    fn rejects_wrong_values_by_name() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::load(folder.path()).unwrap(), GenerationConfig::default());
        for (text, words) in [
            ("[]", "not a JSON object"),
            (r#"{"eos_token_id": [1, "x"]}"#, "`eos_token_id` must be an id or a list of ids"),
            (r#"{"eos_token_id": -1}"#, "`eos_token_id` must be an id"),
            (r#"{"temperature": "hot"}"#, "`temperature` must be a number"),
            (r#"{"temperature": -1}"#, "temperature must be 0 or more"),
            (r#"{"top_p": 7}"#, "top_p must be above 0 and at most 1"),
            (r#"{"top_k": 0.5}"#, "`top_k` must be a whole number"),
        ] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            let error = GenerationConfig::load(folder.path()).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(FILE), "{text}: {error}");
            assert!(error.ends_with("; correct or remove the file"), "{error}");
        }
    }
}
