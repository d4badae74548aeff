//! Defaults for training on a user's text: tokenizer, held-out split, recipe.

use std::path::Path;
use std::sync::Arc;

use fox_data::{
    Corpus, CorpusOptions, DocumentLengths, HeldOut, Layout, MemoryDataset, PrepareOptions, Split,
    Tokenizer, Verify, open_dataset,
};

use crate::data::RunData;
use crate::recipe::{self, GateInit};
use crate::{Error, Recipe, Result};

/// With fewer documents than this, the end of each is held out instead of some of them.
const FEW_DOCUMENTS: usize = 100;
/// The fraction that is held out of each of few documents, and of many documents.
const OF_EACH: f64 = 0.05;
const OF_MANY: f64 = 0.01;
/// Beyond this many bytes, tokens of several bytes are worth their larger vocabulary.
const BYTES_UP_TO: u64 = 200 << 20;
/// Most epochs over a text, and the shortest sequences that are worth training on.
const EPOCHS: u64 = 10;
const SHORTEST: u64 = 64;
/// Fewest steps of a run: at these budgets more and smaller steps learn more from the same tokens.
const STEPS: u64 = 1000;
/// Documents are concatenated when sequences inside of them would hold less than this fraction of the tokens.
const FULL_WINDOWS: f64 = 0.95;
/// The recipe for texts of more than a million tokens on a CPU.
const FOR_TEXT: &str = "books-small";
/// Bytes of a text that a sample reads.
const SAMPLE_BYTES: u64 = 4 << 20;

/// Whether a path is text: a file or a folder of texts, and not prepared data.
pub fn is_text(path: &Path) -> bool {
    let prepared =
        ["index.json", "prepare.json", ".zarray", "zarr.json", "train.zarr", "heldout.zarr"];
    path.is_file() || path.is_dir() && !prepared.iter().any(|name| path.join(name).exists())
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
    let held_out = held_out.map_or(u64::MAX, |data| data.lengths().longest());
    choose_for(data, train.lengths(), train.lengths().tokens(), held_out, on_gpu)
}

/// [`choose`] for a text that is not prepared yet.
///
/// # Errors
/// A text that is too short.
pub fn choose_for_text(text: &Path, sample: &TextSample, on_gpu: bool) -> Result<RecipeChoice> {
    let lengths = sample.data.train.lengths();
    let held_out = (lengths.longest() as f64 * OF_EACH) as u64;
    choose_for(text, lengths, sample.tokens, held_out, on_gpu)
}

/// The recipe for `tokens` tokens in documents of these lengths, when the longest held-out document has `held_out`.
fn choose_for(
    data: &Path,
    lengths: &DocumentLengths,
    tokens: u64,
    held_out: u64,
    on_gpu: bool,
) -> Result<RecipeChoice> {
    let (name, limit) = recipe_for(tokens, on_gpu);
    let usual = recipe::load(name, &[])?;
    let mut overrides = Vec::new();
    let usual_length = usual.data.sequence_length as u64;
    // Short documents are concatenated, so that none of them is dropped.
    let packed = lengths.documents() > 1
        && lengths.in_windows(usual_length) < FULL_WINDOWS * lengths.tokens() as f64;
    let mut length = usual_length;
    let longest = if packed { lengths.tokens() } else { lengths.longest().min(held_out) };
    while length > longest {
        length /= 2;
    }
    if length < SHORTEST {
        let least = (SHORTEST as f64 / OF_EACH / 1000.0) as u64 + 1;
        return Err(Error::TooShort { path: data.to_path_buf(), tokens, least });
    }
    if packed && usual.data.layout != Layout::Packed {
        overrides.push("data.layout=packed".into());
    }
    if length < usual_length {
        overrides.push(format!("data.sequence_length={length}"));
    }
    overrides.extend(budget(&usual, tokens, limit, length));
    Ok(RecipeChoice { name, overrides, tokens })
}

/// The recipe for so many tokens, and the most of them that are read without being asked for: some ten minutes.
pub(crate) fn recipe_for(tokens: u64, on_gpu: bool) -> (&'static str, u64) {
    match (on_gpu, tokens) {
        (true, 1_000_000_000..) => ("fox-pro-125m", 0),
        (true, 2_000_000..) => ("fox-pro-26m", 500_000_000),
        (true, _) => ("fox-pro-1m", 0),
        (false, 1_000_000..) => (FOR_TEXT, 4_000_000),
        (false, _) => ("tiny-fox-pro", 0),
    }
}

