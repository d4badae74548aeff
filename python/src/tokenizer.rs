//! Text to ids and back.

use std::path::Path;

use fox_infer::TextDecoder;
use pyo3::prelude::*;

use crate::errors::value_error;

/// A tokenizer of a checkpoint folder, or a built-in one.
#[pyclass(frozen, module = "foxlm._core")]
pub struct Tokenizer(fox_data::Tokenizer);

fn failed(error: impl std::fmt::Display) -> PyErr {
    value_error(error.to_string())
}

#[pymethods]
impl Tokenizer {
    /// The tokenizer of a folder or `tokenizer.json`, or a built-in one by its name.
    #[staticmethod]
    fn load(name: &str) -> PyResult<Self> {
        let path = Path::new(name);
        let found = match path.exists() {
            true => fox_data::Tokenizer::load(path),
            false => fox_data::Tokenizer::from_name(name),
        };
        Ok(Tokenizer(found.map_err(failed)?))
    }

    /// Name, number of ids, and the id put in front of every sequence.
    fn facts(&self) -> (String, usize, u32) {
        (self.0.identity().name, self.0.vocab_size(), self.0.bos())
    }

    fn encode(&self, text: &str) -> PyResult<Vec<u32>> {
        self.0.encode(text).map_err(failed)
    }

    /// The text of `ids` that follow the ids `after`.
    fn decode(&self, ids: Vec<u32>, after: Vec<u32>) -> PyResult<String> {
        let known = |ids: &[u32]| -> PyResult<Vec<i32>> {
            let all = ids.iter().map(|&id| i32::try_from(id));
            all.collect::<Result<_, _>>().map_err(failed)
        };
        let mut decoder = TextDecoder::new(&self.0, &known(&after)?, &[]).map_err(failed)?;
        let mut text = String::new();
        for id in known(&ids)? {
            text.push_str(&decoder.push(id).map_err(failed)?.text);
        }
        text.push_str(&decoder.finish().map_err(failed)?.text);
        Ok(text)
    }
}
