//! Splits long texts into chunks whose concatenated ids are the ids of the whole text.

use crate::tokenizer::SafeSplit;

/// Chunks of `text` of about `target` bytes, split only where `safe` allows.
pub(super) fn chunks(text: &str, safe: SafeSplit, target: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        match next_split(text, safe, target) {
            Some(at) => {
                let (chunk, tail) = text.split_at(at);
                rest = Some(tail);
                Some(chunk)
            }
            None => {
                rest = None;
                Some(text)
            }
        }
    })
}

/// The first safe split at or after `target` with text on both sides.
fn next_split(text: &str, safe: SafeSplit, target: usize) -> Option<usize> {
    let target = target.max(1);
    if text.len() <= target {
        return None;
    }
    match safe {
        SafeSplit::Nowhere => None,
        SafeSplit::AnyCharacter => (target..text.len()).find(|&at| text.is_char_boundary(at)),
        SafeSplit::BeforeSpace => {
            let start = (target..text.len()).find(|&at| text.is_char_boundary(at))?;
            let mut previous = text[..start].chars().next_back()?;
            for (at, c) in text[start..].char_indices() {
                if c == ' ' && !previous.is_whitespace() {
                    return Some(start + at);
                }
                previous = c;
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;
    use proptest::prelude::*;

    #[test]
    fn splits_before_spaces_after_words() {
        let cut = |text, target| chunks(text, SafeSplit::BeforeSpace, target).collect::<Vec<_>>();
        assert_eq!(cut("ab cd  ef\n gh", 1), ["ab", " cd", "  ef\n gh"]);
        assert_eq!(cut("nospaces", 2), ["nospaces"]);
        assert_eq!(cut("", 2), [""]);
        let any: Vec<_> = chunks("aéb", SafeSplit::AnyCharacter, 2).collect();
        assert_eq!(any, ["aé", "b"]);
        assert_eq!(chunks("a b c", SafeSplit::Nowhere, 1).count(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn ids_of_chunks_are_ids_of_the_text(
            text in "([a-z0-9'é—\\.\"]{0,4}[ \\t\\n\u{a0}]{0,3}|<\\|endoftext\\|>|'ll ){0,24}",
            target in 1_usize..20,
        ) {
            for name in ["bytes", "gpt2", "json-gpt2", "synthetic"] {
                let tokenizer = Tokenizer::from_name(name).unwrap();
                let mut ids = Vec::new();
                for chunk in chunks(&text, tokenizer.safe_split(), target) {
                    ids.extend(tokenizer.encode(chunk).unwrap());
                }
                prop_assert_eq!(ids, tokenizer.encode(&text).unwrap(), "{}", name);
            }
        }
    }
}
