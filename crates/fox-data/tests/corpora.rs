//! Corpora in all their forms, and what is said about broken ones.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::path::Path;

use fox_data::{Corpus, CorpusOptions, Error};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn texts(path: &Path, options: CorpusOptions) -> Result<Vec<String>, Error> {
    Corpus::open(path, options)?.documents().map(|document| document.map(|d| d.text)).collect()
}

fn error_of(path: &Path) -> String {
    texts(path, CorpusOptions::default()).unwrap_err().to_string()
}

const LINES: &str = "{\"title\": [1, {\"text\": \"no\"}], \"text\": \"one \\u00e9\\n\"}\n\n{\"text\": \"\"}\n{\"text\": \"two\"}";

#[test]
fn all_compressions_give_the_same_documents() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("a.jsonl", LINES.as_bytes().to_vec()),
        ("a.jsonl.zst", zstd(LINES.as_bytes())),
        ("a.ndjson.gz", gzip(LINES.as_bytes())),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        assert_eq!(texts(&path, CorpusOptions::default()).unwrap(), ["one é\n", "two"], "{name}");
    }
    for (name, bytes) in [
        ("b.txt", b"whole\nfile".to_vec()),
        ("b.txt.zst", zstd(b"whole\nfile")),
        ("b.text.gz", [gzip(b"whole\n"), gzip(b"file")].concat()),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        assert_eq!(texts(&path, CorpusOptions::default()).unwrap(), ["whole\nfile"], "{name}");
    }
}

#[test]
fn records_have_all_columns() {
    let folder = tempfile::tempdir().unwrap();
    let rows = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
        corpus.records().collect::<Vec<_>>()
    };
    for found in [rows("a.jsonl", LINES.as_bytes()), rows("a.jsonl.zst", &zstd(LINES.as_bytes()))] {
        let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        assert_eq!(found.len(), 3);
        assert_eq!(found[0]["title"][1]["text"], "no");
        assert_eq!(found[2]["text"], "two");
    }
    let found = rows("bad.jsonl", b"{\"a\": 1}\n[2]\n{\"a\": 3}");
    assert_eq!(found.len(), 2, "nothing follows an error");
    assert!(found[1].as_ref().unwrap_err().to_string().contains("line 2"));
    let said = rows("a.txt", b"text")[0].as_ref().unwrap_err().to_string();
    assert!(said.contains("plain text") && said.contains(".jsonl"), "{said}");
}

#[test]
fn options_select_field_and_separator() {
    let folder = tempfile::tempdir().unwrap();
    let lines = folder.path().join("a.jsonl");
    fs::write(&lines, "{\"body\": \"x\", \"text\": 3}").unwrap();
    let options = CorpusOptions { text_field: "body".into(), ..CorpusOptions::default() };
    assert_eq!(texts(&lines, options).unwrap(), ["x"]);
    let text = folder.path().join("a.txt");
    fs::write(&text, "one<|endoftext|>two<|endoftext|>").unwrap();
    let options =
        CorpusOptions { separator: Some("<|endoftext|>".into()), ..CorpusOptions::default() };
    assert_eq!(texts(&text, options).unwrap(), ["one", "two"]);
}

#[test]
fn folders_give_files_in_order() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("sub")).unwrap();
    fs::write(folder.path().join("z.txt"), "last").unwrap();
    fs::write(folder.path().join("sub/m.jsonl"), "{\"text\":\"middle\"}").unwrap();
    fs::write(folder.path().join("a.txt"), "first").unwrap();
    fs::write(folder.path().join("README.pdf"), b"%PDF\0").unwrap();
    let corpus = Corpus::open(folder.path(), CorpusOptions::default()).unwrap();
    assert_eq!(corpus.total_bytes(), 5 + 17 + 4);
    let found = texts(folder.path(), CorpusOptions::default()).unwrap();
    assert_eq!(found, ["first", "middle", "last"]);
}

