//! Damaged prepared data: every way in which a token could change silently.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fox_data::{
    Dataset, Error, HeldOut, Loader, LoaderConfig, Order, PrepareOptions, PreparedDataset, Split,
    Tokenizer, Verify, open_dataset, prepare,
};

/// Prepares 60 documents with the tokenizer and gives the folder.
fn prepared(folder: &Path, name: &str, tokenizer: &str, word: &str) -> PathBuf {
    let corpus = folder.join(format!("{name}.jsonl"));
    let line = |i| format!("{{\"text\": \"{word} {i:02} of the documents\"}}\n");
    fs::write(&corpus, (0..60).map(line).collect::<String>()).unwrap();
    let out = folder.join(name);
    let options = PrepareOptions {
        held_out: HeldOut::Fraction { fraction: 0.2, seed: 0 },
        shard_tokens: 400,
        ..PrepareOptions::new(&corpus, &out, Tokenizer::from_name(tokenizer).unwrap())
    };
    prepare(&options, |_| ControlFlow::Continue(())).unwrap();
    out
}

fn open(folder: &Path) -> Result<PreparedDataset, Error> {
    PreparedDataset::open(folder, Split::Train, Verify::Structure)
}

/// Everything that a run over all data meets: opening, and every batch of one pass.
fn read_all(folder: &Path) -> Result<u64, Error> {
    let data: Arc<dyn Dataset> = Arc::new(open(folder)?);
    let config = LoaderConfig { order: Order::Sequential, ..LoaderConfig::new(8, 2) };
    let loader = Loader::new(data, config)?;
    let batches = loader.batches_per_epoch();
    (0..batches).try_for_each(|number| loader.batch(number).map(|_| ()))?;
    Ok(batches)
}

#[test]
fn altered_tokens_never_reach_a_batch() {
    let folder = tempfile::tempdir().unwrap();
    let out = prepared(folder.path(), "a", "bytes", "number");
    let batches = read_all(&out).unwrap();
    assert!(batches > 20);
    let shard = out.join("train/00001.tokens");
    let whole = fs::read(&shard).unwrap();
    // Another id of the vocabulary: only a checksum detects it.
    let mut bytes = whole.clone();
    assert_ne!(bytes[16 + 2 * 300], b'x');
    bytes[16 + 2 * 300] = b'x';
    fs::write(&shard, bytes).unwrap();

    let data = Arc::new(open(&out).unwrap());
    let config = LoaderConfig { order: Order::Sequential, ..LoaderConfig::new(8, 2) };
    let loader = Loader::new(data, config).unwrap();
    // What lies in other shards is as good as before.
    loader.batch(0).unwrap();
    let error = (0..batches).find_map(|number| loader.batch(number).err()).unwrap();
    let want = format!(
        "shard {} is damaged (the checksum of its tokens differs); run the same `fox prepare` again to rebuild it, or restore it from a copy",
        shard.display()
    );
    assert_eq!(error.to_string(), want);
    let from_ahead = loader.prefetch(loader.state_at(0), 2).unwrap().find_map(Result::err);
    assert_eq!(from_ahead.unwrap().to_string(), want);

    fs::write(&shard, whole).unwrap();
    assert_eq!(read_all(&out).unwrap(), batches);
}

#[test]
fn concurrent_readers_agree() {
    let folder = tempfile::tempdir().unwrap();
    let out = prepared(folder.path(), "a", "gpt2", "number");
    let (data, fresh) = (open(&out).unwrap(), open(&out).unwrap());
    let read = |data: &PreparedDataset, document| {
        let mut ids = vec![0; data.lengths().len_of(document).unwrap() as usize];
        data.read(document, 0, &mut ids).unwrap();
        ids
    };
    let expected: Vec<_> = (0..40).map(|document| read(&data, document)).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| (0..40).map(|d| read(&fresh, d)).collect::<Vec<_>>()))
            .collect();
        for thread in threads {
            assert!(thread.join().unwrap() == expected);
        }
    });
}

