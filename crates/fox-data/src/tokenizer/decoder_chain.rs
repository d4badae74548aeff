//! Incremental form of the decoders of a Hugging Face `tokenizer.json`.
//!
//! A decoder of the library maps the list of all tokens to a list of texts. Here every decoder is a stage that takes
//! tokens one by one and keeps what it needs of the past: whether a token was the first, an incomplete character.
//! Stages whose result depends on all tokens (rare; see [`Stage::Buffered`]) give out their text at the end.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::strip::Strip;

use super::detokenizer::Utf8Decoder;
use super::file_limits::without_panic;
use super::gpt2_files::byte_character;
use crate::error::{Error, Result};

/// One step from tokens to text.
#[derive(Debug)]
pub(super) enum Stage {
    /// Puts a space in front of every token but the first: files without a decoder.
    Spaces,
    /// Maps every token alone.
    PerToken(DecoderWrapper),
    /// Maps every token alone, the first one differently.
    FirstDiffers(DecoderWrapper),
    /// Replaces the suffix that ends a word with a space, except in the last token. Only as the last stage.
    WordSuffix(String),
    /// Drops tokens that equal their predecessor, then maps every token alone.
    Deduplicate(DecoderWrapper),
    /// Joins tokens such as `<0xE2>` to characters.
    ByteFallback,
    /// Byte-level BPE: characters stand for bytes. All tokens become one text.
    ByteLevel,
    /// Strips up to `start` characters `content` from the start of one text.
    StripStart { content: char, start: usize },
    /// Keeps all tokens, or the one text (`fused`), until the end.
    Buffered { decoder: DecoderWrapper, fused: bool },
}

/// The stages of a decoder.
pub(super) fn stages(decoder: Option<&DecoderWrapper>) -> Vec<Stage> {
    let Some(decoder) = decoder else { return vec![Stage::Spaces] };
    let mut flat = Vec::new();
    flatten(decoder, &mut flat);
    let mut stages = Vec::new();
    // Whether the stages so far have joined all tokens to one text.
    let mut fused = false;
    let mut decoders = flat.into_iter().peekable();
    while let Some(decoder) = decoders.next() {
        use DecoderWrapper as D;
        let last = decoders.peek().is_none();
        stages.push(match (decoder, fused) {
            (D::Fuse(_), _) => {
                fused = true;
                continue;
            }
            (D::Strip(strip), true) if strip.stop == 0 => {
                Stage::StripStart { content: strip.content, start: strip.start }
            }
            (D::Replace(_) | D::Strip(_), false) => Stage::PerToken(decoder.clone()),
            (D::WordPiece(_) | D::Metaspace(_), false) => Stage::FirstDiffers(decoder.clone()),
            (D::BPE(bpe), false) if last => Stage::WordSuffix(bpe.suffix.clone()),
            (D::CTC(_), false) => Stage::Deduplicate(decoder.clone()),
            (D::ByteFallback(_), false) => Stage::ByteFallback,
            (D::ByteLevel(_), false) => {
                fused = true;
                Stage::ByteLevel
            }
            _ => Stage::Buffered { decoder: decoder.clone(), fused },
        });
    }
    stages
}

fn flatten<'a>(decoder: &'a DecoderWrapper, flat: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().for_each(|decoder| flatten(decoder, flat));
        }
        _ => flat.push(decoder),
    }
}

/// The bytes that a token adds to a text before it; `None` where they depend on its neighbours.
pub(super) fn bytes_of(stages: &[Stage], token: String) -> Result<Option<Vec<u8>>> {
    let mut text = token;
    for stage in stages {
        match stage {
            Stage::Spaces => text.insert(0, ' '),
            Stage::PerToken(decoder) => text = decode(decoder, vec![text])?.concat(),
            Stage::FirstDiffers(decoder) => {
                text = decode(decoder, vec![String::new(), text])?.pop().unwrap_or_default();
            }
            Stage::ByteFallback => {
                if let Some(byte) = fallback_byte(&text) {
                    return Ok(Some(vec![byte]));
                }
            }
            Stage::ByteLevel => return Ok(Some(byte_level_bytes(&text))),
            Stage::StripStart { .. } => {}
            Stage::WordSuffix(_) | Stage::Deduplicate(_) | Stage::Buffered { .. } => {
                return Ok(None);
            }
        }
    }
    Ok(Some(text.into_bytes()))
}