#[test]
fn rejects_paths_without_a_corpus() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("nowhere.txt");
    assert_eq!(
        error_of(&missing),
        format!("{} does not exist; check the data path", missing.display())
    );
    assert!(error_of(folder.path()).contains("holds no documents"));
    let odd = folder.path().join("a.docx");
    fs::write(&odd, b"PK\x03\x04\0").unwrap();
    assert!(error_of(&odd).contains(".jsonl"));
    assert!(error_of(folder.path()).contains("holds no text, only 1 .docx"));
    fs::write(&odd, "text of any ending").unwrap();
    assert_eq!(texts(&odd, CorpusOptions::default()).unwrap(), ["text of any ending"]);
}

#[test]
fn reports_the_position_of_broken_contents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let write = |bytes: &[u8]| fs::write(&path, bytes).unwrap();

    write(b"{\"text\": \"ok\"}\n{\"text\": \"cut");
    let error = error_of(&path);
    assert!(error.contains("a.jsonl line 2 is not a JSON object"), "{error}");
    write(b"[1]");
    assert!(error_of(&path).contains("line 1"));
    write(b"{\"text\": 7}");
    assert!(error_of(&path).contains("expected a string"));
    write(b"{\"text\": \"a\"} extra");
    assert!(error_of(&path).contains("trailing"));
    write(b"\n{\"title\": \"x\"}");
    let error = error_of(&path);
    assert!(error.contains("line 2 has no text field \"text\""), "{error}");
    write(b"{\"text\": \"ok\"}\n{\"text\": \"\xff\"}");
    let error = error_of(&path);
    assert!(error.contains("not UTF-8 text near byte 25"), "{error}");

    let text = folder.path().join("b.txt");
    fs::write(&text, b"abc\xc3").unwrap();
    assert!(error_of(&text).contains("near byte 3"));
}

#[test]
fn rejects_truncated_archives() {
    let folder = tempfile::tempdir().unwrap();
    let long: String = (0..20_000).map(|i| format!("{{\"text\": \"document {i}\"}}\n")).collect();
    for (name, bytes, word) in [
        ("a.jsonl.zst", zstd(long.as_bytes()), "zstd"),
        ("a.jsonl.gz", gzip(long.as_bytes()), "gzip"),
    ] {
        let path = folder.path().join(name);
        for keep in [bytes.len() / 2, bytes.len() - 3, 2] {
            fs::write(&path, &bytes[..keep]).unwrap();
            let error = error_of(&path);
            assert!(error.contains(word) && error.contains("whole"), "{name} {keep}: {error}");
        }
        fs::write(&path, b"this is not an archive").unwrap();
        assert!(error_of(&path).contains(word));
    }
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_needs_a_feature() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    fs::write(&path, "PAR1").unwrap();
    assert!(error_of(&path).contains("--features parquet"));
}

/// A zstd frame of `blocks` blocks of 128 KiB that repeat one byte, 4 bytes each.
fn zstd_bomb(byte: u8, blocks: u32) -> Vec<u8> {
    let mut file = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
    for block in 1..=blocks {
        let header = (131_072 << 3) | (1 << 1) | u32::from(block == blocks);
        file.extend_from_slice(&header.to_le_bytes()[..3]);
        file.push(byte);
    }
    file
}

#[test]
fn rejects_endless_lines_of_small_compressed_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.jsonl.zst");
    let bomb = zstd_bomb(b'a', 32_768);
    assert!(bomb.len() < 132_000);
    fs::write(&path, bomb).unwrap();
    let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
    let error = corpus.documents().next().unwrap().unwrap_err();
    let want = format!(
        "{} line 1 is longer than 268435456 bytes; split it into several documents",
        path.display()
    );
    assert_eq!(error.to_string(), want);
}

/// Reads 1 GiB into memory.
#[test]
#[ignore = "needs 2 GiB of memory"]
fn rejects_endless_texts_of_small_compressed_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.txt.zst");
    fs::write(&path, zstd_bomb(b'a', 32_768)).unwrap();
    let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
    let error = corpus.documents().next().unwrap().unwrap_err();
    assert!(matches!(&error, Error::DocumentTooLarge { place, .. } if place.is_empty()), "{error}");
}
