//! Built-in tokenizers on any text and any ids, and tokenizer files of any content.
//!
//! The first byte of the input selects the tokenizer or file; the rest is the text, the ids or the content.
#![no_main]

use std::fs;
use std::sync::LazyLock;

use fox_data::{SafeSplit, Tokenizer};
use fox_fuzz::{check_sentence, folder};
use fox_infer::TextDecoder;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(folder);
static KNOWN: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let known = ["bytes", "gpt2", "json-gpt2", "synthetic"];
    known.map(|name| Tokenizer::from_name(name).expect("a built-in name")).to_vec()
});
const FILES: [&str; 4] =
    ["tokenizer.json", "fox_tokenizer.json", "tokenizer_config.json", "vocab.json"];

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let which = usize::from(first) % (KNOWN.len() + FILES.len());
    match KNOWN.get(which) {
        Some(tokenizer) => {
            if let Ok(text) = std::str::from_utf8(rest) {
                check_text(tokenizer, text);
            }
            check_ids(tokenizer, rest);
        }
        None => check_file(FILES[which - KNOWN.len()], rest),
    }
});

fn check_text(tokenizer: &Tokenizer, text: &str) {
    let ids = tokenizer.encode(text).expect("a built-in tokenizer takes any text");
    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
    let decoded = tokenizer.decode(&ids).expect("ids of the tokenizer");
    if !matches!(tokenizer, Tokenizer::Synthetic(_)) {
        assert_eq!(decoded, text);
    }
    // Streamed, and up to a stop string: a prefix of the text.
    assert_eq!(stream(tokenizer, &ids, None), decoded);
    let mut starts = decoded.char_indices().skip(2).map(|(at, _)| at);
    if let (Some(from), Some(to)) = (starts.next(), starts.nth(1)) {
        let stop = &decoded[from..to];
        let before = &decoded[..decoded.find(stop).expect("a substring")];
        assert_eq!(stream(tokenizer, &ids, Some(stop)), before, "stop {stop:?}");
    }
    // Split where it is safe, the chunks have the ids of the text.
    let safe = |(at, c): &(usize, char)| match tokenizer.safe_split() {
        SafeSplit::AnyCharacter => true,
        SafeSplit::BeforeSpace => {
            *c == ' ' && text[..*at].chars().next_back().is_some_and(|c| !c.is_whitespace())
        }
        SafeSplit::Nowhere => false,
    };
    for (at, _) in text.char_indices().filter(safe).take(4) {
        let (a, b) = text.split_at(at);
        let chunks = [a, b].map(|chunk| tokenizer.encode(chunk).expect("any text")).concat();
        assert_eq!(chunks, ids, "split at {at}");
    }
}

fn check_ids(tokenizer: &Tokenizer, bytes: &[u8]) {
    let ids: Vec<u32> =
        bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect();
    match tokenizer.decode(&ids) {
        Ok(text) => {
            drop(tokenizer.encode(&text).expect("any text"));
            assert_eq!(stream(tokenizer, &ids, None), text);
        }
        Err(error) => return check_sentence(&error),
    }
    stream(tokenizer, &ids, Some("\n"));
}

/// The text that a client receives, delta by delta.
fn stream(tokenizer: &Tokenizer, ids: &[u32], stop: Option<&str>) -> String {
    let stops: Vec<String> = stop.into_iter().map(str::to_owned).collect();
    let mut stream = TextDecoder::new(tokenizer, &[], &stops).unwrap();
    let mut text = String::new();
    for &id in ids {
        let delta = stream.push(id as i32).expect("ids of the tokenizer");
        text.push_str(&delta.text);
        if delta.stopped {
            return text;
        }
    }
    text + &stream.finish().expect("ids of the tokenizer").text
}

fn check_file(name: &str, bytes: &[u8]) {
    let path = FOLDER.path().join(name);
    fs::write(&path, bytes).expect("memory");
    for path in [FOLDER.path(), &path] {
        match Tokenizer::load(path) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("a b").expect("plain text");
                tokenizer.decode(&ids).expect("ids of the tokenizer");
            }
            Err(error) => check_sentence(&error),
        }
    }
    fs::remove_file(&path).expect("memory");
}
