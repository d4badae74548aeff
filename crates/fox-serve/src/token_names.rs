//! Texts of single tokens, computed once per id.

use std::sync::OnceLock;

use fox_data::Tokenizer;

/// The text of one token as clients see it.
#[derive(Debug)]
pub(crate) struct TokenName {
    text: Box<str>,
    /// Whether the token has a text that stands alone. Otherwise (part of a character, a marker) it is named by its id.
    is_text: bool,
}

impl TokenName {
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The token's bytes, where it has a text that stands alone.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.is_text.then_some(self.text.as_bytes())
    }
}

/// Names of all ids of a model.
pub(crate) struct TokenNames {
    tokenizer: Tokenizer,
    names: Box<[OnceLock<TokenName>]>,
    /// For ids outside the model's vocabulary.
    unknown: TokenName,
}

impl TokenNames {
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> TokenNames {
        TokenNames {
            tokenizer: tokenizer.clone(),
            names: (0..vocab_size).map(|_| OnceLock::new()).collect(),
            unknown: TokenName { text: "token_id:unknown".into(), is_text: false },
        }
    }

    pub fn get(&self, id: i32) -> &TokenName {
        let Some(name) = usize::try_from(id).ok().and_then(|id| self.names.get(id)) else {
            return &self.unknown;
        };
        name.get_or_init(|| match self.tokenizer.decode(&[id as u32]) {
            Ok(text) if !text.is_empty() && !text.contains('\u{fffd}') => {
                TokenName { text: text.into(), is_text: true }
            }
            _ => TokenName { text: format!("token_id:{id}").into(), is_text: false },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_without_text_are_named_by_number() {
        let names = TokenNames::new(&Tokenizer::from_name("bytes").unwrap(), 300);
        assert_eq!((names.get(97).as_str(), names.get(97).bytes()), ("a", Some(&b"a"[..])));
        for id in [0xc3, 255, 299] {
            assert_eq!(names.get(id).as_str(), format!("token_id:{id}"));
            assert!(names.get(id).bytes().is_none());
        }
        assert_eq!(names.get(-1).as_str(), names.get(300).as_str());
    }
}
