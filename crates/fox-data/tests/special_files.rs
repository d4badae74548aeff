//! What is found in place of readable text: pipes, links to nowhere, other encodings, files that change while they
//! are read. Each gets a sentence, none is passed over and none is waited for.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use fox_data::{Corpus, CorpusOptions, Error};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

fn texts(path: &Path) -> Result<Vec<String>, Error> {
    let corpus = Corpus::open(path, CorpusOptions::default())?;
    corpus.documents().map(|document| document.map(|d| d.text)).collect()
}

fn error_of(path: &Path) -> String {
    texts(path).unwrap_err().to_string()
}

#[cfg(unix)]
fn named_pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Opening a pipe without a writer would wait for ever.
#[cfg(unix)]
#[test]
fn rejects_pipes_sockets_and_devices() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("a.jsonl");
    named_pipe(&pipe);
    let want = format!(
        "{} is a named pipe, not a file, and a corpus is read more than once; write its contents to a file first",
        pipe.display()
    );
    assert_eq!(error_of(&pipe), want);
    // In a folder too: documents that should come out of it would be missing.
    fs::write(folder.path().join("b.txt"), "text").unwrap();
    assert_eq!(error_of(folder.path()), want);
    fs::remove_file(&pipe).unwrap();
    // What cannot be a corpus by its name is passed over, as other files are.
    named_pipe(&folder.path().join("control"));
    assert_eq!(texts(folder.path()).unwrap(), ["text"]);

    let socket = folder.path().join("c.txt");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(error_of(&socket).contains("c.txt is a socket, not a file"));
    assert!(error_of(Path::new("/dev/null")).starts_with("/dev/null is a device, not a file"));
}

#[cfg(unix)]
#[test]
fn follows_links_to_files_only() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let (corpus, elsewhere) = (folder.path().join("corpus"), folder.path().join("elsewhere"));
    fs::create_dir(&corpus).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("x.txt"), "linked").unwrap();
    fs::write(corpus.join("a.txt"), "here").unwrap();
    symlink(elsewhere.join("x.txt"), corpus.join("b.txt")).unwrap();
    assert_eq!(texts(&corpus).unwrap(), ["here", "linked"]);

    let link = corpus.join("more");
    symlink(&elsewhere, &link).unwrap();
    let want = format!(
        "{} is a link to a folder, and those are not followed; put the folder itself there or remove the link",
        link.display()
    );
    assert_eq!(error_of(&corpus), want);
    // As the corpus itself it is what was asked for.
    assert_eq!(texts(&link).unwrap(), ["linked"]);
    fs::remove_file(&link).unwrap();

    fs::remove_file(elsewhere.join("x.txt")).unwrap();
    let dangling = corpus.join("b.txt");
    let want = format!(
        "{} is a link to something that does not exist; restore its target or remove the link",
        dangling.display()
    );
    assert_eq!(error_of(&corpus), want);
    assert_eq!(error_of(&dangling), want);
    fs::remove_file(&dangling).unwrap();

    // A circle is an error of the system, not an endless walk.
    symlink(corpus.join("c.txt"), corpus.join("c.txt")).unwrap();
    assert!(error_of(&corpus).contains("c.txt"));
}

#[test]
fn rejects_folders_without_documents() {
    let folder = tempfile::tempdir().unwrap();
    let want = format!(
        "{} holds no documents; check the path and the file endings",
        folder.path().display()
    );
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(folder.path().join(".hidden.txt"), "hidden").unwrap();
    assert_eq!(error_of(folder.path()), want);
    fs::write(folder.path().join("README.pdf"), b"%PDF\0").unwrap();
    assert!(error_of(folder.path()).contains("holds no text, only 1 .pdf"));
}

#[test]
fn byte_order_marks_are_stripped() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let mark = b"\xef\xbb\xbf";
    let text = [mark, "caf\u{e9} \u{feff} bar".as_bytes()].concat();
    assert_eq!(texts(&write("a.txt", &text)).unwrap(), ["caf\u{e9} \u{feff} bar"]);
    let packed = compress_to_vec(&text[..], CompressionLevel::Fastest);
    assert_eq!(texts(&write("a.txt.zst", &packed)).unwrap(), ["caf\u{e9} \u{feff} bar"]);
    let lines = [mark, &b"{\"text\": \"one\"}\r\n{\"text\": \"two\"}\r\n"[..]].concat();
    let path = write("a.jsonl", &lines);
    assert_eq!(texts(&path).unwrap(), ["one", "two"]);
    let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
    assert_eq!(corpus.records().next().unwrap().unwrap()["text"], "one");
    assert!(texts(&write("b.txt", mark)).unwrap().is_empty());
    // Places are those in the file.
    let error = error_of(&write("c.txt", &[mark, &b"ab\xff"[..]].concat()));
    assert!(error.contains("not UTF-8 text near byte 5"), "{error}");
    let error = error_of(&write("c.jsonl", &[mark, &b"{\"text\": \"\xff\"}"[..]].concat()));
    assert!(error.contains("not UTF-8 text near byte 13"), "{error}");
}

