//! `fox train --data TEXT`: text is prepared in the run folder, and a recipe chosen where none is named.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use fox_base::durable;
use fox_data::{
    Corpus, CorpusOptions, HeldOut, MemoryDataset, PrepareOptions, Split, Tokenizer, Verify,
    open_dataset,
};
use fox_train::data::RunData;
use fox_train::recipe::{self, GateInit};

use crate::commands::prepare::prepare_with_bar;
use crate::output;

/// The name of the standard input.
pub const STANDARD_INPUT: &str = "-";
/// Where a run keeps its prepared text, and text that came through the standard input.
pub const DATA: &str = "data";
const INPUT: &str = "input.txt";
/// With fewer documents than this, a part of each is held out instead of a part of them.
const FEW_DOCUMENTS: usize = 100;
/// The part that is held out of each of few documents, and of many documents.
const OF_EACH: f64 = 0.05;
const OF_MANY: f64 = 0.01;
/// Beyond this many bytes, tokens of several bytes are worth their larger vocabulary.
const BYTES_UP_TO: u64 = 200 << 20;
/// How often a text is read at most, and the shortest sequences that are worth training on.
const PASSES: u64 = 20;
const SHORTEST: u64 = 64;
/// How much of a text a dry run looks at.
const SAMPLE_BYTES: u64 = 4 << 20;

/// Whether this is text, and not data that are prepared.
pub fn is_text(path: &Path) -> bool {
    let prepared = ["index.json", ".zarray", "zarr.json", "train.zarr", "heldout.zarr"];
    path == Path::new(STANDARD_INPUT)
        || path.is_file()
        || path.is_dir()
            && !prepared.iter().any(|name| path.join(name).exists())
            && Corpus::open(path, CorpusOptions::default()).is_ok()
}

/// Prepares a text in the folder of its run; a preparation that is there already is compared with it. Returns where the
/// shards are.
pub fn prepare(
    text: &Path,
    run: &Path,
    tokenizer: Option<&str>,
    stop: &AtomicBool,
) -> Result<PathBuf> {
    let text = match text == Path::new(STANDARD_INPUT) {
        true => keep_input(run)?,
        false => text.to_path_buf(),
    };
    let corpus = Corpus::open(&text, CorpusOptions::default())?;
    let tokenizer = tokenizer_for(&corpus, tokenizer)?;
    let few = corpus.documents().take(FEW_DOCUMENTS).count() < FEW_DOCUMENTS;
    let data = run.join(DATA);
    let mut options = PrepareOptions::new(&text, &data, tokenizer);
    options.held_out = match few {
        true => HeldOut::Ends { fraction: OF_EACH },
        false => HeldOut::Fraction { fraction: OF_MANY, seed: 0 },
    };
    let report = prepare_with_bar(&options, stop)?;
    if !report.already_complete {
        let (index, held_out) =
            (&report.index, if few { "the end of each document" } else { "documents" });
        output::note(&format!(
            "prepared {} in {}: {} tokens ({}) to train on, {} held out ({held_out})",
            text.display(),
            data.display(),
            output::grouped(index.train.tokens()),
            index.tokenizer.split(':').next().unwrap_or_default(),
            output::grouped(index.heldout.tokens()),
        ));
    }
    Ok(data)
}

/// The tokenizer that is named, or one that fits the size of the text.
fn tokenizer_for(corpus: &Corpus, name: Option<&str>) -> Result<Tokenizer> {
    let usual = if corpus.total_bytes() <= BYTES_UP_TO { "bytes" } else { "gpt2" };
    Ok(Tokenizer::from_name(name.unwrap_or(usual))?)
}

/// The beginning of a text as tokens in memory.
pub struct Sample {
    /// To train on; nothing is held out.
    pub data: RunData,
    /// Tokens of the whole text, about, without those that would be held out.
    pub tokens: u64,
}

