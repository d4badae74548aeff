//! The bytes of every token, for constrained decoding.

use super::{ByteTokenizer, Gpt2Tokenizer, Tokenizer};
use crate::error::{Error, Result};

impl Tokenizer {
    /// The bytes that every id adds to a text before it, `None` for markers and unused ids. Concatenated, they are the
    /// text that [`Tokenizer::decode`] gives.
    ///
    /// # Errors
    /// A tokenizer whose single tokens have no bytes: words between spaces, escapes, or a decoder that looks at
    /// neighbours.
    pub fn token_bytes(&self) -> Result<Vec<Option<Vec<u8>>>> {
        let has_none = |detail: &str| Error::Tokenize {
            tokenizer: self.identity().name,
            detail: detail.to_owned(),
        };
        match self {
            Self::Bytes(_) => {
                let byte = |id: u32| (id != ByteTokenizer::BOS).then(|| vec![id as u8]);
                Ok((0..ByteTokenizer::VOCAB_SIZE as u32).map(byte).collect())
            }
            Self::Gpt2(_) => {
                let mut all: Vec<_> = Gpt2Tokenizer.tokens().iter().cloned().map(Some).collect();
                all[Gpt2Tokenizer::END_OF_TEXT as usize] = None;
                Ok(all)
            }
            Self::JsonGpt2(_) => Err(has_none("its tokens are escaped text")),
            Self::Synthetic(_) => Err(has_none("its tokens are words")),
            #[cfg(feature = "hf-tokenizers")]
            Self::HuggingFace(t) => t.token_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The built-in tokenizer and the library's version of its saved file.
    fn both(name: &str) -> Vec<Tokenizer> {
        let tokenizer = Tokenizer::from_name(name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        tokenizer.save(folder.path()).unwrap();
        std::fs::remove_file(folder.path().join("fox_tokenizer.json")).unwrap();
        vec![tokenizer, Tokenizer::load(folder.path()).unwrap()]
    }

    #[test]
    fn token_bytes_concatenate_to_the_text() {
        let text = "{\"naïve\": [1, 2.5e3, \"😀\"]}\n";
        for tokenizer in ["bytes", "gpt2"].into_iter().flat_map(both) {
            let all = tokenizer.token_bytes().unwrap();
            assert_eq!(all.len(), tokenizer.vocab_size());
            assert_eq!(all[tokenizer.bos() as usize], None);
            let ids = tokenizer.encode(text).unwrap();
            let bytes: Vec<u8> =
                ids.iter().flat_map(|&id| all[id as usize].clone().unwrap()).collect();
            assert_eq!(bytes, text.as_bytes(), "{:?}", tokenizer.identity());
        }
        assert!(Tokenizer::from_name("json-gpt2").unwrap().token_bytes().is_err());
    }

    /// A tokenizer in the style of Llama 2: spaces as `▁`, bytes as `<0x0A>`.
    #[test]
    fn byte_fallback_tokens_are_single_bytes() {
        let file = r#"{"version": "1.0", "added_tokens": [
            {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
          "normalizer": null, "pre_tokenizer": null, "post_processor": null,
          "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
          "model": {"type": "BPE", "vocab": {"<s>": 0, "<0x0A>": 1, "▁fox": 2, "{": 3}, "merges": [],
            "byte_fallback": true, "unk_token": null}}"#;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), file).unwrap();
        let all = Tokenizer::load(folder.path()).unwrap().token_bytes().unwrap();
        let expected = [None, Some(b"\n".to_vec()), Some(b" fox".to_vec()), Some(b"{".to_vec())];
        assert_eq!(all, expected);
    }
}
