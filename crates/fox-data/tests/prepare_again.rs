//! Preparing into a folder that is not new: the corpus may have changed, another process may be preparing, or both may lie in
//! one place.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use fox_data::{
    Error, HeldOut, PrepareOptions, PrepareReport, PreparedDataset, Split, Tokenizer, Verify,
    prepare,
};

/// A folder with a corpus of 40 short documents in two files.
struct TestFolder {
    folder: tempfile::TempDir,
}

impl TestFolder {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(place.corpus()).unwrap();
        for (name, range) in [("a.jsonl", 10..35), ("b.jsonl", 35..50)] {
            let line = |i| format!("{{\"id\": {i}, \"text\": \"document number {i}\"}}\n");
            let lines: String = range.map(line).collect();
            fs::write(place.corpus().join(name), lines).unwrap();
        }
        place
    }

    fn corpus(&self) -> PathBuf {
        self.folder.path().join("corpus")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn options(&self) -> PrepareOptions {
        PrepareOptions {
            held_out: HeldOut::Fraction { fraction: 0.3, seed: 1 },
            shard_tokens: 100,
            threads: 2,
            ..PrepareOptions::new(self.corpus(), self.out(), bytes())
        }
    }

    /// Replaces text in a file by text of the same length and gives the file its old time.
    fn replace(&self, name: &str, from: &str, to: &str) {
        assert_eq!(from.len(), to.len());
        let path = self.corpus().join(name);
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches(from).count(), 1, "{from}");
        fs::write(&path, text.replace(from, to)).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    }

    fn difference(&self, detail: &str) -> String {
        format!(
            "{} holds another preparation ({detail}); choose another folder or remove this one",
            self.out().display()
        )
    }
}

fn bytes() -> Tokenizer {
    Tokenizer::from_name("bytes").unwrap()
}

fn run(options: &PrepareOptions) -> Result<PrepareReport, Error> {
    prepare(options, |_| ControlFlow::Continue(()))
}

/// All files below a folder with their contents.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

#[test]
fn detects_changes_that_keep_size_and_date() {
    let changed = "the corpus file a.jsonl has changed since";
    for (name, from, to, detail) in [
        ("a.jsonl", "number 17", "number 71", changed),
        ("b.jsonl", "number 49", "number 94", "the corpus file b.jsonl has changed since"),
        // One document fewer: the last one becomes blank.
        (
            "b.jsonl",
            "{\"id\": 49, \"text\": \"document number 49\"}",
            "                                        ",
            "the corpus has fewer documents than before",
        ),
        // One more: one document becomes two.
        (
            "a.jsonl",
            "{\"id\": 11, \"text\": \"document number 11\"}",
            "{\"text\": \"document\"}\n{\"text\": \"numbers\"}",
            changed,
        ),
    ] {
        let place = TestFolder::new();
        let first = run(&place.options()).unwrap();
        let before = contents(&place.out());
        place.replace(name, from, to);
        let error = run(&place.options()).unwrap_err();
        assert_eq!(error.to_string(), place.difference(detail));
        assert!(contents(&place.out()) == before, "what was prepared is touched");
        // With the old corpus it is what it was.
        place.replace(name, to, from);
        let again = run(&place.options()).unwrap();
        assert!(again.already_complete && again.index == first.index);
        assert_eq!(again.progress.documents, 40);
        assert!(contents(&place.out()) == before);
    }
}

/// A change that no document shows is ignored.
#[test]
fn unread_fields_may_change() {
    let place = TestFolder::new();
    run(&place.options()).unwrap();
    place.replace("a.jsonl", "\"id\": 17", "\"id\": 71");
    assert!(run(&place.options()).unwrap().already_complete);
}

#[test]
fn detects_a_shrunk_corpus() {
    let place = TestFolder::new();
    run(&place.options()).unwrap();
    // As a kill leaves it before the last file is written: the shards are whole.
    fs::remove_file(place.out().join("index.json")).unwrap();
    let path = place.corpus().join("b.jsonl");
    let blank = " ".repeat(fs::metadata(&path).unwrap().len() as usize);
    fs::write(&path, blank).unwrap();
    let error = run(&place.options()).unwrap_err();
    assert_eq!(error.to_string(), place.difference("the corpus has fewer documents than before"));
    assert!(!place.out().join("index.json").exists());
}

#[test]
fn rejects_a_concurrent_preparation() {
    let place = TestFolder::new();
    run(&place.options()).unwrap();
    let expected = contents(&place.out());
    fs::remove_dir_all(place.out()).unwrap();

    let (reached, wait_for_it) = mpsc::channel();
    let (go_on, wait) = mpsc::channel();
    std::thread::scope(|scope| {
        let options = place.options();
        let first = scope.spawn(move || {
            let mut events = 0;
            prepare(&options, |_| {
                events += 1;
                if events == 20 {
                    reached.send(()).unwrap();
                    wait.recv().unwrap();
                }
                ControlFlow::Continue(())
            })
        });
        wait_for_it.recv().unwrap();
        let before = contents(&place.out());
        let want = format!(
            "another process ({}) is preparing into {}; wait until it has ended or choose another folder",
            std::process::id(),
            place.out().display()
        );
        // With other options too: whose folder it is matters before what is in it.
        let other = PrepareOptions { shard_tokens: 7, ..place.options() };
        for options in [place.options(), other] {
            assert_eq!(run(&options).unwrap_err().to_string(), want);
        }
        assert!(contents(&place.out()) == before);
        go_on.send(()).unwrap();
        first.join().unwrap().unwrap();
    });
    assert!(contents(&place.out()) == expected);
    // The lock has gone with the one that held it.
    assert!(run(&place.options()).unwrap().already_complete);
}