/// The state of all stages for one sequence.
#[derive(Debug, Clone)]
pub(super) struct DecoderChain {
    stages: Arc<[Stage]>,
    states: Vec<StageState>,
}

/// What stages keep of earlier tokens; each uses some of the fields.
#[derive(Debug, Clone, Default)]
struct StageState {
    started: bool,
    /// The last token ([`Stage::Deduplicate`]), its end ([`Stage::WordSuffix`]), or all ([`Stage::Buffered`]).
    tokens: Vec<String>,
    /// Bytes of consecutive byte tokens ([`Stage::ByteFallback`]).
    bytes: Vec<u8>,
    utf8: Utf8Decoder,
    /// Characters stripped from the start.
    stripped: usize,
}

impl DecoderChain {
    pub(super) fn new(stages: Arc<[Stage]>) -> Self {
        let states = vec![StageState::default(); stages.len()];
        Self { stages, states }
    }

    /// Appends to `out` the text that becomes certain with `token`.
    pub(super) fn push(&mut self, token: String, out: &mut String) -> Result<()> {
        push(&self.stages, &mut self.states, token, out)
    }

    /// Ends the list of tokens: appends the remaining text and resets the state.
    pub(super) fn finish(&mut self, out: &mut String) -> Result<()> {
        for (i, stage) in self.stages.iter().enumerate() {
            let mut state = std::mem::take(&mut self.states[i]);
            for token in flush(stage, &mut state)? {
                push(&self.stages[i + 1..], &mut self.states[i + 1..], token, out)?;
            }
        }
        Ok(())
    }

    /// What follows continues the tokens so far, whose own text is not wanted: complete text is dropped.
    pub(super) fn end_context(&mut self) {
        for (stage, state) in self.stages.iter().zip(&mut self.states) {
            match stage {
                Stage::Buffered { .. } => state.tokens.clear(),
                Stage::ByteFallback => {
                    let mut utf8 = Utf8Decoder::default();
                    utf8.push(&state.bytes, &mut String::new());
                    state.bytes = utf8.into_pending();
                }
                _ => {}
            }
        }
    }
}

fn push(
    stages: &[Stage],
    states: &mut [StageState],
    token: String,
    out: &mut String,
) -> Result<()> {
    let (Some((stage, stages)), Some((state, states))) =
        (stages.split_first(), states.split_first_mut())
    else {
        out.push_str(&token);
        return Ok(());
    };
    let first = !std::mem::replace(&mut state.started, true);
    match stage {
        Stage::Spaces if first => push(stages, states, token, out),
        Stage::Spaces => push(stages, states, format!(" {token}"), out),
        Stage::PerToken(decoder) => push_all(stages, states, decode(decoder, vec![token])?, out),
        Stage::FirstDiffers(decoder) => {
            let tokens = if first { vec![token] } else { vec![String::new(), token] };
            let decoded = decode(decoder, tokens)?.pop();
            push_all(stages, states, decoded, out)
        }
        Stage::WordSuffix(suffix) => {
            let end = state.tokens.pop().map(|end| end.replace(suffix, " "));
            push_all(stages, states, end, out)?;
            let (start, end) = token.split_at(token.find(suffix).unwrap_or(token.len()));
            state.tokens.push(end.to_owned());
            push(stages, states, start.to_owned(), out)
        }
        Stage::Deduplicate(decoder) => {
            if state.tokens.first() == Some(&token) {
                return Ok(());
            }
            state.tokens = vec![token.clone()];
            push_all(stages, states, decode(decoder, vec![token])?, out)
        }
        Stage::ByteFallback => {
            if let Some(byte) = fallback_byte(&token) {
                state.bytes.push(byte);
                return Ok(());
            }
            push_all(stages, states, fallback_text(&mut state.bytes), out)?;
            push(stages, states, token, out)
        }
        Stage::ByteLevel => {
            let mut text = String::new();
            state.utf8.push(&byte_level_bytes(&token), &mut text);
            push(stages, states, text, out)
        }
        Stage::StripStart { content, start } => {
            let mut text = token.as_str();
            while state.stripped < *start && !text.is_empty() {
                match text.strip_prefix(*content) {
                    Some(rest) => {
                        text = rest;
                        state.stripped += 1;
                    }
                    None => state.stripped = *start,
                }
            }
            push(stages, states, text.to_owned(), out)
        }
        Stage::Buffered { fused, .. } => {
            match state.tokens.last_mut().filter(|_| *fused) {
                Some(text) => text.push_str(&token),
                None => state.tokens.push(token),
            }
            Ok(())
        }
    }
}

