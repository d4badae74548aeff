//! Corpus to shards: the same bytes however it is done, kills and damage included.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use fox_data::{
    Dataset, Error, HeldOut, PrepareOptions, PrepareReport, PreparedDataset, Split, Tokenizer,
    Verify, open_dataset, prepare,
};

/// A corpus of documents from one word to some 200 KiB, some of them twice.
fn write_corpus(folder: &Path) -> Vec<String> {
    let mut lines = String::new();
    let mut texts = Vec::new();
    for i in 0..60_usize {
        let words = [1, 5, 40, 300, 2000, 40_000][(i * i) % 6] / (1 + i % 3) + 1;
        let text: Vec<String> = (0..words).map(|w| format!("wörd{}", (w * i) % 97)).collect();
        let text = text.join(if i % 2 == 0 { " " } else { "  \n" });
        lines.push_str(&serde_json::json!({ "text": text }).to_string());
        lines.push('\n');
        texts.push(text);
    }
    fs::write(folder.join("a.jsonl"), &lines).unwrap();
    fs::write(folder.join("b.txt"), "one more").unwrap();
    texts.push("one more".into());
    texts
}

fn options(corpus: &Path, out: &Path) -> PrepareOptions {
    PrepareOptions {
        held_out: HeldOut::Fraction { fraction: 0.3, seed: 1 },
        shard_tokens: 20_000,
        ..PrepareOptions::new(corpus, out, Tokenizer::from_name("gpt2").unwrap())
    }
}

fn run(options: &PrepareOptions) -> Result<PrepareReport, Error> {
    prepare(options, |_| ControlFlow::Continue(()))
}

/// All files below a folder with their contents.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for sub in ["", "train", "heldout"] {
        for entry in fs::read_dir(folder.join(sub)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let name = path.strip_prefix(folder).unwrap().display().to_string();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    files
}

fn documents(data: &dyn Dataset) -> Vec<Vec<u32>> {
    (0..data.lengths().documents())
        .map(|d| {
            let mut ids = vec![0; data.lengths().len_of(d).unwrap() as usize];
            data.read(d, 0, &mut ids).unwrap();
            ids
        })
        .collect()
}

#[test]
fn prepared_documents_match_the_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    let texts = write_corpus(&corpus);
    let report = run(&options(&corpus, &out)).unwrap();
    assert!(!report.already_complete);
    assert_eq!(report.progress.documents, 61);
    assert!(report.index.train.shards.len() > 2, "{:?}", report.index);

    let train = PreparedDataset::open(&out, Split::Train, Verify::Everything).unwrap();
    let held = PreparedDataset::open(&out, Split::HeldOut, Verify::Everything).unwrap();
    assert_eq!(train.index(), &report.index);
    let (mut train, mut held) = (documents(&train).into_iter(), documents(&held).into_iter());
    assert!(held.len() > 5);
    let tokenizer = Tokenizer::from_name("gpt2").unwrap();
    for text in &texts {
        let mut ids = tokenizer.encode(text).unwrap();
        ids.push(50_256);
        // Order is kept inside each split.
        let next_is = |side: &std::vec::IntoIter<Vec<u32>>| side.as_slice().first() == Some(&ids);
        if next_is(&train) {
            train.next();
        } else {
            assert!(next_is(&held));
            held.next();
        }
    }
    assert_eq!((train.len(), held.len()), (0, 0));
    assert_eq!(Tokenizer::load(&out).unwrap().identity(), tokenizer.identity());
}

#[test]
fn output_is_independent_of_thread_count() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("in");
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    let outputs: Vec<_> = [1, 2, 7]
        .map(|threads| {
            let out = folder.path().join(format!("out{threads}"));
            run(&PrepareOptions { threads, ..options(&corpus, &out) }).unwrap();
            contents(&out)
        })
        .into();
    assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2]);
}

