//! Incremental detokenization: token ids to text, one id at a time.

#[cfg(feature = "hf-tokenizers")]
use super::decoder_chain::DecoderChain;
use super::json_escape::Unescaper;
use super::{ByteTokenizer, Gpt2Tokenizer, Tokenizer};
use crate::error::{Error, Result};
use crate::synthetic::{START_WORD, SyntheticTokenizer};

/// Turns the ids of one sequence into text as they arrive.
///
/// The concatenated output equals [`Tokenizer::decode`] of all ids, byte for byte. Text is given out as soon as later
/// ids cannot change it: an incomplete UTF-8 character or escape is kept back. The cost per id is that of the text it
/// adds; it depends neither on the size of the vocabulary nor on the text so far.
///
/// ```
/// use fox_data::{Detokenizer, Tokenizer};
///
/// let tokenizer = Tokenizer::from_name("bytes")?;
/// let mut detokenizer = Detokenizer::new(&tokenizer);
/// let mut text = String::new(); // reuse one buffer: text is appended
/// for id in tokenizer.encode("naïve")? {
///     detokenizer.push(id, &mut text)?;
/// }
/// detokenizer.finish(&mut text)?; // incomplete characters become U+FFFD
/// assert_eq!(text, "naïve");
/// # Ok::<(), fox_data::Error>(())
/// ```
///
/// For text that continues a prompt, use [`Detokenizer::after`]; clone the result for several continuations of one
/// prompt. A value is `Send`, small, and belongs to one sequence.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    /// One token per byte, or byte-level BPE.
    Bytes(Utf8Decoder),
    /// Byte-level BPE of an escaped JSON string.
    Json(Utf8Decoder, Unescaper),
    /// Words with spaces between them; whether there was one.
    Words(bool),
    #[cfg(feature = "hf-tokenizers")]
    HuggingFace(DecoderChain),
}

impl Detokenizer {
    /// A detokenizer at the start of a sequence.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let state = match tokenizer {
            Tokenizer::Bytes(_) | Tokenizer::Gpt2(_) => State::Bytes(Utf8Decoder::default()),
            Tokenizer::JsonGpt2(_) => State::Json(Utf8Decoder::default(), Unescaper::default()),
            Tokenizer::Synthetic(_) => State::Words(false),
            #[cfg(feature = "hf-tokenizers")]
            Tokenizer::HuggingFace(t) => State::HuggingFace(t.decoder_chain()),
        };
        Self { tokenizer: tokenizer.clone(), state }
    }

    /// A detokenizer for text that continues `context`, whose own text is not given out. A character that the context
    /// leaves incomplete belongs to the continuation.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn after(tokenizer: &Tokenizer, context: &[u32]) -> Result<Self> {
        let mut detokenizer = Self::new(tokenizer);
        let mut ignored = String::new();
        for &id in context {
            detokenizer.push(id, &mut ignored)?;
            ignored.clear();
        }
        #[cfg(feature = "hf-tokenizers")]
        if let State::HuggingFace(chain) = &mut detokenizer.state {
            chain.end_context();
        }
        Ok(detokenizer)
    }

    /// Appends to `out` the text that becomes certain with `id`.
    ///
    /// # Errors
    /// An id outside the vocabulary, which leaves the state unchanged.
    pub fn push(&mut self, id: u32, out: &mut String) -> Result<()> {
        let unknown = || Error::UnknownToken { id, vocab_size: self.tokenizer.vocab_size() };
        match &mut self.state {
            State::Bytes(utf8) => match self.tokenizer {
                Tokenizer::Bytes(_) if id == ByteTokenizer::BOS => {}
                Tokenizer::Bytes(_) => utf8.push(&[u8::try_from(id).map_err(|_| unknown())?], out),
                _ => utf8.push(gpt2_token(id).ok_or_else(unknown)?, out),
            },
            State::Json(utf8, unescaper) => {
                let mut body = String::new();
                utf8.push(gpt2_token(id).ok_or_else(unknown)?, &mut body);
                unescaper.push(&body, out);
            }
            State::Words(started) => {
                let word = SyntheticTokenizer.word(id).ok_or_else(unknown)?;
                if word != START_WORD {
                    if *started {
                        out.push(' ');
                    }
                    out.push_str(word);
                    *started = true;
                }
            }
            #[cfg(feature = "hf-tokenizers")]
            State::HuggingFace(chain) => {
                if let Tokenizer::HuggingFace(t) = &self.tokenizer
                    && let Some(token) = t.token(id)?
                {
                    chain.push(token, out)?;
                }
            }
        }
        Ok(())
    }

    /// Ends the sequence: appends the text of incomplete characters and resets the state.
    ///
    /// # Errors
    /// Only Hugging Face tokenizers can fail.
    pub fn finish(&mut self, out: &mut String) -> Result<()> {
        match &mut self.state {
            State::Bytes(utf8) => utf8.finish(out),
            State::Json(utf8, unescaper) => {
                let mut body = String::new();
                utf8.finish(&mut body);
                unescaper.push(&body, out);
                unescaper.finish(out);
            }
            State::Words(started) => *started = false,
            #[cfg(feature = "hf-tokenizers")]
            State::HuggingFace(chain) => chain.finish(out)?,
        }
        Ok(())
    }
}

