//! Tokenizer files beside a checkpoint.
//!
//! Every folder gets `fox_tokenizer.json`, which names the tokenizer and its identity, and besides that the files
//! that Hugging Face tools read:
//!
//! | tokenizer | files |
//! |---|---|
//! | bytes | `tokenizer.json` (byte-level BPE without merges: ids are byte values), `tokenizer_config.json` |
//! | gpt2 | `tokenizer.json`, `vocab.json`, `merges.txt`, `tokenizer_config.json` |
//! | json-gpt2 | `vocab.json`, `merges.txt`, `tokenizer_config.json` with class `JSONGPT2Tokenizer`; no `tokenizer.json`, because that format has no JSON escape and would silently tokenize differently |
//! | synthetic | `tokenizer.json` (word level), `tokenizer_config.json` |
//! | Hugging Face | `tokenizer.json` byte for byte, `tokenizer_config.json` |

use std::path::Path;

use fox_base::durable;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{ByteTokenizer, Gpt2Tokenizer, JsonGpt2Tokenizer, Tokenizer, file_limits, gpt2_files};
use crate::error::{Error, Result};
use crate::synthetic::{START_WORD, SyntheticTokenizer, UNKNOWN_WORD};

const MARKER_FILE: &str = "fox_tokenizer.json";

/// Contents of `fox_tokenizer.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    tokenizer: String,
    identity: String,
}

impl Tokenizer {
    /// Writes the tokenizer's files into a folder that exists.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let write = |name: &str, value: &Value| {
            durable::write(&folder.join(name), value.to_string().as_bytes())
        };
        match self {
            Self::Bytes(_) => write("tokenizer.json", &bytes_json())?,
            Self::Gpt2(_) => {
                write("tokenizer.json", &gpt2_files::tokenizer_json())?;
                write_gpt2_files(folder)?;
            }
            Self::JsonGpt2(_) => write_gpt2_files(folder)?,
            Self::Synthetic(_) => write("tokenizer.json", &synthetic_json())?,
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => durable::write(&folder.join("tokenizer.json"), t.file())?,
        }
        write("tokenizer_config.json", &self.config())?;
        let identity = self.identity();
        let marker = Marker { identity: identity.to_string(), tokenizer: identity.name };
        Ok(write(MARKER_FILE, &json!(marker))?)
    }

    /// The tokenizer of a folder (ours, or a Hugging Face checkpoint) or of a `tokenizer.json`.
    ///
    /// # Errors
    /// Files that are missing, are no tokenizer, or need the feature `hf-tokenizers` in a build without it.
    pub fn load(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return load_tokenizer_json(path);
        }
        let marker_path = path.join(MARKER_FILE);
        if marker_path.exists() {
            return load_marked(path, &marker_path);
        }
        let config_path = path.join("tokenizer_config.json");
        let class = if config_path.exists() {
            let config: Value = read_json(&config_path)?;
            config["tokenizer_class"].as_str().unwrap_or("").to_owned()
        } else {
            String::new()
        };
        if class.contains("JSONGPT2") {
            return Ok(Self::JsonGpt2(JsonGpt2Tokenizer));
        }
        let json_path = path.join("tokenizer.json");
        if json_path.exists() {
            return load_tokenizer_json(&json_path);
        }
        let vocab_path = path.join("vocab.json");
        if vocab_path.exists()
            && read_json::<Map<String, Value>>(&vocab_path)? == gpt2_files::vocab()
        {
            return Ok(Self::Gpt2(Gpt2Tokenizer));
        }
        Err(Error::BadTokenizer {
            path: path.to_path_buf(),
            detail: "it has no fox_tokenizer.json, no tokenizer.json and no vocab.json of GPT-2"
                .into(),
        })
    }

    /// `tokenizer_config.json`.
    fn config(&self) -> Value {
        let marked = |class: &str, marker: &str| {
            json!({
                "tokenizer_class": class,
                "bos_token": marker,
                "eos_token": marker,
                "clean_up_tokenization_spaces": false,
            })
        };
        let fast = "PreTrainedTokenizerFast";
        match self {
            Self::Bytes(_) => marked(fast, &gpt2_files::byte_character(255).to_string()),
            Self::Gpt2(_) => {
                let mut config = marked("GPT2TokenizerFast", Gpt2Tokenizer::END_OF_TEXT_TEXT);
                config["unk_token"] = json!(Gpt2Tokenizer::END_OF_TEXT_TEXT);
                config["add_prefix_space"] = json!(false);
                config
            }
            Self::JsonGpt2(_) => {
                let mut config = marked("JSONGPT2Tokenizer", Gpt2Tokenizer::END_OF_TEXT_TEXT);
                config["unk_token"] = json!(Gpt2Tokenizer::END_OF_TEXT_TEXT);
                config["add_prefix_space"] = json!(false);
                config["add_bos_token"] = json!(true);
                config["model_max_length"] = json!(JsonGpt2Tokenizer::MODEL_MAX_LENGTH);
                config
            }
            Self::Synthetic(_) => {
                let mut config = marked(fast, START_WORD);
                config["unk_token"] = json!(UNKNOWN_WORD);
                config
            }
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => marked(fast, t.bos_token()),
        }
    }
}

