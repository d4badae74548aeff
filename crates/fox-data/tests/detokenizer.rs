//! Detokenizing a large vocabulary: the text, and a cost per token that depends on neither vocabulary nor text.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests
#![cfg(feature = "hf-tokenizers")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::time::{Duration, Instant};

use fox_data::{Detokenizer, Tokenizer, generated_tokenizer_json};

/// The vocabulary of Qwen models.
const LARGE: u32 = 151_936;

fn load(vocab_size: u32) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, generated_tokenizer_json(vocab_size)).unwrap();
    let tokenizer = Tokenizer::load(&path).unwrap();
    assert_eq!(tokenizer.vocab_size(), vocab_size as usize);
    assert_eq!(tokenizer.bos(), vocab_size - 1);
    tokenizer
}

/// Time per token of the fastest of several chunks, after `earlier` tokens.
fn time_per_token(tokenizer: &Tokenizer, earlier: u32) -> Duration {
    let vocab_size = tokenizer.vocab_size() as u32;
    let ids = |count: u32| (0..count).map(move |i| i.wrapping_mul(2_654_435_761) % vocab_size);
    let mut detokenizer = Detokenizer::new(tokenizer);
    let mut text = String::new();
    ids(earlier).for_each(|id| detokenizer.push(id, &mut text).unwrap());
    let chunk = || {
        let start = Instant::now();
        ids(2_000).for_each(|id| detokenizer.push(id, &mut text).unwrap());
        start.elapsed() / 2_000
    };
    std::iter::repeat_with(chunk).take(9).min().unwrap()
}

#[test]
fn cost_per_token_is_constant() {
    let (small, large) = (load(1_000), load(LARGE));
    let base = time_per_token(&small, 0);
    for (tokenizer, earlier) in [(&large, 0), (&small, 200_000), (&large, 200_000)] {
        let time = time_per_token(tokenizer, earlier);
        println!("{} ids, {earlier} earlier tokens: {time:?} per token", tokenizer.vocab_size());
        // Copying the vocabulary or decoding the text again costs some 1,000 times as much. A larger table has more
        // cache misses, hence the generous factor.
        assert!(time < base * 20, "{time:?} per token, {base:?} for a small vocabulary");
    }
}

#[test]
fn large_vocabulary_decodes_split_characters_and_special_tokens() {
    let tokenizer = load(LARGE);
    let mut ids = tokenizer.encode("é😀").unwrap();
    assert_eq!(ids.len(), 6);
    ids.extend([300, LARGE - 1, 151_000, 0xe2, 0x89]);
    let mut detokenizer = Detokenizer::new(&tokenizer);
    let mut text = String::new();
    for (count, &id) in ids.iter().enumerate() {
        detokenizer.push(id, &mut text).unwrap();
        assert_eq!(text.is_empty(), count == 0, "{text:?}");
    }
    detokenizer.finish(&mut text).unwrap();
    assert_eq!(text, "é😀 w300<|endoftext|> w151000\u{fffd}");
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    assert!(detokenizer.push(LARGE, &mut text).is_err());
}