#[test]
fn resumed_preparation_is_bit_exact() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("in");
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    let whole = folder.path().join("whole");
    run(&options(&corpus, &whole)).unwrap();
    let expected = contents(&whole);

    let out = folder.path().join("out");
    let mut kept = 0;
    for limit in [0, 3, 10, 30, 50] {
        let mut calls = 0;
        let stopped = prepare(&options(&corpus, &out), |state| {
            calls += 1;
            kept = kept.max(state.shards_kept);
            if calls > limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(stopped, Err(Error::Stopped)), "{limit}: {stopped:?}");
        assert!(!out.join("index.json").exists());
        assert!(matches!(
            open_dataset(&out, Split::Train, None, Verify::Structure),
            Err(Error::NotADataset { .. })
        ));
    }
    let report = run(&options(&corpus, &out)).unwrap();
    assert!(report.progress.shards_kept > 0 && kept > 0);
    assert_eq!(report.progress.documents, 61);
    assert!(contents(&out) == expected);
    assert!(run(&options(&corpus, &out)).unwrap().already_complete);
}

#[test]
fn damaged_shards_are_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    run(&options(&corpus, &out)).unwrap();
    let expected = contents(&out);
    let shard = out.join("train/00001.tokens");
    for finished in [true, false] {
        let mut bytes = fs::read(&shard).unwrap();
        bytes[100] ^= 1;
        fs::write(&shard, bytes).unwrap();
        fs::write(out.join("train/00002.tokens.partial"), "torn").unwrap();
        if finished {
            assert!(PreparedDataset::open(&out, Split::Train, Verify::Structure).is_ok());
            let error = PreparedDataset::open(&out, Split::Train, Verify::Everything).unwrap_err();
            assert!(error.to_string().contains("train/00001.tokens is damaged"), "{error}");
        } else {
            fs::remove_file(out.join("index.json")).unwrap();
        }
        let report = run(&options(&corpus, &out)).unwrap();
        assert!(!report.already_complete);
        assert!(contents(&out) == expected);
    }
}

#[test]
fn damaged_index_is_reported_and_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    run(&options(&corpus, &out)).unwrap();
    let index = out.join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    for broken in [text.replacen("\"documents\": 1", "\"documents\": 2", 1), text[..50].to_owned()]
    {
        assert_ne!(broken, text);
        fs::write(&index, broken).unwrap();
        let error = PreparedDataset::open(&out, Split::Train, Verify::Structure).unwrap_err();
        assert!(matches!(error, Error::BadIndex { .. }), "{error}");
    }
    run(&options(&corpus, &out)).unwrap();
    assert_eq!(fs::read_to_string(&index).unwrap(), text);
}

#[test]
fn never_overwrites_another_preparation() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    let first = options(&corpus, &out);
    run(&first).unwrap();
    let before = contents(&out);

    let bytes = Tokenizer::from_name("bytes").unwrap();
    let error = run(&PrepareOptions { tokenizer: bytes.clone(), ..first.clone() }).unwrap_err();
    assert!(error.to_string().contains("its tokenizer is gpt2:"), "{error}");
    let error = run(&PrepareOptions { shard_tokens: 5, ..first.clone() }).unwrap_err();
    assert!(error.to_string().contains("shard size"), "{error}");
    fs::write(corpus.join("c.txt"), "new").unwrap();
    let error = run(&first).unwrap_err();
    assert!(error.to_string().contains("corpus files differ"), "{error}");
    assert!(contents(&out) == before);

    let error = open_dataset(&out, Split::Train, Some(&bytes), Verify::Structure).err().unwrap();
    assert!(error.to_string().contains("was made with tokenizer gpt2:"), "{error}");

    let other = folder.path().join("mine");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("thesis.tex"), "x").unwrap();
    let error = run(&options(&corpus, &other)).unwrap_err();
    assert!(matches!(error, Error::NotEmpty { .. }), "{error}");
}