fn write_gpt2_files(folder: &Path) -> Result<()> {
    let vocab = Value::Object(gpt2_files::vocab()).to_string();
    durable::write(&folder.join("vocab.json"), vocab.as_bytes())?;
    let merges = format!("#version: 0.2\n{}\n", gpt2_files::merges().join("\n"));
    Ok(durable::write(&folder.join("merges.txt"), merges.as_bytes())?)
}

fn bytes_json() -> Value {
    let vocab: Map<String, Value> = (0..=255_u8)
        .map(|byte| (gpt2_files::byte_character(byte).to_string(), json!(byte)))
        .collect();
    let start = gpt2_files::byte_character(255).to_string();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [gpt2_files::added_token(ByteTokenizer::BOS, &start)],
        "normalizer": null,
        "pre_tokenizer": gpt2_files::byte_level(false),
        "post_processor": null,
        "decoder": gpt2_files::byte_level(false),
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// The `tokenizer.json` of a byte-level BPE with `vocab_size` ids, at least 257, for tests of large vocabularies: the
/// 256 bytes, generated words with a space in front, and `<|endoftext|>` as the last id. It has no merges, so that
/// encoding gives bytes.
pub fn generated_tokenizer_json(vocab_size: u32) -> String {
    let byte = |id: u32| gpt2_files::byte_character(id as u8).to_string();
    let word = |id: u32| format!("{}w{id}", gpt2_files::byte_character(b' '));
    let last = vocab_size.max(257) - 1;
    let vocab: Map<String, Value> = (0..last)
        .map(|id| (if id < 256 { byte(id) } else { word(id) }, json!(id)))
        .chain([(Gpt2Tokenizer::END_OF_TEXT_TEXT.to_owned(), json!(last))])
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": [gpt2_files::added_token(last, Gpt2Tokenizer::END_OF_TEXT_TEXT)],
        "normalizer": null,
        "pre_tokenizer": gpt2_files::byte_level(true),
        "post_processor": null,
        "decoder": gpt2_files::byte_level(true),
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
    .to_string()
}

fn synthetic_json() -> Value {
    let vocab: Map<String, Value> =
        (0..).map_while(|id| Some((SyntheticTokenizer.word(id)?.to_owned(), json!(id)))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [
            gpt2_files::added_token(SyntheticTokenizer::BOS, START_WORD),
            gpt2_files::added_token(SyntheticTokenizer::UNKNOWN, UNKNOWN_WORD),
        ],
        "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN_WORD },
    })
}

fn load_marked(folder: &Path, marker_path: &Path) -> Result<Tokenizer> {
    let marker: Marker = read_json(marker_path)?;
    let tokenizer = match marker.tokenizer.as_str() {
        "hf" => load_tokenizer_json(&folder.join("tokenizer.json"))?,
        name @ ("bytes" | "gpt2" | "json-gpt2" | "synthetic") => Tokenizer::from_name(name)?,
        other => {
            return Err(Error::BadTokenizer {
                path: marker_path.to_path_buf(),
                detail: format!("it names \"{other}\", which this version does not know"),
            });
        }
    };
    let found = tokenizer.identity().to_string();
    if found != marker.identity {
        return Err(Error::WrongTokenizer {
            path: marker_path.to_path_buf(),
            found: marker.identity,
            expected: found,
        });
    }
    Ok(tokenizer)
}

