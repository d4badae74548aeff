//! LongCrawl64's tokenizer: GPT-2's BPE around a JSON escape.

use super::gpt2::Gpt2Tokenizer;
use super::json_escape::{self, Unescaper};
use crate::error::Result;

/// GPT-2's BPE over text escaped as the body of an ASCII-only JSON string, as LongCrawl64 was tokenized.
///
/// So a newline is the two characters `\n`, and an accented letter costs several tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JsonGpt2Tokenizer;

impl JsonGpt2Tokenizer {
    /// Longest sequence the published models were trained with.
    pub(crate) const MODEL_MAX_LENGTH: usize = 16_384;

    /// The ids of `text` with 50256 in front.
    pub fn encode(self, text: &str) -> Vec<u32> {
        let mut ids = vec![Gpt2Tokenizer::END_OF_TEXT];
        ids.extend(self.encode_body(text));
        ids
    }

    /// The ids of `text` with nothing in front. `<|endoftext|>` in the text becomes 50256.
    pub(crate) fn encode_body(self, text: &str) -> Vec<u32> {
        Gpt2Tokenizer.encode_with_marker(&json_escape::escape(text))
    }

    /// The text of `ids`: the body of a JSON string unescaped up to the first violation of JSON's rules (a bare quote,
    /// a raw control character, a truncated escape), and with its escapes undone as far as possible after it. Half of a
    /// surrogate pair becomes the replacement character.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode(self, ids: &[u32]) -> Result<String> {
        let body = Gpt2Tokenizer.decode(ids)?;
        let (mut unescaper, mut text) = (Unescaper::default(), String::new());
        unescaper.push(&body, &mut text);
        unescaper.finish(&mut text);
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode_body(body: &str) -> String {
        JsonGpt2Tokenizer.decode(&Gpt2Tokenizer.encode_with_marker(body)).unwrap()
    }

    #[test]
    fn encode_puts_the_marker_first() {
        assert_eq!(JsonGpt2Tokenizer.encode("Hello world"), [50256, 15496, 995]);
        assert_eq!(JsonGpt2Tokenizer.encode(""), [50256]);
    }

    #[test]
    fn marker_text_becomes_the_marker() {
        assert_eq!(JsonGpt2Tokenizer.encode("a<|endoftext|>b"), [50256, 64, 50256, 65]);
        assert_eq!(JsonGpt2Tokenizer.decode(&[50256, 64]).unwrap(), "<|endoftext|>a");
    }

    #[test]
    fn newline_is_escaped() {
        assert_eq!(JsonGpt2Tokenizer.encode_body("a\nb"), Gpt2Tokenizer.encode("a\\nb"));
    }

    #[test]
    fn valid_json_is_decoded_strictly() {
        assert_eq!(decode_body(r#"a\nb \u00e9 \ud83d\ude00 \/ \""#), "a\nb é 😀 / \"");
    }

    #[test]
    fn truncated_escapes_decode() {
        assert_eq!(decode_body(r"end\ud83d"), "end\u{fffd}");
        assert_eq!(decode_body(r"end\ud83d\u"), "end\u{fffd}");
        assert_eq!(decode_body(r"end\"), "end");
        assert_eq!(decode_body(r"\ude00start"), "\u{fffd}start");
    }

    #[test]
    fn invalid_json_is_decoded_leniently() {
        assert_eq!(decode_body("a\"b\\n\\u00e9"), "a\"b\né");
        assert_eq!(decode_body("raw\nnewline\\t."), "raw\nnewline\t.");
        // Non-ASCII bytes are read as Latin-1 there.
        assert_eq!(decode_body("\"é"), "\"Ã©");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_text_round_trips(text in "\\PC{0,60}|[ -~\\s\"\\\\]{0,60}|(?s:.{0,40})") {
            let ids = JsonGpt2Tokenizer.encode(&text);
            prop_assert_eq!(JsonGpt2Tokenizer.decode(&ids[1..]).unwrap(), text);
        }

        #[test]
        fn any_truncation_decodes(text in "[a-zé😀\\n\"]{0,20}", keep in 0_usize..40) {
            let ids = JsonGpt2Tokenizer.encode(&text);
            prop_assert!(JsonGpt2Tokenizer.decode(&ids[..keep.min(ids.len())]).is_ok());
        }
    }
}
