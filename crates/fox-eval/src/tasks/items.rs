//! What is asked about one row.

use fox_data::Record;

use super::spec::{Ask, MultipleChoice, TaskSpec, Templates};
use super::template::{NoValue, Template};
use crate::{Error, Result};

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// Contexts and continuations to choose from, and the number of the right one. `choices` are the texts
    /// that differ, whose lengths normalise their likelihoods.
    Choice { pairs: Vec<(String, String)>, choices: Vec<String>, right: usize },
    /// A context and its continuation.
    Pair(String, String),
    /// A text, and the words and bytes it is counted as.
    Whole { text: String, words: usize, bytes: usize },
    /// A prompt, the right answers and the names of the classes.
    Prompt { prompt: String, answers: Vec<String>, classes: Vec<String> },
}

/// The question about row `number` (from 1).
pub fn item(spec: &TaskSpec, row: &Record, number: usize) -> Result<Item> {
    let made = make(&spec.ask, row).map(|item| item.behind(&spec.examples));
    made.map_err(|why| match why {
        NoValue::Column(column) => Error::MissingColumn {
            task: spec.name.clone(),
            row: number,
            column,
            columns: row.keys().cloned().collect::<Vec<_>>().join(", "),
        },
        NoValue::Other(detail) => Error::Item { task: spec.name.clone(), row: number, detail },
    })
}

fn make(ask: &Ask, row: &Record) -> std::result::Result<Item, NoValue> {
    Ok(match ask {
        Ask::MultipleChoice(ask) => choice(ask, row)?,
        Ask::Loglikelihood(ask) => Item::Pair(ask.context.text(row)?, ask.continuation.text(row)?),
        Ask::Rolling(ask) => {
            let counted = ask.counted.as_ref().unwrap_or(&ask.text).text(row)?;
            let (words, bytes) = (word_count(&counted), counted.len());
            Item::Whole { text: ask.text.text(row)?, words, bytes }
        }
        Ask::Generate(ask) => {
            let list = |template: Option<&Template>| template.map_or(Ok(vec![]), |t| t.list(row));
            let answers = ask.answers.list(row)?;
            if answers.is_empty() {
                return Err(NoValue::Other("there is no right answer".into()));
            }
            let classes = list(ask.classes.as_ref())?;
            Item::Prompt { prompt: ask.context.text(row)?, answers, classes }
        }
    })
}

fn choice(ask: &MultipleChoice, row: &Record) -> std::result::Result<Item, NoValue> {
    let contexts = texts(&ask.context, row)?;
    let continuations = texts(&ask.continuation, row)?;
    let count = contexts.len().max(continuations.len());
    let uneven = |n: usize| n != 1 && n != count;
    if count < 2 || uneven(contexts.len()) || uneven(continuations.len()) {
        return Err(NoValue::Other(format!(
            "there are {} contexts and {} continuations; one side needs two or more, the other as many or one",
            contexts.len(),
            continuations.len()
        )));
    }
    let pick = |texts: &[String], i: usize| texts[if texts.len() == 1 { 0 } else { i }].clone();
    let pair = |i| (pick(&contexts, i), format!("{}{}", ask.delimiter, pick(&continuations, i)));
    let right = right(ask, row, count)?;
    let pairs = (0..count).map(pair).collect();
    let choices = if continuations.len() == count { continuations } else { contexts };
    Ok(Item::Choice { pairs, choices, right })
}

/// The number of the right choice: by its label where there are labels.
fn right(ask: &MultipleChoice, row: &Record, count: usize) -> std::result::Result<usize, NoValue> {
    let answer = ask.answer.text(row)?;
    let found = match &ask.labels {
        Some(labels) => texts(labels, row)?.iter().position(|label| *label == answer),
        None => answer.trim().parse().ok(),
    };
    found.filter(|right| *right < count).ok_or_else(|| {
        NoValue::Other(format!("the answer {answer:?} is none of the {count} choices"))
    })
}

fn texts(templates: &Templates, row: &Record) -> std::result::Result<Vec<String>, NoValue> {
    match templates {
        Templates::One(template) => template.list(row),
        Templates::Many(list) => list.iter().map(|template| template.text(row)).collect(),
    }
}

/// Substrings between runs of white space, as lm-evaluation-harness counts words: an empty one at either end
/// counts too.
fn word_count(text: &str) -> usize {
    let mut in_space = false;
    let mut runs = 0;
    for c in text.chars() {
        runs += usize::from(c.is_whitespace() && !in_space);
        in_space = c.is_whitespace();
    }
    runs + 1
}

#[cfg(test)]
mod tests {
    use super::super::builtin::find;
    use super::*;
    use serde_json::{Value, json};

    fn item_of(task: &str, row: Value) -> Item {
        item(&find(task, None).unwrap(), row.as_object().unwrap(), 1).unwrap()
    }

    fn choice_of(task: &str, row: Value) -> (Vec<(String, String)>, usize) {
        match item_of(task, row) {
            Item::Choice { pairs, right, .. } => (pairs, right),
            other => panic!("{other:?}"),
        }
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
    }