fn push_all(
    stages: &[Stage],
    states: &mut [StageState],
    tokens: impl IntoIterator<Item = String>,
    out: &mut String,
) -> Result<()> {
    tokens.into_iter().try_for_each(|token| push(stages, states, token, out))
}

/// The tokens that a stage gives out at the end.
fn flush(stage: &Stage, state: &mut StageState) -> Result<Vec<String>> {
    let mut text = String::new();
    match stage {
        Stage::WordSuffix(suffix) => {
            return Ok(state.tokens.pop().map(|end| end.replace(suffix, "")).into_iter().collect());
        }
        Stage::ByteFallback => return Ok(fallback_text(&mut state.bytes)),
        Stage::Buffered { decoder, .. } if !state.tokens.is_empty() => {
            return decode(decoder, std::mem::take(&mut state.tokens));
        }
        Stage::ByteLevel => state.utf8.finish(&mut text),
        _ => {}
    }
    Ok(if text.is_empty() { Vec::new() } else { vec![text] })
}

fn decode(decoder: &DecoderWrapper, tokens: Vec<String>) -> Result<Vec<String>> {
    // The library's version panics on tokens that are shorter than `stop`.
    if let DecoderWrapper::Strip(rule) = decoder {
        return Ok(tokens.iter().map(|token| strip(token, rule).to_owned()).collect());
    }
    without_panic(|| decoder.decode_chain(tokens))
        .map_err(|detail| Error::Tokenize { tokenizer: "hf".to_owned(), detail })
}

/// Strips up to `start` and `stop` characters from the ends of a token.
fn strip<'t>(token: &'t str, rule: &Strip) -> &'t str {
    let mut text = token;
    for _ in 0..rule.start.min(token.len()) {
        text = text.strip_prefix(rule.content).unwrap_or(text);
    }
    for _ in 0..rule.stop.min(text.len()) {
        text = text.strip_suffix(rule.content).unwrap_or(text);
    }
    text
}

/// The byte of a token such as `<0xE2>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The text of consecutive byte tokens: one token, or U+FFFD for each where they are not UTF-8.
fn fallback_text(bytes: &mut Vec<u8>) -> Vec<String> {
    let bytes = std::mem::take(bytes);
    let count = bytes.len();
    match String::from_utf8(bytes) {
        Ok(text) if count > 0 => vec![text],
        Ok(_) => Vec::new(),
        Err(_) => vec!["\u{fffd}".to_owned(); count],
    }
}

