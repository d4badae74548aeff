//! Chat templates in the folder of a checkpoint: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`.

use std::path::Path;

use fox_base::durable;
use serde_json::Value;

use super::ChatTemplate;
use crate::error::{Error, Result};
use crate::tokenizer::{Tokenizer, file_limits};

const JINJA: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";

impl ChatTemplate {
    /// The template and markers of a checkpoint folder, for text that `tokenizer` encodes
    /// ([`Tokenizer::encode_marked`]).
    ///
    /// # Errors
    /// Files that cannot be read; a missing one is the same as one without a template.
    pub fn load(folder: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let config = read_config(&folder.join(CONFIG))?.unwrap_or_default();
        // Several templates have names.
        let listed = config["chat_template"].as_array().and_then(|list| {
            let own = list.iter().find(|entry| entry["name"] == "default").or(list.first());
            own?["template"].as_str()
        });
        let configured = config["chat_template"].as_str().or(listed).map(str::to_owned);
        let source = read(&folder.join(JINJA))?.or(configured);
        if tokenizer.is_built_in() {
            return Ok(Self { source, ..Self::without_source(tokenizer) });
        }
        // A marker is a text or an object that has one.
        let marker = |name: &str| {
            let text = config[name].as_str().or(config[name]["content"].as_str());
            text.unwrap_or_default().to_owned()
        };
        Ok(Self { source, bos_token: marker("bos_token"), eos_token: marker("eos_token") })
    }

    /// Writes the template into a folder with tokenizer files, in place of the one there. Without a template, nothing
    /// is written.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let Some(source) = &self.source else { return Ok(()) };
        durable::write(&folder.join(JINJA), source.as_bytes())?;
        let path = folder.join(CONFIG);
        if let Some(Value::Object(mut config)) = read_config(&path)?
            && config.shift_remove("chat_template").is_some()
        {
            durable::write(&path, Value::Object(config).to_string().as_bytes())?;
        }
        Ok(())
    }
}

/// The text of a file, if it exists.
fn read(path: &Path) -> Result<Option<String>> {
    let bytes = match file_limits::read(path) {
        Err(Error::Missing { .. }) => return Ok(None),
        bytes => bytes?,
    };
    String::from_utf8(bytes).map(Some).map_err(|error| Error::NotUtf8 {
        path: path.to_path_buf(),
        offset: error.utf8_error().valid_up_to() as u64,
    })
}

fn read_config(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read(path)? else { return Ok(None) };
    let parsed = serde_json::from_str(&text).map_err(|error| Error::BadTokenizer {
        path: path.to_path_buf(),
        detail: format!("not valid JSON ({error})"),
    });
    parsed.map(Some)
}
