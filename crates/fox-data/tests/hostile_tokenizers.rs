//! Tokenizer files that would panic or fill the memory: refused at load, or an error for the text.
#![cfg(feature = "hf-tokenizers")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;

use fox_data::{Detokenizer, Error, Tokenizer};
use serde_json::{Value, json};

fn load(normalizer: Value, decoder: Value) -> Result<Tokenizer, Error> {
    load_file(&json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null,
        "decoder": decoder,
        "model": { "type": "WordLevel", "vocab": { "<s>": 0, "a": 1, " ": 2, "  x  ": 3 }, "unk_token": "<s>" },
    }))
}

fn load_file(file: &Value) -> Result<Tokenizer, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, file.to_string()).unwrap();
    Tokenizer::load(&path)
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({ "type": "Replace", "pattern": pattern, "content": content })
}

fn sequence(key: &str, steps: Vec<Value>) -> Value {
    json!({ "type": "Sequence", key: steps })
}

#[test]
fn rejects_replacements_of_nothing_and_exploding_ones() {
    let doubling = || vec![replace(json!({ "String": "a" }), "aa"); 34];
    let long = "x".repeat(1 << 20);
    for (normalizer, decoder, sentence) in [
        (
            replace(json!({ "String": "" }), "x"),
            Value::Null,
            "its normalizer replaces the empty text",
        ),
        (
            replace(json!({ "Regex": "" }), "x"),
            Value::Null,
            "its normalizer replaces the empty text",
        ),
        (Value::Null, replace(json!({ "String": "" }), "x"), "its decoder replaces the empty text"),
        (sequence("normalizers", doubling()), Value::Null, "17179869184 times as long"),
        (Value::Null, sequence("decoders", doubling()), "17179869184 times as long"),
        (replace(json!({ "Regex": "." }), &long), Value::Null, "1048576 times as long"),
    ] {
        let error = load(normalizer, decoder).unwrap_err().to_string();
        assert!(error.contains(sentence), "{error}");
    }
    // As Llama's files have it.
    let spaces = replace(json!({ "String": " " }), "▁");
    assert!(load(spaces, Value::Null).is_ok());
}

#[test]
fn rejects_huge_ids_and_files() {
    let vocab = json!({ "<s>": 0, "a": 4_000_000_000_u32 });
    let file = json!({ "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<s>" } });
    let error = load_file(&file).unwrap_err().to_string();
    assert!(error.contains("the id 4000000000"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::File::create(&path).unwrap().set_len(200 << 20).unwrap();
    let error = Tokenizer::load(&path).unwrap_err().to_string();
    assert!(error.contains("more than 134217728 bytes"), "{error}");
}

#[test]
fn panics_of_the_library_are_errors() {
    // A map that is cut, and one whose offsets point outside.
    for charsmap in ["AAAA", "/////w==", "BAAAAP////8="] {
        let normalizer = json!({ "type": "Precompiled", "precompiled_charsmap": charsmap });
        match load(normalizer, Value::Null) {
            Ok(tokenizer) => drop(tokenizer.encode("a b é")),
            Err(error) => assert!(matches!(error, Error::BadTokenizer { .. }), "{error}"),
        }
    }
    // A pattern that matches the empty text in places.
    let tokenizer = load(replace(json!({ "Regex": "x*" }), "y"), Value::Null).unwrap();
    drop(tokenizer.encode("a é x"));
    assert!(load(Value::Null, json!({ "type": "Nothing" })).is_err());
}

#[test]
fn strip_with_a_stop_accepts_short_tokens() {
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 3 });
    let fused = sequence("decoders", vec![json!({ "type": "Fuse" }), strip.clone()]);
    for (decoder, text) in [(strip, "a x"), (fused, "a   x")] {
        let tokenizer = load(Value::Null, decoder).unwrap();
        let ids = [1, 2, 3];
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        let mut detokenizer = Detokenizer::new(&tokenizer);
        let mut streamed = String::new();
        ids.iter().for_each(|&id| detokenizer.push(id, &mut streamed).unwrap());
        detokenizer.finish(&mut streamed).unwrap();
        assert_eq!(streamed, text);
    }
}
