//! Settings of a recipe that its data do not allow, and what takes their place.

use fox_data::{DocumentLengths, Layout};

use crate::Recipe;
use crate::data::RunData;
use crate::recipe::OrderName;

/// Fewest tokens of a held-out sequence.
const SHORTEST: u64 = 16;

impl Recipe {
    /// Changes order, layout, sequence length, batch and evaluation length where the data cannot be read with those of the
    /// recipe, and adds a notice for each change. Keys for which `fixed` is true stay: a user has set them, and an
    /// error later names what does not fit.
    pub fn fit_to(&mut self, data: &RunData, fixed: impl Fn(&str) -> bool) {
        let lengths = data.train.lengths();
        let free = |key: &str| !fixed(key);
        if free("data.order") && free("data.layout") {
            self.fit_order(lengths);
        }
        let padded = self.data.layout == Layout::PaddedWindows;
        let staged = !self.data.stages.is_empty();
        if free("data.sequence_length") && free("data.layout") && !padded && !staged {
            self.fit_length(lengths);
        }
        if free("training.batch") && self.data.order != OrderName::LongCrawl64 {
            self.fit_batch(lengths);
        }
        let longest = data.heldout.as_ref().map(|data| data.lengths().longest());
        if let Some(longest) = longest.filter(|_| free("evaluation.length")) {
            self.fit_evaluation(longest);
        }
    }

    fn fit_order(&mut self, lengths: &DocumentLengths) {
        let window = self.data.sequence_length as u64;
        let columns = self.data.layout == Layout::Windows
            && lengths.uniform_len().is_some_and(|len| len.is_multiple_of(window.max(1)));
        if self.data.order == OrderName::LongCrawl64 && !columns {
            self.data.order = OrderName::Shuffled;
            let why =
                "the documents have different lengths or lengths that sequences do not divide";
            self.notices.push(format!("data.order is shuffled instead of longcrawl64: {why}"));
        }
    }

    fn fit_length(&mut self, lengths: &DocumentLengths) {
        let (longest, tokens) = (lengths.longest(), lengths.tokens());
        let before = self.data.sequence_length;
        if self.data.layout != Layout::Packed && longest < before as u64 && longest < tokens {
            self.data.layout = Layout::Packed;
            self.notices.push(format!(
                "data.layout is packed: no document has {before} tokens (the longest has {longest})"
            ));
        }
        let available = if self.data.layout == Layout::Packed { tokens } else { longest };
        while self.data.sequence_length as u64 > available && self.data.sequence_length > 1 {
            self.data.sequence_length /= 2;
        }
        if self.data.sequence_length < before {
            self.notices.push(format!(
                "data.sequence_length is {} instead of {before}: the data have {available} tokens",
                self.data.sequence_length
            ));
        }
    }

    fn fit_batch(&mut self, lengths: &DocumentLengths) {
        let window = self.data.sequence_length as u64;
        let tokens = match self.data.layout {
            Layout::Packed => lengths.tokens(),
            Layout::Windows => lengths.in_windows(window) as u64,
            Layout::PaddedWindows => return,
        };
        let (sequences, before) = (tokens / window.max(1), self.training.batch);
        if (1..before as u64).contains(&sequences) {
            self.training.batch = sequences as usize;
            self.notices.push(format!(
                "training.batch is {sequences} instead of {before}: the data have {sequences} sequences of {window} tokens"
            ));
        }
    }

    fn fit_evaluation(&mut self, longest: u64) {
        let before = self.evaluation.length.unwrap_or(self.data.sequence_length);
        if longest >= before as u64 || self.evaluation.sequences == 0 {
            return;
        }
        let longest_is = format!("the longest held-out document has {longest} tokens");
        if longest < SHORTEST {
            self.evaluation.sequences = 0;
            self.notices.push(format!("the evaluation is left out: {longest_is}"));
            return;
        }
        let length = 1 << longest.ilog2();
        self.evaluation.length = Some(length);
        self.notices
            .push(format!("evaluation.length is {length} instead of {before}: {longest_is}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fox_data::MemoryDataset;

    use super::*;
    use crate::recipe;

    fn fitted(train: &[usize], heldout: usize, set: &[&str]) -> Recipe {
        let dataset = |lens: &[usize]| {
            let documents = lens.iter().map(|len| vec![1; *len]).collect();
            Arc::new(MemoryDataset::new(documents, 8, 0, "ones"))
        };
        let heldout = Some(dataset(&[heldout]) as _);
        let data = RunData { train: dataset(train), heldout, tokenizer: None, chat: None };
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let mut recipe = recipe::load("fox-pro-125m", &set).unwrap();
        recipe.fit_to(&data, |key| set.iter().any(|s| s.starts_with(key)));
        recipe
    }

    #[test]
    fn published_recipe_fits_documents_of_any_length() {
        let recipe = fitted(&[40_000, 50_000, 60_000], 2_000, &[]);
        assert_eq!(recipe.data.order, OrderName::Shuffled);
        assert_eq!((recipe.data.layout, recipe.data.sequence_length), (Layout::Windows, 16_384));
        assert_eq!((recipe.training.batch, recipe.evaluation.length), (8, Some(1_024)));
        assert_eq!(recipe.notices.len(), 3, "{:?}", recipe.notices);
        assert!(recipe.notices[0].contains("shuffled instead of longcrawl64"));
        let recipe = fitted(&[9_000, 9_001, 40], 10, &[]);
        assert_eq!((recipe.data.layout, recipe.data.sequence_length), (Layout::Packed, 16_384));
        assert_eq!((recipe.training.batch, recipe.evaluation.sequences), (1, 0));
        let recipe = fitted(&[900], 20_000, &[]);
        assert_eq!((recipe.data.layout, recipe.data.sequence_length), (Layout::Windows, 512));
    }

    #[test]
    fn fitting_data_and_explicit_keys_change_nothing() {
        let recipe = fitted(&[32_768; 32], 16_384, &[]);
        assert_eq!(recipe.notices, [""; 0]);
        assert_eq!(recipe.data.order, OrderName::LongCrawl64);
        let recipe = fitted(&[900], 16_384, &["data.order=longcrawl64", "data.layout=windows"]);
        assert_eq!(recipe.notices, [""; 0]);
    }
}