#[test]
fn rejects_shards_of_another_length() {
    let folder = tempfile::tempdir().unwrap();
    let out = prepared(folder.path(), "a", "bytes", "number");
    let shard = out.join("train/00000.tokens");
    let whole = fs::read(&shard).unwrap();
    let last = whole.len();
    let longer_inside = [&whole[..24], &whole[16..24], &whole[24..]].concat();
    for (bytes, what) in [
        (whole[..last - 1].to_vec(), "one byte shorter"),
        (whole[..last / 2].to_vec(), "half"),
        (Vec::new(), "nothing"),
        ([&whole[..], b"\0"].concat(), "one byte longer"),
        ([&whole[..], &whole[..]].concat(), "twice"),
        (longer_inside, "four ids more"),
        ([&whole[..16], &whole[24..]].concat(), "four ids fewer"),
    ] {
        fs::write(&shard, bytes).unwrap();
        let error = open(&out).unwrap_err().to_string();
        assert!(error.contains("train/00000.tokens is damaged"), "{what}: {error}");
    }
    fs::remove_file(&shard).unwrap();
    assert!(open(&out).unwrap_err().to_string().contains("train/00000.tokens does not exist"));
}

#[test]
fn rejects_shards_of_another_preparation() {
    let folder = tempfile::tempdir().unwrap();
    let a = prepared(folder.path(), "a", "bytes", "number");
    let b = prepared(folder.path(), "b", "bytes", "letter");
    let other_tokenizer = prepared(folder.path(), "c", "gpt2", "number");
    let shard = Path::new("train/00000.tokens");
    let whole = fs::read(a.join(shard)).unwrap();

    // A whole shard with as many documents and tokens, but of other text.
    fs::copy(b.join(shard), a.join(shard)).unwrap();
    let error = open(&a).unwrap_err().to_string();
    assert!(error.contains("it is not the one that the index lists"), "{error}");
    // Two shards of one preparation in each other's place.
    fs::copy(a.join("train/00001.tokens"), a.join(shard)).unwrap();
    let error = open(&a).unwrap_err().to_string();
    assert!(error.contains("it is not the one that the index lists"), "{error}");
    // A shard of another tokenizer.
    fs::copy(other_tokenizer.join(shard), a.join(shard)).unwrap();
    let error = open(&a).unwrap_err();
    assert!(matches!(error, Error::WrongTokenizer { .. }), "{error}");
    assert!(error.to_string().contains("not bytes:"), "{error}");
    fs::write(a.join(shard), whole).unwrap();
    assert!(open(&a).is_ok());

    // The other preparation's index.
    fs::copy(b.join("index.json"), a.join("index.json")).unwrap();
    let error = open(&a).unwrap_err().to_string();
    assert!(error.contains("it is not the one that the index lists"), "{error}");
}

#[test]
fn rejects_an_edited_index() {
    let folder = tempfile::tempdir().unwrap();
    let out = prepared(folder.path(), "a", "bytes", "number");
    let index = out.join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    for (from, to) in [
        ("\"vocab_size\": 256", "\"vocab_size\": 512"),
        ("\"bos\": 255", "\"bos\": 0"),
        ("\"end_mark\": true", "\"end_mark\": false"),
        ("\"token_bytes\": 2", "\"token_bytes\": 4"),
        ("train/00001.tokens", "train/00002.tokens"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&index, text.replacen(from, to, 1)).unwrap();
        let error = open(&out).unwrap_err().to_string();
        assert!(error.contains("is damaged (its checksum differs)"), "{from}: {error}");
    }
}

#[test]
fn rejects_data_of_another_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let out = prepared(folder.path(), "a", "gpt2", "number");
    // Both have the same vocabulary.
    for name in ["json-gpt2", "bytes"] {
        let tokenizer = Tokenizer::from_name(name).unwrap();
        let opened = open_dataset(&out, Split::Train, Some(&tokenizer), Verify::Structure);
        let error = opened.err().unwrap().to_string();
        let want =
            format!("was made with tokenizer gpt2:2c2c26d97c5a8315c70ac8c2e0e3e6ae, not {name}:");
        assert!(error.contains(&want), "{error}");
    }
}