#[test]
fn stale_lock_files_do_not_lock() {
    let place = TestFolder::new();
    for number in ["1", "4294967295", "", "no number"] {
        fs::create_dir_all(place.out()).unwrap();
        fs::write(place.out().join("prepare.lock"), number).unwrap();
        run(&place.options()).unwrap();
        assert_eq!(fs::read(place.out().join("prepare.lock")).unwrap(), b"");
        fs::remove_dir_all(place.out()).unwrap();
    }
    // A foreign folder does not even get a lock.
    fs::create_dir(place.out()).unwrap();
    fs::write(place.out().join("thesis.tex"), "x").unwrap();
    assert!(matches!(run(&place.options()), Err(Error::NotEmpty { .. })));
    assert_eq!(contents(&place.out()).len(), 1);
}

/// The output has files that end in `.json`.
#[test]
fn output_inside_of_the_corpus_is_ignored() {
    let place = TestFolder::new();
    let options = PrepareOptions { out: place.corpus().join("tokens"), ..place.options() };
    let first = run(&options).unwrap();
    let again = run(&options).unwrap();
    assert!(again.already_complete && again.index == first.index);
    fs::remove_file(options.out.join("index.json")).unwrap();
    assert_eq!(run(&options).unwrap().index, first.index);
    // Prepared data are no part of the corpus for another output either.
    assert_eq!(run(&place.options()).unwrap().index, first.index);
    let inside = PrepareOptions { out: place.corpus(), ..place.options() };
    assert!(matches!(run(&inside), Err(Error::NotEmpty { .. })));
}

#[test]
fn counts_held_out_training_documents() {
    let place = TestFolder::new();
    let heldout = place.folder.path().join("heldout.jsonl");
    let line = |text: &str| format!("{{\"text\": \"{text}\"}}\n");
    let texts = ["new", "document number 12", "document number 48", "document number 12", "other"];
    fs::write(&heldout, texts.map(line).concat()).unwrap();
    let options = PrepareOptions { held_out: HeldOut::Path(heldout), ..place.options() };
    let report = run(&options).unwrap();
    assert_eq!(report.shared_documents, 3);
    assert_eq!(run(&options).unwrap().shared_documents, 3);

    let itself = PrepareOptions {
        held_out: HeldOut::Path(place.corpus()),
        out: place.folder.path().join("itself"),
        ..place.options()
    };
    assert_eq!(run(&itself).unwrap().shared_documents, 40);
}

/// Copies of a document stay on one side, wherever they stand.
#[test]
fn fraction_keeps_copies_on_one_side() {
    let place = TestFolder::new();
    for copy in ["c.jsonl", "d.jsonl"] {
        fs::copy(place.corpus().join("a.jsonl"), place.corpus().join(copy)).unwrap();
    }
    let report = run(&place.options()).unwrap();
    assert_eq!(report.shared_documents, 0);
    let documents = |split| {
        use fox_data::Dataset;
        let data = PreparedDataset::open(&place.out(), split, Verify::Structure).unwrap();
        let lengths = data.lengths().clone();
        let read = move |document| {
            let mut ids = vec![0; lengths.len_of(document).unwrap() as usize];
            data.read(document, 0, &mut ids).unwrap();
            ids
        };
        let count = match split {
            Split::Train => report.index.train.documents(),
            Split::HeldOut => report.index.heldout.documents(),
        };
        (0..count).map(read).collect::<std::collections::BTreeSet<_>>()
    };
    let (train, heldout) = (documents(Split::Train), documents(Split::HeldOut));
    assert!(!heldout.is_empty() && train.is_disjoint(&heldout));
    assert_eq!(train.len() + heldout.len(), 40);
}

#[test]
fn empty_documents_are_reported() {
    let place = TestFolder::new();
    fs::write(place.corpus().join("c.jsonl"), "{\"text\": \"\"}\n{\"text\": \"\"}\n").unwrap();
    fs::write(place.corpus().join("d.txt"), "").unwrap();
    for _ in 0..2 {
        let progress = run(&place.options()).unwrap().progress;
        assert_eq!((progress.documents, progress.empty_documents), (40, 3));
    }
    let nothing = place.folder.path().join("nothing.txt");
    fs::write(&nothing, "").unwrap();
    let out = place.folder.path().join("other");
    let error = run(&PrepareOptions::new(&nothing, out, bytes())).unwrap_err();
    assert!(error.to_string().contains("nothing.txt holds no documents"), "{error}");
}