    /// The requests that lm-evaluation-harness 0.4 makes of these rows, written out by hand.
    #[test]
    fn built_in_tasks_ask_what_the_harness_asks() {
        let q = "Question: Melt butter\nAnswer:";
        assert_eq!(
            choice_of(
                "piqa",
                json!({"goal": "Melt butter", "sol1": "heat", "sol2": "cool", "label": 0})
            ),
            (pairs(&[(q, " heat"), (q, " cool")]), 0)
        );
        let choices = json!({"text": ["sun", "moon"], "label": ["A", "B"]});
        let q = "Question: What shines?\nAnswer:";
        let row = json!({"question": "What shines?", "choices": choices, "answerKey": "B"});
        assert_eq!(choice_of("arc_easy", row.clone()), (pairs(&[(q, " sun"), (q, " moon")]), 1));
        assert_eq!(choice_of("arc_challenge", row).1, 1);
        let row = json!({"question_stem": "It shines", "choices": choices, "answerKey": " A"});
        assert_eq!(
            choice_of("openbookqa", row),
            (pairs(&[("It shines", " sun"), ("It shines", " moon")]), 0)
        );
        let row = json!({"support": " Text.", "question": "Q", "distractor1": "a", "distractor2": "b",
                         "distractor3": "c", "correct_answer": "d"});
        let q = "Text.\nQuestion: Q\nAnswer:";
        assert_eq!(
            choice_of("sciq", row),
            (pairs(&[(q, " a"), (q, " b"), (q, " c"), (q, " d")]), 3)
        );
        let row = json!({"passage": "P.", "question": "is it", "label": true});
        let q = "P.\nQuestion: is it?\nAnswer:";
        assert_eq!(choice_of("boolq", row), (pairs(&[(q, " no"), (q, " yes")]), 1));
        let row = json!({"premise": "The man ran. ", "choice1": "He was late.", "choice2": "I ate.",
                         "question": "cause", "label": 0});
        let q = "The man ran because";
        assert_eq!(choice_of("copa", row), (pairs(&[(q, "  he was late."), (q, "  i ate.")]), 0));
        let row = json!({"activity_label": "Running", "ctx_a": "A man runs.", "ctx_b": "then HE",
                         "endings": ["stops [step] here", "flies"], "label": "1"});
        let q = "Running: A man runs. Then he";
        assert_eq!(choice_of("hellaswag", row), (pairs(&[(q, " stops here"), (q, " flies")]), 1));
        let row = json!({"sentence": "Ann thanked Bea because _ had helped.", "option1": "Ann",
                         "option2": "Bea", "answer": "2"});
        assert_eq!(
            choice_of("winogrande", row),
            (
                pairs(&[
                    ("Ann thanked Bea because Ann", " had helped."),
                    ("Ann thanked Bea because Bea", " had helped.")
                ]),
                1
            )
        );
    }

    #[test]
    fn likelihoods_and_whole_texts() {
        let row = json!({"text": "he said to no one"});
        assert_eq!(
            item_of("lambada_openai", row),
            Item::Pair("he said to no".into(), " one".into())
        );
        let row = json!({"page": " a @-@ b , c \n"});
        assert_eq!(
            item_of("wikitext", row),
            Item::Whole { text: " a-b, c\n".into(), words: 7, bytes: 14 }
        );
        assert_eq!((word_count(""), word_count("a b"), word_count(" a  b ")), (1, 2, 4));
        // Bytes of UTF-8, not characters: 5 letters of 2 bytes, a space, 2 emoji of 4 bytes.
        assert_eq!(
            item_of(
                "wikitext",
                json!({"page": "\u{3b1}\u{3b2}\u{3b3}\u{3b4}\u{3b5} \u{1f98a}\u{1f98a}"})
            ),
            Item::Whole { text: "αβγδε 🦊🦊".into(), words: 2, bytes: 19 }
        );
        // A last word of several bytes per letter, with the space before it and nothing behind it.
        let row = json!({"text": "είπε η αλεπού"});
        assert_eq!(item_of("lambada_openai", row), Item::Pair("είπε η".into(), " αλεπού".into()));
    }

    #[test]
    fn invalid_rows_are_reported() {
        let said = |task: &str, row: Value| {
            let row = row.as_object().unwrap().clone();
            item(&find(task, None).unwrap(), &row, 7).unwrap_err().to_string()
        };
        assert_eq!(
            said("piqa", json!({"goal": "g", "sol1": "a", "label": 1})),
            "row 7 of task piqa has no column \"sol2\" (it has goal, sol1, label); rename the data's column, \
             or write a task file with their names"
        );
        let row = json!({"goal": "g", "sol1": "a", "sol2": "b", "label": 2});
        assert!(said("piqa", row).contains("the answer \"2\" is none of the 2 choices"));
        let row = json!({"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"});
        assert!(said("winogrande", row).contains("has no \"_\""));
    }
}
