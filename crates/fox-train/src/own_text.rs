//! Defaults for training on a user's text: tokenizer, held-out split, recipe.

use std::path::Path;
use std::sync::Arc;

use fox_data::{
    Corpus, CorpusOptions, HeldOut, MemoryDataset, PrepareOptions, Split, Tokenizer, Verify,
    open_dataset,
};

use crate::data::RunData;
use crate::recipe::{self, GateInit};
use crate::{Error, Result};

/// With fewer documents than this, the end of each is held out instead of some of them.
const FEW_DOCUMENTS: usize = 100;
/// The fraction that is held out of each of few documents, and of many documents.
const OF_EACH: f64 = 0.05;
const OF_MANY: f64 = 0.01;
/// Beyond this many bytes, tokens of several bytes are worth their larger vocabulary.
const BYTES_UP_TO: u64 = 200 << 20;
/// Most epochs over a text, and the shortest sequences that are worth training on.
const PASSES: u64 = 20;
const SHORTEST: u64 = 64;
/// Bytes of a text that a sample reads.
const SAMPLE_BYTES: u64 = 4 << 20;

/// Whether a path is text: a file or a folder of texts, and not prepared data.
pub fn is_text(path: &Path) -> bool {
    let prepared = ["index.json", ".zarray", "zarr.json", "train.zarr", "heldout.zarr"];
    path.is_file()
        || path.is_dir()
            && !prepared.iter().any(|name| path.join(name).exists())
            && Corpus::open(path, CorpusOptions::default()).is_ok()
}

/// Options to prepare a text in the folder `data`, with the tokenizer that is named or one that fits its size.
///
/// # Errors
/// A text that cannot be read, an unknown tokenizer.
pub fn prepare_options(
    text: &Path,
    data: &Path,
    tokenizer: Option<&str>,
) -> Result<PrepareOptions> {
    let corpus = Corpus::open(text, CorpusOptions::default())?;
    let mut options = PrepareOptions::new(text, data, tokenizer_for(&corpus, tokenizer)?);
    options.held_out = match corpus.documents().take(FEW_DOCUMENTS).count() < FEW_DOCUMENTS {
        true => HeldOut::Ends { fraction: OF_EACH },
        false => HeldOut::Fraction { fraction: OF_MANY, seed: 0 },
    };
    Ok(options)
}

fn tokenizer_for(corpus: &Corpus, name: Option<&str>) -> Result<Tokenizer> {
    let usual = if corpus.total_bytes() <= BYTES_UP_TO { "bytes" } else { "gpt2" };
    Ok(Tokenizer::from_name(name.unwrap_or(usual))?)
}

/// The first documents of a text as tokens in memory, for a dry run.
pub struct TextSample {
    /// To train on; nothing is held out.
    pub data: RunData,
    /// Whether it holds the complete text.
    pub complete: bool,
    /// Estimated tokens of the text, without those that would be held out.
    pub tokens: u64,
}

/// Reads the start of a text.
///
/// # Errors
/// As [`prepare_options`].
pub fn sample(text: &Path, tokenizer: Option<&str>) -> Result<TextSample> {
    let corpus = Corpus::open(text, CorpusOptions::default())?;
    let tokenizer = tokenizer_for(&corpus, tokenizer)?;
    let (mut documents, mut bytes, mut tokens) = (Vec::new(), 0, 0);
    let mut complete = true;
    for document in corpus.documents() {
        let document = document?.text;
        bytes += document.len() as u64;
        let ids = tokenizer.encode(&document)?;
        tokens += ids.len() as u64;
        documents.push(ids);
        if bytes >= SAMPLE_BYTES {
            complete = false;
            break;
        }
    }
    if !complete {
        // Of compressed text this is too few; the recipe is chosen by their order of magnitude.
        tokens = tokens.max((tokens as f64 * corpus.total_bytes() as f64 / bytes as f64) as u64);
    }
    let identity = tokenizer.identity().to_string();
    let data = MemoryDataset::new(documents, tokenizer.vocab_size(), tokenizer.bos(), identity);
    let data =
        RunData { train: Arc::new(data), heldout: None, tokenizer: Some(tokenizer), chat: None };
    Ok(TextSample { data, complete, tokens: tokens - (tokens as f64 * OF_EACH) as u64 })
}