/// Overrides for `tokens` tokens in sequences of `length`: heads, start of the gates, tokens, batch and rate.
pub(crate) fn budget(usual: &Recipe, tokens: u64, limit: u64, length: u64) -> Vec<String> {
    let mut overrides = Vec::new();
    if usual.name == FOR_TEXT {
        // More heads have more of the decay times between one token and the sequence length.
        overrides.push("model.num_heads=8".into());
    }
    if usual.training.gate_init == GateInit::Published {
        overrides.push("training.gate_init=spread".into());
    }
    // All of the text where time allows, and several epochs of a short one.
    let seen = usual.training.tokens.max(tokens.min(limit)).min(EPOCHS * tokens).max(1);
    if seen != usual.training.tokens {
        overrides.push(format!("training.tokens={seen}"));
    }
    let batch = batch_for(seen, length, usual.training.batch);
    if batch != usual.training.batch {
        overrides.push(format!("training.batch={batch}"));
    }
    if batch == 1 {
        // Gradients of a single sequence are noisier.
        overrides.push(format!("optimizer.peak_lr={}", 0.75 * usual.optimizer.peak_lr));
    }
    overrides
}

/// Sequences in a step, at most those of the recipe: halved until a run of `tokens` has [`STEPS`] steps.
fn batch_for(tokens: u64, length: u64, usual: usize) -> usize {
    let mut batch = usual;
    while batch > 1 && tokens < STEPS * length * batch as u64 {
        batch /= 2;
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(document: u64, documents: u64, on_gpu: bool) -> Result<RecipeChoice> {
        let lengths = DocumentLengths::Uniform { documents, len: document };
        choose_for(Path::new("my.txt"), &lengths, lengths.tokens(), document / 20, on_gpu)
    }

    #[test]
    fn recipe_choice_grows_with_data() {
        let mut sizes = Vec::new();
        for (tokens, on_gpu) in
            [(20_000, false), (1 << 30, false), (20_000, true), (10_000_000, true), (1 << 32, true)]
        {
            let choice = chosen(tokens, 1, on_gpu).unwrap();
            let recipe = recipe::load(choice.name, &choice.overrides).unwrap();
            assert!(recipe.training.tokens <= EPOCHS * tokens, "{choice:?}");
            sizes.push(recipe.model_config(257).unwrap().param_specs().len());
        }
        assert!(sizes[0] < sizes[1] && sizes[2] < sizes[3] && sizes[3] < sizes[4], "{sizes:?}");
    }

    #[test]
    fn whole_text_is_read_in_many_steps() {
        for (tokens, seen) in [(1_200_000, 1_500_000), (3_000_000, 3_000_000), (1 << 30, 4_000_000)]
        {
            let choice = chosen(tokens, 1, false).unwrap();
            let recipe = recipe::load(choice.name, &choice.overrides).unwrap();
            assert_eq!((choice.name, recipe.training.tokens), ("books-small", seen));
            assert!((STEPS..3 * STEPS).contains(&recipe.steps()), "{choice:?}");
            assert_eq!(recipe.training.gate_init, GateInit::Spread);
        }
        // A short text is read several times, with a shorter warm-up.
        let choice = chosen(40_000, 1, false).unwrap();
        let recipe = recipe::load(choice.name, &choice.overrides).unwrap();
        assert_eq!(recipe.training.tokens, EPOCHS * 40_000);
        assert!(recipe.schedule.warmup_tokens < recipe.training.tokens / 10, "{recipe:?}");
    }

    #[test]
    fn sample_leaves_out_held_out_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("my.txt");
        std::fs::write(&text, "0123456789".repeat(1000)).unwrap();
        let found = sample(&text, Some("bytes")).unwrap();
        assert_eq!((found.complete, found.tokens), (true, 9_500));
    }

    #[test]
    fn sequences_fit_into_the_documents() {
        // A document of 6,000 tokens, of which 300 are held out.
        let choice = chosen(6_000, 1, false).unwrap();
        assert!(choice.overrides.contains(&"data.sequence_length=256".into()), "{choice:?}");
        // Documents of 700 tokens would lose a third of their tokens in sequences of 512.
        let choice = chosen(700, 1_000, false).unwrap();
        assert!(choice.overrides.contains(&"data.layout=packed".into()), "{choice:?}");
        assert!(!choice.overrides.iter().any(|o| o.starts_with("data.seq")), "{choice:?}");
        let error = chosen(1_000, 1, false).unwrap_err().to_string();
        assert_eq!(
            error,
            "my.txt has 1000 tokens, too few to learn from; give it at least 2 kB of text"
        );
    }
}
