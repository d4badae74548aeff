//! Examples in front of a question ("few-shot"), written as lm-evaluation-harness writes them: questions with their
//! right answers, an empty line between them, the same ones for every question (its sampler `first_n`).

use fox_base::Setting;
use fox_data::Record;

use super::items::{Item, item};
use super::spec::TaskSpec;
use crate::{Error, Result};

/// What stands behind an example.
const BETWEEN: &str = "\n\n";

impl TaskSpec {
    /// The task with `rows` as examples in front of every question; its name says how many.
    ///
    /// # Errors
    /// Rows without the columns of the task, and a task that judges whole texts, which has no answers.
    pub(crate) fn with_examples(mut self, rows: &[Record]) -> Result<TaskSpec> {
        let mut examples = String::new();
        for (i, row) in rows.iter().enumerate() {
            let Some(example) = answered(&item(&self, row, i + 1)?) else {
                return Err(Error::of_setting(
                    Setting::Shots,
                    format!(
                        "task {} judges whole texts and takes no examples; ask without them",
                        self.name
                    ),
                ));
            };
            examples += &example;
            examples += BETWEEN;
        }
        self.name = format!("{} {}-shot", self.name, rows.len());
        self.source += &examples;
        self.examples = examples;
        Ok(self)
    }
}

impl Item {
    /// The same question behind a text.
    pub(super) fn behind(self, text: &str) -> Item {
        let behind = |context: String| format!("{text}{context}");
        match self {
            Item::Choice { pairs, choices, right } => {
                let pairs = pairs.into_iter().map(|(context, end)| (behind(context), end));
                Item::Choice { pairs: pairs.collect(), choices, right }
            }
            Item::Pair(context, end) => Item::Pair(behind(context), end),
            Item::Prompt { prompt, answers, classes } => {
                Item::Prompt { prompt: behind(prompt), answers, classes }
            }
            whole @ Item::Whole { .. } => whole,
        }
    }
}

/// A question with its right answer; a whole text has no answer.
fn answered(item: &Item) -> Option<String> {
    match item {
        Item::Choice { pairs, right, .. } => {
            pairs.get(*right).map(|(context, answer)| format!("{context}{answer}"))
        }
        Item::Pair(context, answer) => Some(format!("{context}{answer}")),
        Item::Prompt { prompt, answers, .. } => {
            let space = if prompt.ends_with(char::is_whitespace) { "" } else { " " };
            answers.first().map(|answer| format!("{prompt}{space}{answer}"))
        }
        Item::Whole { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::builtin::find;
    use super::*;
    use serde_json::{Value, json};

    fn rows(list: &[Value]) -> Vec<Record> {
        list.iter().map(|row| row.as_object().unwrap().clone()).collect()
    }

    /// What lm-evaluation-harness 0.4 makes of two examples and a question, written out by hand.
    #[test]
    fn examples_stand_in_front_with_their_right_answers() {
        let row =
            |goal: &str, label: u8| json!({"goal": goal, "sol1": "a", "sol2": "b", "label": label});
        let (examples, asked) = (rows(&[row("One", 0), row("Two", 1)]), rows(&[row("Three", 0)]));
        let spec = find("piqa", None).unwrap();
        let source = spec.source.clone();
        let spec = spec.with_examples(&examples).unwrap();
        assert_eq!(spec.name, "piqa 2-shot");
        // Results on file belong to these examples.
        assert_ne!(spec.source, source);
        let context =
            "Question: One\nAnswer: a\n\nQuestion: Two\nAnswer: b\n\nQuestion: Three\nAnswer:";
        let Item::Choice { pairs, choices, right } = item(&spec, &asked[0], 1).unwrap() else {
            panic!("no choice");
        };
        assert_eq!(pairs, [(context.into(), " a".into()), (context.into(), " b".into())]);
        assert_eq!((choices, right), (vec!["a".to_string(), "b".into()], 0));
    }

    /// Where the contexts differ, that of the right choice is the example, and the lengths of choices stay.
    #[test]
    fn choices_of_contexts() {
        let row = |name: &str| json!({"sentence": format!("{name} saw _ run."), "option1": "Ann", "option2": "Bea", "answer": "2"});
        let spec = find("winogrande", None).unwrap().with_examples(&rows(&[row("Tom")])).unwrap();
        let Item::Choice { pairs, choices, .. } = item(&spec, &rows(&[row("Kim")])[0], 1).unwrap()
        else {
            panic!("no choice");
        };
        assert_eq!(pairs[0], ("Tom saw Bea run.\n\nKim saw Ann".into(), " run.".into()));
        assert_eq!(choices, ["Kim saw Ann", "Kim saw Bea"]);
    }

    #[test]
    fn pairs_and_prompts_and_no_whole_texts() {
        let row = rows(&[json!({"text": "he said so"})]);
        let spec = find("lambada_openai", None).unwrap().with_examples(&row).unwrap();
        assert_eq!(
            item(&spec, &row[0], 1).unwrap(),
            Item::Pair("he said so\n\nhe said".into(), " so".into())
        );
        let prompt =
            Item::Prompt { prompt: "2 + 2 =".into(), answers: vec!["4".into()], classes: vec![] };
        assert_eq!(answered(&prompt).as_deref(), Some("2 + 2 = 4"));
        let whole = find("wikitext", None).unwrap().with_examples(&rows(&[json!({"page": "a"})]));
        assert_eq!(
            whole.unwrap_err().to_string(),
            "task wikitext judges whole texts and takes no examples; ask without them"
        );
    }
}
