//! JSON with the bare literals `Infinity`, `-Infinity` and `NaN`, which Python writes.

use std::borrow::Cow;

const LITERALS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Puts the bare literals in quotes, so that a strict parser takes them. Text inside strings stays
/// as it is.
pub(super) fn quote_literals(text: &str) -> Cow<'_, str> {
    if !LITERALS.iter().any(|literal| text.contains(literal)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let (mut rest, mut in_string) = (text, false);
    while let Some(c) = rest.chars().next() {
        if !in_string && let Some(literal) = LITERALS.iter().find(|l| rest.starts_with(**l)) {
            out.extend(["\"", literal, "\""]);
            rest = &rest[literal.len()..];
            continue;
        }
        let mut taken = c.len_utf8();
        if in_string && c == '\\' {
            // The escaped character is part of the string, even when it is a quote.
            taken += rest[taken..].chars().next().map_or(0, char::len_utf8);
        } else if c == '"' {
            in_string = !in_string;
        }
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_literals_outside_strings_only() {
        let text =
            r#"{"a": [0.0, Infinity], "b": -Infinity, "NaN": "say \"Infinity\" é", "c":NaN}"#;
        let want =
            r#"{"a": [0.0, "Infinity"], "b": "-Infinity", "NaN": "say \"Infinity\" é", "c":"NaN"}"#;
        assert_eq!(quote_literals(text), want);
    }

    #[test]
    fn leaves_plain_and_broken_text_alone() {
        for text in ["{}", "", "\"", "\"\\", "é\\"] {
            assert_eq!(quote_literals(text), text);
        }
    }
}
