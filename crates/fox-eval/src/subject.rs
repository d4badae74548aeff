//! A model under evaluation: with a name, and checked against the data it is given.

use fox_data::Dataset;
use fox_model::Model;
use twox_hash::XxHash3_64;

use crate::{Error, Result};

/// A model and what a report calls it.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// In tables and legends.
    pub name: &'a str,
    /// The model.
    pub model: &'a Model,
    /// Length of the sequences it was trained on, if known.
    pub training_length: Option<usize>,
}

impl Subject<'_> {
    /// An error unless the model knows every id of the data.
    pub(crate) fn check_data(&self, data: &dyn Dataset) -> Result<()> {
        self.check_vocabulary("data", data.vocab_size())
    }

    /// An error unless the model has at least `needed` token ids.
    pub fn check_vocabulary(&self, source_name: &'static str, needed: usize) -> Result<()> {
        let model_vocab = self.model.config().vocab_size;
        if model_vocab >= needed {
            return Ok(());
        }
        Err(Error::Vocabulary { model: self.name.to_string(), model_vocab, source_name, needed })
    }

    /// An error if the model computed a value that is NaN or infinite; `what` names it by its place in
    /// `values`.
    ///
    /// Comparisons with NaN are false, so a NaN would otherwise end as an answer: the first choice, no
    /// entropy, a half-life of 0.
    pub(crate) fn check_finite(
        &self,
        values: &[f32],
        what: impl FnOnce(usize) -> String,
    ) -> Result<()> {
        let Some(at) = values.iter().position(|value| !value.is_finite()) else { return Ok(()) };
        let (model, value) = (self.name.to_string(), f64::from(values[at]));
        Err(Error::NotFinite { model, what: what(at), value })
    }

    /// A hash of the configuration and all weights: results on file belong to exactly this model.
    pub fn fingerprint(&self) -> Result<u64> {
        let mut hash = XxHash3_64::oneshot(format!("{:?}", self.model.config()).as_bytes());
        for (_, _, value) in self.model.params().iter() {
            let values = value.to_f32()?;
            hash = XxHash3_64::oneshot_with_seed(hash, bytemuck::cast_slice(&values));
        }
        Ok(hash)
    }
}