fn gpt2_token(id: u32) -> Option<&'static [u8]> {
    Gpt2Tokenizer.tokens().get(id as usize).map(Vec::as_slice)
}

/// [`String::from_utf8_lossy`] for bytes that arrive in chunks.
#[derive(Debug, Clone, Default)]
pub(super) struct Utf8Decoder {
    /// An incomplete character, at most 3 bytes.
    pending: Vec<u8>,
}

impl Utf8Decoder {
    /// Appends the text of `bytes`; an incomplete character at their end waits for its other bytes.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut joined = std::mem::take(&mut self.pending);
        joined.extend_from_slice(bytes);
        let mut rest = joined.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            let Some(length) = error.error_len() else {
                joined.drain(..joined.len() - invalid.len());
                self.pending = joined;
                return;
            };
            out.push('\u{fffd}');
            rest = &invalid[length..];
        }
        out.push_str(&String::from_utf8_lossy(rest));
        // Keeps the allocation for the next incomplete character.
        joined.clear();
        self.pending = joined;
    }

    /// The bytes of the incomplete character.
    #[cfg(feature = "hf-tokenizers")]
    pub(super) fn into_pending(self) -> Vec<u8> {
        self.pending
    }

    /// Appends U+FFFD for an incomplete character.
    pub(super) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push('\u{fffd}');
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut detokenizer = Detokenizer::new(tokenizer);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(id, &mut text).unwrap();
        }
        detokenizer.finish(&mut text).unwrap();
        text
    }

    #[test]
    fn characters_are_given_out_complete() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let mut detokenizer = Detokenizer::new(&tokenizer);
        let chunks = "aé😀b".bytes().map(|byte| {
            let mut text = String::new();
            detokenizer.push(u32::from(byte), &mut text).unwrap();
            text
        });
        assert_eq!(chunks.collect::<Vec<_>>(), ["a", "", "é", "", "", "", "😀", "b"]);
        assert!(detokenizer.push(256, &mut String::new()).is_err());
    }

    #[test]
    fn continues_after_a_context() {
        for (name, context, text) in [
            ("synthetic", "Ann", " sings. The"),
            ("gpt2", "na", "ïve 😀"),
            ("json-gpt2", "a\n", "\"b\" é😀\\"),
        ] {
            let tokenizer = Tokenizer::from_name(name).unwrap();
            let before = tokenizer.encode(context).unwrap();
            let mut detokenizer = Detokenizer::after(&tokenizer, &before).unwrap();
            let mut out = String::new();
            for id in tokenizer.encode(text).unwrap() {
                detokenizer.push(id, &mut out).unwrap();
            }
            detokenizer.finish(&mut out).unwrap();
            assert_eq!(out, text, "{name}");
        }
        // The first byte of é belongs to the context.
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let mut detokenizer = Detokenizer::after(&tokenizer, &[97, 0xc3]).unwrap();
        let mut out = String::new();
        detokenizer.push(0xa9, &mut out).unwrap();
        assert_eq!(out, "é");
        assert!(Detokenizer::after(&tokenizer, &[256]).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn streamed_text_equals_decoded_text(
            bytes in prop::collection::vec(0_u32..256, 0..40),
            words in prop::collection::vec(0_u32..90, 0..20),
            tokens in prop::collection::vec(0_u32..50_257, 0..20),
            text in "[a-zé😀\\\\/u0-9dN{}x\"\n]{0,30}",
        ) {
            let check = |name: &str, ids: &[u32]| {
                let tokenizer = Tokenizer::from_name(name).unwrap();
                prop_assert_eq!(streamed(&tokenizer, ids), tokenizer.decode(ids).unwrap(), "{}", name);
                Ok(())
            };
            check("bytes", &bytes)?;
            check("synthetic", &words)?;
            check("gpt2", &tokens)?;
            // Single bytes are the first 256 tokens, in another order.
            check("gpt2", &bytes)?;
            check("json-gpt2", &tokens)?;
            check("json-gpt2", &bytes)?;
            check("json-gpt2", &Gpt2Tokenizer.encode(&text))?;
        }

        #[test]
        fn utf8_chunks_equal_lossy_conversion(bytes in prop::collection::vec(any::<u8>(), 0..30), at in 0_usize..30) {
            let (mut utf8, mut text) = (Utf8Decoder::default(), String::new());
            let (a, b) = bytes.split_at(at.min(bytes.len()));
            utf8.push(a, &mut text);
            utf8.push(b, &mut text);
            utf8.finish(&mut text);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
