//! Named filters of templates: small changes to a text, among them the cleaning rules of data sets.

use serde::Deserialize;

/// One filter, written `name` or `name:argument` (the argument may stand in single quotes).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Filter {
    /// `strip`: without white space at both ends.
    Strip,
    /// `lstrip`: without white space at the start.
    StripLeft,
    /// `capitalize`: the first letter large, all others small.
    Capitalize,
    /// `lower_first`: the first letter small.
    LowerFirst,
    /// `drop_last`: without the last character.
    DropLast,
    /// `before:x`: what stands before the first `x`.
    Before(String),
    /// `after:x`: what stands behind the first `x`.
    After(String),
    /// `before_last:x`: what stands before the last `x`; nothing without one.
    BeforeLast(String),
    /// `after_last:x`: what stands behind the last `x`; everything without one.
    AfterLast(String),
    /// `map:a=b,c=d`: `b` for `a` and `d` for `c`.
    Map(Vec<(String, String)>),
    /// `hellaswag`: the cleaning of HellaSwag's WikiHow part.
    HellaSwag,
    /// `wikitext`: undoes the tokenization of WikiText.
    WikiText,
}

const NAMES: &str = "strip, lstrip, capitalize, lower_first, drop_last, before:x, after:x, before_last:x, \
                     after_last:x, map:a=b,c=d, hellaswag, wikitext";

impl TryFrom<String> for Filter {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Filter::parse(&text)
    }
}

impl Filter {
    /// Reads `name` or `name:argument`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, argument) = match text.split_once(':') {
            Some((name, argument)) => (name.trim(), Some(unquoted(argument))),
            None => (text.trim(), None),
        };
        let pairs = |list: &str| {
            let pair = |p: &str| p.split_once('=').map(|(a, b)| (a.to_string(), b.to_string()));
            list.split(',').map(pair).collect::<Option<Vec<_>>>()
        };
        let filter = match (name, argument) {
            ("strip", None) => Some(Filter::Strip),
            ("lstrip", None) => Some(Filter::StripLeft),
            ("capitalize", None) => Some(Filter::Capitalize),
            ("lower_first", None) => Some(Filter::LowerFirst),
            ("drop_last", None) => Some(Filter::DropLast),
            ("before", Some(x)) => Some(Filter::Before(x.into())),
            ("after", Some(x)) => Some(Filter::After(x.into())),
            ("before_last", Some(x)) => Some(Filter::BeforeLast(x.into())),
            ("after_last", Some(x)) => Some(Filter::AfterLast(x.into())),
            ("map", Some(list)) => pairs(list).map(Filter::Map),
            ("hellaswag", None) => Some(Filter::HellaSwag),
            ("wikitext", None) => Some(Filter::WikiText),
            _ => None,
        };
        filter.ok_or_else(|| format!("no filter {text:?}; there are {NAMES}"))
    }

    /// The filtered text, or why there is none.
    pub fn apply(&self, text: &str) -> Result<String, String> {
        let cut = |at: Option<(&str, &str)>, x: &str| {
            at.map(|(a, b)| (a.to_string(), b.to_string()))
                .ok_or_else(|| format!("has no {x:?} to cut at"))
        };
        Ok(match self {
            Filter::Strip => text.trim().to_string(),
            Filter::StripLeft => text.trim_start().to_string(),
            Filter::Capitalize => with_first(text, |first| first.to_uppercase().collect(), true),
            Filter::LowerFirst => with_first(text, |first| first.to_lowercase().collect(), false),
            Filter::DropLast => {
                let mut characters = text.chars();
                characters.next_back();
                characters.as_str().to_string()
            }
            Filter::Before(x) => cut(text.split_once(x.as_str()), x)?.0,
            Filter::After(x) => cut(text.split_once(x.as_str()), x)?.1,
            Filter::BeforeLast(x) => text.rsplit_once(x.as_str()).map_or("", |p| p.0).to_string(),
            Filter::AfterLast(x) => text.rsplit_once(x.as_str()).map_or(text, |p| p.1).to_string(),
            Filter::Map(pairs) => pairs
                .iter()
                .find(|(from, _)| from == text)
                .map(|(_, to)| to.clone())
                .ok_or_else(|| format!("is {text:?}, which is not in the map"))?,
            Filter::HellaSwag => hellaswag(text),
            Filter::WikiText => wikitext(text),
        })
    }
}

fn unquoted(argument: &str) -> &str {
    argument.strip_prefix('\'').and_then(|a| a.strip_suffix('\'')).unwrap_or(argument)
}

fn with_first(text: &str, change: impl Fn(char) -> String, lower_rest: bool) -> String {
    let mut characters = text.chars();
    let Some(first) = characters.next() else { return String::new() };
    let rest = characters.as_str();
    change(first) + &if lower_rest { rest.to_lowercase() } else { rest.to_string() }
}