/// The bytes of a token of byte-level BPE. A token with other characters (an added one) stands for itself.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    static BYTES: OnceLock<HashMap<char, u8>> = OnceLock::new();
    let table = BYTES.get_or_init(|| (0..=255).map(|byte| (byte_character(byte), byte)).collect());
    let bytes: Option<Vec<u8>> = token.chars().map(|c| table.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn decoder(value: Value) -> DecoderWrapper {
        serde_json::from_value(value).unwrap()
    }

    fn streamed(decoder: Option<&DecoderWrapper>, tokens: &[String]) -> (String, usize) {
        let mut chain = DecoderChain::new(stages(decoder).into());
        let mut text = String::new();
        for token in tokens {
            chain.push(token.clone(), &mut text).unwrap();
        }
        let before_end = text.len();
        chain.finish(&mut text).unwrap();
        (text, before_end)
    }

    /// Every decoder, and chains of them as published tokenizers have them.
    fn decoders() -> Vec<DecoderWrapper> {
        let replace = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
        let regex = json!({ "type": "Replace", "pattern": { "Regex": "[ab]+" }, "content": "_" });
        let strip = json!({ "type": "Strip", "content": " ", "start": 2, "stop": 0 });
        let fallback = json!({ "type": "ByteFallback" });
        let fuse = json!({ "type": "Fuse" });
        let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
        let wordpiece = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
        let metaspace = |scheme: &str| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true });
        let bpe = json!({ "type": "BPEDecoder", "suffix": "</w>" });
        let ctc = json!({ "type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": true });
        let chain = |decoders: &[&Value]| json!({ "type": "Sequence", "decoders": decoders });
        [
            chain(&[&replace, &fallback, &fuse, &strip]),
            chain(&[&replace, &fallback, &fuse]),
            chain(&[&byte_level, &strip]),
            chain(&[&ctc, &wordpiece]),
            chain(&[&fuse, &regex, &strip]),
            chain(&[&bpe, &metaspace("always")]),
            chain(&[&strip, &bpe, &fuse]),
            chain(&[&fallback, &metaspace("first")]),
            chain(&[&chain(&[&replace]), &chain(&[&fuse, &byte_level])]),
            chain(&[]),
            metaspace("never"),
            metaspace("always"),
            regex,
            strip,
            fallback,
            byte_level,
            wordpiece,
            bpe,
            ctc,
        ]
        .map(decoder)
        .into()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn streamed_text_equals_the_library(tokens in prop::collection::vec(
            "<0x(E2|89|A4|41|zz|\\+1)>|[▁ Ġab#é|.'</w>n]{0,4}|</w>|a</w>|##b|Ċ|Ã|©|don't", 1..12,
        )) {
            for decoder in decoders() {
                let whole = decoder.decode(tokens.clone()).unwrap();
                prop_assert_eq!(streamed(Some(&decoder), &tokens).0, whole, "{:?}", decoder);
            }
            prop_assert_eq!(streamed(None, &tokens).0, tokens.join(" "));
        }
    }

    #[test]
    fn text_is_given_out_before_the_end() {
        let tokens: Vec<String> = ["▁Hello", "▁wor", "ld", "."].map(str::to_owned).into();
        for decoder in decoders() {
            let buffered =
                stages(Some(&decoder)).iter().any(|s| matches!(s, Stage::Buffered { .. }));
            let (text, before_end) = streamed(Some(&decoder), &tokens);
            assert_eq!(before_end == 0, buffered, "{text:?} by {decoder:?}");
        }
    }

    #[test]
    fn byte_tokens_of_a_context_are_not_repeated() {
        let mut chain = DecoderChain::new(vec![Stage::ByteFallback].into());
        let mut text = String::new();
        for token in ["<0xC3>", "<0xA9>", "<0xE2>", "<0x89>"] {
            chain.push(token.to_owned(), &mut text).unwrap();
        }
        chain.end_context();
        chain.push("<0xA4>".to_owned(), &mut text).unwrap();
        chain.finish(&mut text).unwrap();
        assert_eq!(text, "≤");
    }
}