/// A built-in recipe for some data.
#[derive(Clone, Debug, PartialEq)]
pub struct RecipeChoice {
    /// Its name.
    pub name: &'static str,
    /// Overrides that fit it to the data.
    pub overrides: Vec<String>,
    /// Tokens that the choice is based on.
    pub tokens: u64,
}

/// Chooses a recipe for prepared data by their size and the device.
///
/// # Errors
/// Data that cannot be read or are too short.
pub fn choose(data: &Path, on_gpu: bool) -> Result<RecipeChoice> {
    let train = open_dataset(data, Split::Train, None, Verify::Structure)?;
    let held_out = open_dataset(data, Split::HeldOut, None, Verify::Structure).ok();
    let longest = held_out.map_or(u64::MAX, |data| data.lengths().longest());
    let longest = longest.min(train.lengths().longest());
    choose_for(data, train.lengths().tokens(), longest, on_gpu)
}

/// [`choose`] for a text that is not prepared yet.
///
/// # Errors
/// A text that is too short.
pub fn choose_for_text(text: &Path, sample: &TextSample, on_gpu: bool) -> Result<RecipeChoice> {
    let longest = sample.data.train.lengths().longest();
    choose_for(text, sample.tokens, (longest as f64 * OF_EACH) as u64, on_gpu)
}

/// The recipe for this many tokens in documents of at most this length.
fn choose_for(data: &Path, tokens: u64, longest: u64, on_gpu: bool) -> Result<RecipeChoice> {
    let name = match (on_gpu, tokens) {
        (true, 1_000_000_000..) => "fox-pro-125m",
        (true, 2_000_000..) => "fox-pro-26m",
        (true, _) => "fox-pro-1m",
        (false, 1_000_000..) => "books-small",
        (false, _) => "tiny-fox-pro",
    };
    let usual = recipe::load(name, &[])?;
    let mut overrides = Vec::new();
    let mut length = usual.data.sequence_length as u64;
    while length > longest {
        length /= 2;
    }
    if length < SHORTEST {
        let least = PASSES * SHORTEST / 1000 + 1;
        return Err(Error::TooShort { path: data.to_path_buf(), tokens, least });
    }
    if length < usual.data.sequence_length as u64 {
        overrides.push(format!("data.sequence_length={length}"));
    }
    if usual.training.gate_init == GateInit::Published {
        overrides.push("training.gate_init=spread".into());
    }
    let seen = usual.training.tokens.min(PASSES * tokens);
    if seen < usual.training.tokens {
        overrides.push(format!("training.tokens={seen}"));
    }
    if usual.schedule.warmup_tokens > seen / 10 {
        overrides.push(format!("schedule.warmup_tokens={}", seen / 10));
    }
    Ok(RecipeChoice { name, overrides, tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(tokens: u64, longest: u64, on_gpu: bool) -> Result<RecipeChoice> {
        choose_for(Path::new("my.txt"), tokens, longest, on_gpu)
    }

    #[test]
    fn recipe_choice_grows_with_data() {
        let mut sizes = Vec::new();
        for (tokens, on_gpu) in
            [(20_000, false), (1 << 30, false), (20_000, true), (10_000_000, true), (1 << 32, true)]
        {
            let choice = chosen(tokens, tokens / 20, on_gpu).unwrap();
            let recipe = recipe::load(choice.name, &choice.overrides).unwrap();
            assert!(recipe.training.tokens <= PASSES * tokens, "{choice:?}");
            sizes.push(recipe.model_config(257).unwrap().param_specs().len());
        }
        assert!(sizes[0] < sizes[1] && sizes[2] < sizes[3] && sizes[3] < sizes[4], "{sizes:?}");
    }

    #[test]
    fn sequences_fit_into_the_documents() {
        let choice = chosen(5_000_000, 300, false).unwrap();
        assert_eq!(choice.overrides, ["data.sequence_length=256"]);
        let error = chosen(5_000_000, 63, false).unwrap_err().to_string();
        assert_eq!(
            error,
            "my.txt has 5000000 tokens, too few to learn from; give it at least 2 kB of text"
        );
    }
}