/// Reads as much of a text as a dry run needs.
pub fn sample(text: &Path, tokenizer: Option<&str>) -> Result<Sample> {
    let corpus = Corpus::open(text, CorpusOptions::default())?;
    let tokenizer = tokenizer_for(&corpus, tokenizer)?;
    let (mut documents, mut bytes, mut tokens) = (Vec::new(), 0, 0);
    let mut whole = true;
    for document in corpus.documents() {
        let document = document?.text;
        bytes += document.len() as u64;
        let ids = tokenizer.encode(&document)?;
        tokens += ids.len() as u64;
        documents.push(ids);
        if bytes >= SAMPLE_BYTES {
            whole = false;
            break;
        }
    }
    if !whole {
        // Of compressed text this is too few; the recipe is chosen by their order of magnitude.
        tokens = tokens.max((tokens as f64 * corpus.total_bytes() as f64 / bytes as f64) as u64);
    }
    let identity = tokenizer.identity().to_string();
    let data = MemoryDataset::new(documents, tokenizer.vocab_size(), tokenizer.bos(), identity);
    let data = RunData { train: Arc::new(data), heldout: None, tokenizer: Some(tokenizer) };
    Ok(Sample { data, tokens: tokens - (tokens as f64 * OF_EACH) as u64 })
}

/// [`choose`] for text that is not prepared yet.
pub fn choose_for_text(text: &Path, sample: &Sample, on_gpu: bool) -> Result<Choice> {
    let longest = sample.data.train.lengths().longest();
    let held_out = (longest as f64 * OF_EACH) as u64;
    choice(text, sample.tokens, held_out, on_gpu)
}

/// Writes the standard input into the run folder, whole or not at all. A resumed run reads its copy.
fn keep_input(run: &Path) -> Result<PathBuf> {
    let path = run.join(INPUT);
    if path.exists() {
        output::note(&format!(
            "the text is in {} already; the standard input is not read",
            path.display()
        ));
        return Ok(path);
    }
    fs::create_dir_all(run).with_context(|| format!("cannot create {}", run.display()))?;
    let partial = durable::temporary_path(&path);
    let copy = || {
        let mut file = File::create(&partial)?;
        let bytes = io::copy(&mut io::stdin().lock(), &mut file)?;
        file.sync_all()?;
        Ok::<_, io::Error>(bytes)
    };
    let bytes = copy()
        .with_context(|| format!("cannot copy the standard input to {}", partial.display()))?;
    if bytes == 0 {
        fs::remove_file(&partial)
            .with_context(|| format!("cannot remove {}", partial.display()))?;
        bail!("the standard input is empty; pipe a text into it, or name a file with --data");
    }
    fs::rename(&partial, &path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// A recipe for some data.
#[derive(Debug, PartialEq)]
pub struct Choice {
    /// A built-in recipe.
    pub name: &'static str,
    /// What is changed in it.
    pub overrides: Vec<String>,
}

/// Chooses a recipe for prepared data by their size and by what computes, and says so.
pub fn choose(data: &Path, on_gpu: bool) -> Result<Choice> {
    let train = open_dataset(data, Split::Train, None, Verify::Structure)?;
    let held_out = open_dataset(data, Split::HeldOut, None, Verify::Structure).ok();
    let longest = held_out.map_or(u64::MAX, |data| data.lengths().longest());
    let longest = longest.min(train.lengths().longest());
    choice(data, train.lengths().tokens(), longest, on_gpu)
}

/// The choice for so many tokens in documents of at most this length.
fn choice(data: &Path, tokens: u64, longest: u64, on_gpu: bool) -> Result<Choice> {
    let Some(choice) = choose_for(tokens, longest, on_gpu)? else {
        bail!(
            "{} has {tokens} tokens, too few to learn from; give it at least {} kB of text",
            data.display(),
            PASSES * SHORTEST / 1000 + 1,
        );
    };
    output::note(&format!(
        "auto-selected recipe {} ({} tokens, {}){}",
        choice.name,
        output::grouped(tokens),
        if on_gpu { "GPU" } else { "CPU" },
        choice.overrides.iter().map(|set| format!(" --set {set}")).collect::<String>(),
    ));
    Ok(choice)
}

/// The choice for so many tokens in documents of at most this length; none where they are too short.
fn choose_for(tokens: u64, longest: u64, on_gpu: bool) -> Result<Option<Choice>> {
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
        return Ok(None);
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
    Ok(Some(Choice { name, overrides }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(tokens: u64, longest: u64, on_gpu: bool) -> Option<Choice> {
        choose_for(tokens, longest, on_gpu).unwrap()
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
        assert_eq!(chosen(5_000_000, 63, false), None);
    }
}
