//! Filters of templates beyond Jinja's: small changes to a text, among them the cleaning rules of data sets.
//!
//! | filter | result |
//! |---|---|
//! | `lower_first` | the first letter small |
//! | `drop_last` | without the last character |
//! | `before(x)`, `after(x)` | the text before or behind the first `x`, which must occur |
//! | `before_last(x)` | the text before the last `x`; nothing without one |
//! | `after_last(x)` | the text behind the last `x`; everything without one |
//! | `hellaswag` | the cleaning of HellaSwag's WikiHow part |
//! | `wikitext` | the tokenization of WikiText undone |

use minijinja::{Environment, Error, ErrorKind};

/// Adds all filters.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("lower_first", |text: String| lower_first(&text));
    environment.add_filter("drop_last", |text: String| drop_last(&text));
    environment.add_filter("before", |text: String, x: String| Ok::<_, Error>(cut(&text, &x)?.0));
    environment.add_filter("after", |text: String, x: String| Ok::<_, Error>(cut(&text, &x)?.1));
    environment.add_filter("before_last", |text: String, x: String| {
        text.rsplit_once(x.as_str()).map_or("", |p| p.0).to_string()
    });
    environment.add_filter("after_last", |text: String, x: String| {
        text.rsplit_once(x.as_str()).map_or(text.as_str(), |p| p.1).to_string()
    });
    environment.add_filter("hellaswag", |text: String| hellaswag(&text));
    environment.add_filter("wikitext", |text: String| wikitext(&text));
}

/// The text before and behind the first `x`.
fn cut(text: &str, x: &str) -> Result<(String, String), Error> {
    let parts = text.split_once(x).map(|(a, b)| (a.to_string(), b.to_string()));
    let missing =
        || Error::new(ErrorKind::InvalidOperation, format!("{text:?} has no {x:?} to cut at"));
    parts.ok_or_else(missing)
}

fn drop_last(text: &str) -> String {
    let mut characters = text.chars();
    characters.next_back();
    characters.as_str().to_string()
}

fn lower_first(text: &str) -> String {
    let mut characters = text.chars();
    let Some(first) = characters.next() else { return String::new() };
    first.to_lowercase().collect::<String>() + characters.as_str()
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

    #[test]
    fn small_changes() {
        let mut environment = Environment::new();
        add(&mut environment);
        let apply = |filter: &str, text: &str| {
            let source = format!("{{{{ text|{filter} }}}}");
            environment.render_str(&source, minijinja::context! { text => text }).unwrap()
        };
        for (filter, text, result) in [
            ("lower_first", "The Man", "the Man"),
            ("lower_first", "", ""),
            ("drop_last", "Ends é", "Ends "),
            ("before('_')", "a _ b _", "a "),
            ("after('_')", "a _ b _", " b _"),
            ("before_last(' ')", "one two three", "one two"),
            ("after_last(' ')", "one two three", "three"),
            ("before_last(' ')", "one", ""),
            ("after_last(' ')", "one", "one"),
        ] {
            assert_eq!(apply(filter, text), result, "{filter} {text}");
        }
        assert!(cut("none", "_").unwrap_err().to_string().contains("has no \"_\" to cut at"));
    }

    #[test]
    fn hellaswag_loses_its_brackets() {
        assert_eq!(
            hellaswag(" How to run [header] Start [title] Tie your shoes. [step] Then [x\ny] go"),
            "How to run Start. Tie your shoes. Then [x\ny] go"
        );
    }

    #[test]
    fn wikitext_reads_like_text_again() {
        // As the harness prints it, the pair of apostrophes that are no quotes included.
        assert_eq!(
            wikitext(
                " = = Title = = \n The \" quoted \" dogs ' bowl ( 1 @,@ 000 @-@ fold ) , it 's . \n"
            ),
            " == Title ==\nThe \"quoted\" dogs'bowl (1,000-fold), it's.\n"
        );
    }
}