/// As lm-evaluation-harness cleans HellaSwag (`tasks/hellaswag/utils.py`): ` [title]` ends a sentence, other
/// notes in brackets go, and so does the space they leave.
fn hellaswag(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    without_bracketed(&text).replace("  ", " ")
}

/// Removes `[...]`; a bracket that is not closed on its line stays.
fn without_bracketed(text: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(open) = rest.find('[') {
        kept.push_str(&rest[..open]);
        rest = &rest[open..];
        match rest.find([']', '\n']) {
            Some(end) if rest[end..].starts_with(']') => rest = &rest[end + 1..],
            _ => {
                kept.push('[');
                rest = &rest[1..];
            }
        }
    }
    kept + rest
}

/// As lm-evaluation-harness undoes WikiText's tokenization (`tasks/wikitext/preprocess_wikitext.py`), rule by
/// rule. One rule there asks for literal slashes around an apostrophe and never applies; it is left out.
fn wikitext(text: &str) -> String {
    const BEFORE: [(&str, &str); 10] = [
        ("s '", "s'"),
        (" @-@ ", "-"),
        (" @,@ ", ","),
        (" @.@ ", "."),
        (" : ", ": "),
        (" ; ", "; "),
        (" . ", ". "),
        (" ! ", "! "),
        (" ? ", "? "),
        (" , ", ", "),
    ];
    const AFTER: [(&str, &str); 8] = [
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" \u{b0} ", "\u{b0}"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ];
    let mut text = text.to_string();
    for (from, to) in BEFORE {
        text = text.replace(from, to);
    }
    for (open, close) in [('(', ')'), ('[', ']'), ('{', '}'), ('"', '"'), ('\'', '\'')] {
        text = trimmed_inside(&text, open, close);
    }
    for (from, to) in AFTER {
        text = text.replace(from, to);
    }
    text
}

/// Removes the white space right inside a pair of marks.
fn trimmed_inside(text: &str, open: char, close: char) -> String {
    let (mut done, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(open) {
        let inside = &rest[at + open.len_utf8()..];
        let Some(end) = inside.find(close) else { break };
        done.push_str(&rest[..at]);
        done.push(open);
        done.push_str(inside[..end].trim());
        done.push(close);
        rest = &inside[end + close.len_utf8()..];
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(filter: &str, text: &str) -> String {
        Filter::parse(filter).unwrap().apply(text).unwrap()
    }

    #[test]
    fn small_changes() {
        assert_eq!(apply("strip", " a b\n"), "a b");
        assert_eq!(apply("lstrip", " a b\n"), "a b\n");
        assert_eq!(apply("capitalize", "the Man RUNS"), "The man runs");
        assert_eq!(apply("capitalize", ""), "");
        assert_eq!(apply("lower_first", "The Man"), "the Man");
        assert_eq!(apply("drop_last", "Ends é"), "Ends ");
        assert_eq!(apply("before:_", "a _ b _"), "a ");
        assert_eq!(apply("after:_", "a _ b _"), " b _");
        assert_eq!(apply("before_last:' '", "one two three"), "one two");
        assert_eq!(apply("after_last:' '", "one two three"), "three");
        assert_eq!(
            (apply("before_last:' '", "one"), apply("after_last:' '", "one")),
            (String::new(), "one".into())
        );
        assert_eq!(apply("map:cause=because,effect=therefore", "effect"), "therefore");
    }

    #[test]
    fn hellaswag_loses_its_brackets() {
        assert_eq!(
            apply(
                "hellaswag",
                " How to run [header] Start [title] Tie your shoes. [step] Then [x\ny] go"
            ),
            "How to run Start. Tie your shoes. Then [x\ny] go"
        );
    }

    #[test]
    fn wikitext_reads_like_text_again() {
        // As the harness prints it, the pair of apostrophes that are no quotes included.
        assert_eq!(
            apply(
                "wikitext",
                " = = Title = = \n The \" quoted \" dogs ' bowl ( 1 @,@ 000 @-@ fold ) , it 's . \n"
            ),
            " == Title ==\nThe \"quoted\" dogs'bowl (1,000-fold), it's.\n"
        );
    }

    #[test]
    fn rejects_unknown_filters_and_values() {
        assert!(Filter::parse("upper").unwrap_err().contains("there are strip"));
        assert!(Filter::parse("before").is_err() && Filter::parse("map:x").is_err());
        assert!(Filter::parse("before:_").unwrap().apply("none").unwrap_err().contains("\"_\""));
        assert!(Filter::parse("map:a=b").unwrap().apply("c").is_err());
    }
}