#[test]
fn rejects_other_encodings() {
    let folder = tempfile::tempdir().unwrap();
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
    for (name, bytes, word) in [
        ("a.txt", utf16("\u{feff}some text"), "UTF-16"),
        // Without a mark it is valid UTF-8, every second character a NUL.
        ("b.txt", utf16("some text"), "UTF-16 without a byte order mark"),
        ("c.jsonl", utf16("{\"text\": \"x\"}"), "UTF-16 without a byte order mark"),
        ("d.jsonl.zst", compress_to_vec(&utf16("{}")[..], CompressionLevel::Fastest), "UTF-16"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let error = error_of(&path);
        assert!(error.starts_with(&format!("{} is {word}", path.display())), "{error}");
        assert!(error.ends_with("convert it first, e.g. with `iconv -t UTF-8`"), "{error}");
    }
}

#[test]
fn reports_the_line_of_a_non_text_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    for (value, found) in [
        ("null", "null"),
        ("7", "a number"),
        ("-7", "a number"),
        ("0.5", "a number"),
        ("true", "true or false"),
        ("[\"x\", [1]]", "a list"),
        ("{\"text\": \"x\"}", "an object"),
    ] {
        let good = "{\"text\": \"ok\"}";
        fs::write(&path, format!("{good}\n\n{{\"id\": 1, \"text\": {value}}}\n{good}")).unwrap();
        let want = format!(
            "{} line 3 has {found} in its text field \"text\", expected a string; correct or remove the line",
            path.display()
        );
        assert_eq!(error_of(&path), want);
    }
    fs::write(&path, "{\"text\": \"ok\"}\n{\"body\": \"x\"}").unwrap();
    let want = format!(
        "{} line 2 has no text field \"text\"; name the field that holds the text",
        path.display()
    );
    assert_eq!(error_of(&path), want);
    fs::write(&path, "{\"text\": \"one\", \"text\": \"two\"}").unwrap();
    assert!(
        error_of(&path).contains("line 1 is not a JSON object (the field \"text\" is there twice")
    );
}

#[test]
fn empty_documents_are_skipped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.jsonl"), "{\"text\": \"\"}\n{\"text\": \"x\"}\n\n").unwrap();
    fs::write(folder.path().join("b.txt"), "").unwrap();
    fs::write(folder.path().join("c.jsonl"), "").unwrap();
    let corpus = Corpus::open(folder.path(), CorpusOptions::default()).unwrap();
    let mut documents = corpus.documents();
    assert_eq!(documents.next().unwrap().unwrap().text, "x");
    assert_eq!((documents.empty(), documents.file().unwrap().name.as_str()), (1, "a.jsonl"));
    assert!(documents.next().is_none());
    assert_eq!(documents.empty(), 2);
    // No archive is empty: something got lost.
    for name in ["d.txt.zst", "d.txt.gz"] {
        let path = folder.path().join(name);
        fs::write(&path, "").unwrap();
        assert!(error_of(&path).contains("is not whole"), "{name}");
    }
}

/// Larger than all buffers on the way, so that much of it is not read when it changes.
#[test]
fn detects_files_that_change_while_read() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..200_000).map(|i| format!("{{\"text\": \"document {i}\"}}\n")).collect();
    let archive = compress_to_vec(lines.as_bytes(), CompressionLevel::Fastest);
    for (name, bytes) in [("a.jsonl", lines.as_bytes()), ("a.jsonl.zst", &archive)] {
        let path = folder.path().join(name);
        let end = bytes.len();
        // At the end of a line, so that only the size differs.
        let line_end = bytes[..end / 2].iter().rposition(|b| *b == b'\n').unwrap() + 1;
        for changed in [&bytes[..line_end], &[bytes, bytes].concat()] {
            fs::write(&path, bytes).unwrap();
            let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
            let mut documents = corpus.documents();
            documents.next().unwrap().unwrap();
            // The same file, not a new one of the same name.
            fs::write(&path, changed).unwrap();
            let error = documents.find_map(Result::err).unwrap().to_string();
            let want = format!(
                "{} changed while it was read (it had {end} bytes, now it has {}); run the same command again when nothing writes to it",
                path.display(),
                changed.len()
            );
            assert_eq!(error, want);
            assert!(documents.next().is_none(), "nothing follows an error");
        }
    }
}