#[test]
fn detects_a_corpus_changed_between_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    run(&options(&corpus, &out)).unwrap();
    fs::remove_file(out.join("index.json")).unwrap();
    let path = corpus.join("a.jsonl");
    let changed = fs::read_to_string(&path).unwrap().replacen("wörd0", "wörd1", 1);
    fs::write(&path, changed).unwrap();
    let error = run(&options(&corpus, &out)).unwrap_err();
    assert!(error.to_string().contains("changed since"), "{error}");
}

#[test]
fn held_out_documents_from_a_path_or_none() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.txt"), "to learn").unwrap();
    fs::write(folder.path().join("test.txt"), "to test").unwrap();
    let train = folder.path().join("train.txt");
    let bytes = Tokenizer::from_name("bytes").unwrap();

    let out = folder.path().join("both");
    let both = PrepareOptions {
        held_out: HeldOut::Path(folder.path().join("test.txt")),
        end_mark: false,
        ..PrepareOptions::new(&train, &out, bytes.clone())
    };
    run(&both).unwrap();
    let read = |split| {
        let data = open_dataset(&out, split, Some(&bytes), Verify::Everything).unwrap();
        bytes.decode(&documents(&*data).concat()).unwrap()
    };
    assert_eq!(read(Split::Train), "to learn");
    assert_eq!(read(Split::HeldOut), "to test");

    let out = folder.path().join("none");
    let none =
        PrepareOptions { held_out: HeldOut::None, ..PrepareOptions::new(&train, &out, bytes) };
    run(&none).unwrap();
    let error = PreparedDataset::open(&out, Split::HeldOut, Verify::Structure).unwrap_err();
    assert!(error.to_string().contains("has no heldout documents"), "{error}");
}

#[test]
fn bad_line_is_located_and_finished_shards_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    write_corpus(&corpus);
    let path = corpus.join("a.jsonl");
    let good = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{good}oops")).unwrap();
    let error = run(&options(&corpus, &out)).unwrap_err();
    assert!(error.to_string().contains("a.jsonl line 61"), "{error}");
    assert!(out.join("train/00000.tokens").exists());
    assert!(!out.join("index.json").exists());
}

/// Few documents: all of them are trained on but for their ends, and nothing is on both sides.
#[test]
fn holds_out_the_ends_of_documents() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&corpus).unwrap();
    let text = |name: &str| (0..400).map(|n| format!("{name} {n}\n")).collect::<String>();
    let texts = ["a", "b"].map(text);
    for (name, text) in ["a.txt", "b.md"].iter().zip(&texts) {
        fs::write(corpus.join(name), text).unwrap();
    }
    let options = PrepareOptions {
        held_out: HeldOut::Ends { fraction: 0.1 },
        end_mark: false,
        // So that an interrupted preparation keeps a shard of each side.
        shard_tokens: 100,
        ..PrepareOptions::new(&corpus, &out, Tokenizer::from_name("bytes").unwrap())
    };
    run(&options).unwrap();
    let read = |split| {
        let data = PreparedDataset::open(&out, split, Verify::Everything).unwrap();
        let text = |ids: &Vec<u32>| ids.iter().map(|id| *id as u8 as char).collect::<String>();
        documents(&data).iter().map(text).collect::<Vec<_>>()
    };
    let (train, heldout) = (read(Split::Train), read(Split::HeldOut));
    assert_eq!((train.len(), heldout.len()), (2, 2));
    for (n, text) in texts.iter().enumerate() {
        assert_eq!(format!("{}{}", train[n], heldout[n]), *text);
        let part = heldout[n].len() as f64 / text.len() as f64;
        assert!((0.09..=0.1).contains(&part) && heldout[n].starts_with(["a", "b"][n]), "{part}");
    }
    assert!(run(&options).unwrap().already_complete);
    // What was there before an interruption is compared, part by part.
    let whole = contents(&out);
    fs::remove_file(out.join("index.json")).unwrap();
    run(&options).unwrap();
    assert_eq!(contents(&out), whole);
    let none = PrepareOptions { held_out: HeldOut::Ends { fraction: 1.5 }, ..options };
    assert!(run(&none).unwrap_err().to_string().contains("not between 0 and 1"));
}