/// A `tokenizer.json`; GPT-2's own is recognised and needs no further library.
fn load_tokenizer_json(path: &Path) -> Result<Tokenizer> {
    let bytes = file_limits::read(path)?;
    let value: Value = parse_json(path, &bytes)?;
    if value["model"].is_null() {
        return Err(Error::BadTokenizer {
            path: path.to_path_buf(),
            detail: "it has no \"model\"; a Hugging Face tokenizer.json is expected".into(),
        });
    }
    if is_gpt2(&value) {
        return Ok(Tokenizer::Gpt2(Gpt2Tokenizer));
    }
    file_limits::check(&value)
        .map_err(|detail| Error::BadTokenizer { path: path.to_path_buf(), detail })?;
    load_other(path, bytes)
}

fn is_gpt2(value: &Value) -> bool {
    let model = &value["model"];
    let splitter = &value["pre_tokenizer"];
    model["type"].as_str() != Some("WordLevel")
        && splitter["type"] == "ByteLevel"
        && splitter["add_prefix_space"] == false
        && splitter["use_regex"] != false
        && value["normalizer"].is_null()
        && model["vocab"].as_object() == Some(&gpt2_files::vocab())
}

#[cfg(feature = "hf-tokenizers")]
fn load_other(path: &Path, bytes: Vec<u8>) -> Result<Tokenizer> {
    super::HfTokenizer::from_file(path, bytes).map(Tokenizer::HuggingFace)
}

#[cfg(not(feature = "hf-tokenizers"))]
fn load_other(path: &Path, _bytes: Vec<u8>) -> Result<Tokenizer> {
    Err(Error::FeatureMissing {
        path: path.to_path_buf(),
        what: "the Hugging Face tokenizer library",
        feature: "hf-tokenizers",
    })
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    parse_json(path, &file_limits::read(path)?)
}

fn parse_json<T: for<'a> Deserialize<'a>>(path: &Path, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::BadTokenizer {
        path: path.to_path_buf(),
        detail: format!("not valid JSON ({error})"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn saved_tokenizers_load() {
        for name in ["bytes", "gpt2", "json-gpt2", "synthetic"] {
            let folder = tempfile::tempdir().unwrap();
            let tokenizer = Tokenizer::from_name(name).unwrap();
            tokenizer.save(folder.path()).unwrap();
            let loaded = Tokenizer::load(folder.path()).unwrap();
            assert_eq!(loaded.identity(), tokenizer.identity());
        }
    }

    #[test]
    fn recognizes_gpt2_files() {
        for name in ["gpt2", "json-gpt2"] {
            let folder = tempfile::tempdir().unwrap();
            Tokenizer::from_name(name).unwrap().save(folder.path()).unwrap();
            fs::remove_file(folder.path().join(MARKER_FILE)).unwrap();
            let loaded = Tokenizer::load(folder.path()).unwrap();
            assert_eq!(loaded.identity().name, name);
            if name == "gpt2" {
                fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
                let loaded = Tokenizer::load(folder.path()).unwrap();
                assert_eq!(loaded.identity().name, name);
            }
        }
    }

    #[test]
    fn rejects_unusable_files() {
        let folder = tempfile::tempdir().unwrap();
        let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no tokenizer.json"), "{error}");
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, "{").unwrap();
        let error = Tokenizer::load(&path).unwrap_err().to_string();
        assert!(error.contains("not valid JSON"), "{error}");
        fs::write(&path, "{}").unwrap();
        let error = Tokenizer::load(&path).unwrap_err().to_string();
        assert!(error.contains("no \"model\""), "{error}");
        fs::write(folder.path().join(MARKER_FILE), r#"{"tokenizer":"bytes","identity":"bytes:1"}"#)
            .unwrap();
        let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains("bytes:1"), "{error}");
    }

    #[cfg(not(feature = "hf-tokenizers"))]
    #[test]
    fn foreign_tokenizer_needs_a_feature() {
        let folder = tempfile::tempdir().unwrap();
        Tokenizer::from_name("synthetic").unwrap().save(folder.path()).unwrap();
        let error = Tokenizer::load(&folder.path().join("tokenizer.json")).unwrap_err();
        assert!(error.to_string().contains("--features hf-tokenizers"), "{error}");
    }
}
