//! GPT-2's vocabulary in the forms other tools read: `vocab.json`, `merges.txt`, `tokenizer.json`.
//!
//! The embedded table holds only tokens in the order they were learned. The merge that made a token is recovered
//! by merging its bytes with all earlier merges, which leaves the two halves.

use std::collections::HashMap;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use super::gpt2::Gpt2Tokenizer;

/// The printable character that stands for a byte in the published files.
pub(super) fn byte_character(byte: u8) -> char {
    static TABLE: OnceLock<[char; 256]> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = ['\0'; 256];
        let mut next = 256;
        for byte in 0..=255_u8 {
            table[usize::from(byte)] = match byte {
                b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
                _ => {
                    next += 1;
                    char::from_u32(next - 1).unwrap_or('\u{fffd}')
                }
            };
        }
        table
    })[usize::from(byte)]
}

fn printable(token: &[u8]) -> String {
    token.iter().map(|&b| byte_character(b)).collect()
}

/// `vocab.json`: printable token to id.
pub(super) fn vocab() -> Map<String, Value> {
    let mut vocab: Map<String, Value> = Gpt2Tokenizer
        .tokens()
        .iter()
        .zip(0_u32..)
        .map(|(token, id)| (printable(token), json!(id)))
        .collect();
    // The marker is text, not bytes to be mapped; it happens to look the same.
    vocab.insert(Gpt2Tokenizer::END_OF_TEXT_TEXT.to_owned(), json!(Gpt2Tokenizer::END_OF_TEXT));
    vocab
}

/// The merges in the order they were learned, as printable halves with a space between.
pub(super) fn merges() -> Vec<String> {
    let tokens = &Gpt2Tokenizer.tokens()[..Gpt2Tokenizer::END_OF_TEXT as usize];
    let ranks: HashMap<&[u8], u32> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    tokens
        .iter()
        .zip(0_u32..)
        .filter(|(token, _)| token.len() > 1)
        .map(|(token, rank)| {
            let split = last_split(token, rank, &ranks);
            format!("{} {}", printable(&token[..split]), printable(&token[split..]))
        })
        .collect()
}

/// Where the two halves meet that were merged into `token`, the merge number `rank`.
fn last_split(token: &[u8], rank: u32, ranks: &HashMap<&[u8], u32>) -> usize {
    // Boundaries between parts, the two ends included.
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let best = (1..cuts.len() - 1)
            .filter_map(|i| {
                let merged = ranks.get(&token[cuts[i - 1]..cuts[i + 1]])?;
                (*merged < rank).then_some((*merged, i))
            })
            .min();
        match best {
            Some((_, i)) => {
                cuts.remove(i);
            }
            // Not reached with the embedded table (a test rebuilds every merge).
            None => break,
        }
    }
    cuts[1]
}

/// The whole `tokenizer.json`.
pub(super) fn tokenizer_json() -> Value {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added_token(Gpt2Tokenizer::END_OF_TEXT, Gpt2Tokenizer::END_OF_TEXT_TEXT)],
        "normalizer": null,
        "pre_tokenizer": byte_level(true),
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocab(),
            "merges": merges(),
        },
    })
}

/// The byte-level step of a `tokenizer.json`, with or without GPT-2's splitting into words.
pub(super) fn byte_level(split: bool) -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": split,
    })
}

/// A special token's entry in `tokenizer.json`.
pub(super) fn added_token(id: u32, content: &str) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_match_the_published_file() {
        let merges = merges();
        assert_eq!(merges.len(), 50_000);
        assert_eq!(merges[..4], ["Ġ t", "Ġ a", "h e", "i n"]);
        assert_eq!(merges[49_999], "Ġg azed");
        for (merge, token) in merges.iter().zip(&Gpt2Tokenizer.tokens()[256..]) {
            assert_eq!(merge.replace(' ', ""), printable(token));
        }
    }

    #[test]
    fn vocabulary_matches_the_published_file() {
        let vocab = vocab();
        assert_eq!(vocab.len(), 50_257);
        assert_eq!(vocab["!"], 0);
        assert_eq!(vocab["Ġ"], 220);
        assert_eq!(vocab["Ċ"], 198);
        assert_eq!(vocab["ĠHello"], 18435);
        assert_eq!(vocab["<|endoftext|>"], 50256);
    }
}
