//! RULER's thirteen task families and PhoneBook.
//!
//! RULER (Hsieh et al., 2024, arXiv 2404.06654) asks for facts, chains of variables and word counts in contexts of any
//! length. The [`Generator`] makes samples of the same families in its own wording from a seed and a text; samples that
//! RULER itself wrote are read by [`read_file`]. Answers are scored by RULER's string match on the greedy output. Small
//! models rarely write a full answer, so generated samples also have wrong candidates of the same form: the fraction of
//! right answers among the most likely candidates lies between chance and 100%.
//!
//! PhoneBook (Jelassi et al., 2024, arXiv 2402.01032) asks for one entry of a list of names and numbers.

mod draft;
mod facts;
mod file;
mod frequency;
mod needles;
mod report;
mod run;
mod tracking;

pub use draft::{Generator, Sample};
pub use file::{FileSamples, read_file};
pub use report::{Cell, ModelCells, RulerReport};
pub use run::{SampleScore, Samples, run_ruler};

use serde::{Deserialize, Serialize};

/// How greedy output is compared with the right answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Matching {
    /// The fraction of the answers that the output contains.
    All,
    /// Whether the output contains one of the answers.
    Part,
}

impl Matching {
    /// RULER's score of an output, 0 to 1: control characters count as line breaks, case does not count.
    pub fn score(self, output: &str, answers: &[String]) -> f64 {
        let output: String =
            output.trim().chars().map(|c| if c < ' ' { '\n' } else { c }).collect();
        let output = output.trim().to_lowercase();
        let found = answers.iter().filter(|a| output.contains(&a.to_lowercase())).count();
        match self {
            Matching::All => found as f64 / answers.len().max(1) as f64,
            Matching::Part => f64::from(u8::from(found > 0)),
        }
    }
}

/// A task family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RulerTask {
    /// One number in repeated sentences.
    NiahSingle1,
    /// One number in a text.
    NiahSingle2,
    /// One UUID in a text.
    NiahSingle3,
    /// One number in a text with three others.
    NiahMultikey1,
    /// One number in a list of facts of the same form.
    NiahMultikey2,
    /// One UUID by a UUID, in a list of such facts.
    NiahMultikey3,
    /// Four numbers of one key in a text.
    NiahMultivalue,
    /// The numbers of four keys in a text.
    NiahMultiquery,
    /// The variables of a chain of assignments.
    VariableTracking,
    /// The ten most frequent words of a list.
    CommonWords,
    /// The three most frequent words of a Zipf distribution.
    FrequentWords,
    /// A fact about a person in a text.
    Qa1,
    /// A fact about the friend of a person, in two places of a text.
    Qa2,
    /// A number by a name in a phone book; not one of RULER's.
    Phonebook,
}

impl RulerTask {
    /// RULER's thirteen, then PhoneBook.
    pub const ALL: [RulerTask; 14] = [
        RulerTask::NiahSingle1,
        RulerTask::NiahSingle2,
        RulerTask::NiahSingle3,
        RulerTask::NiahMultikey1,
        RulerTask::NiahMultikey2,
        RulerTask::NiahMultikey3,
        RulerTask::NiahMultivalue,
        RulerTask::NiahMultiquery,
        RulerTask::VariableTracking,
        RulerTask::CommonWords,
        RulerTask::FrequentWords,
        RulerTask::Qa1,
        RulerTask::Qa2,
        RulerTask::Phonebook,
    ];

    /// RULER's name, as in its file names.
    pub fn name(self) -> &'static str {
        match self {
            RulerTask::NiahSingle1 => "niah_single_1",
            RulerTask::NiahSingle2 => "niah_single_2",
            RulerTask::NiahSingle3 => "niah_single_3",
            RulerTask::NiahMultikey1 => "niah_multikey_1",
            RulerTask::NiahMultikey2 => "niah_multikey_2",
            RulerTask::NiahMultikey3 => "niah_multikey_3",
            RulerTask::NiahMultivalue => "niah_multivalue",
            RulerTask::NiahMultiquery => "niah_multiquery",
            RulerTask::VariableTracking => "vt",
            RulerTask::CommonWords => "cwe",
            RulerTask::FrequentWords => "fwe",
            RulerTask::Qa1 => "qa_1",
            RulerTask::Qa2 => "qa_2",
            RulerTask::Phonebook => "phonebook",
        }
    }

    /// The task of a name.
    pub fn find(name: &str) -> Option<RulerTask> {
        RulerTask::ALL.into_iter().find(|task| task.name() == name)
    }

    /// How its answers are compared.
    pub fn matching(self) -> Matching {
        match self {
            RulerTask::Qa1 | RulerTask::Qa2 => Matching::Part,
            _ => Matching::All,
        }
    }

    /// Tokens of an answer in RULER's settings.
    pub(crate) fn ruler_tokens(self) -> usize {
        match self {
            RulerTask::VariableTracking => 30,
            RulerTask::CommonWords => 120,
            RulerTask::FrequentWords => 50,
            RulerTask::Qa1 | RulerTask::Qa2 => 32,
            _ => 128,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matching_follows_the_published_rule() {
        let answers = ["Dover".to_string(), "calais".to_string()];
        let score = |matching: Matching, output: &str| matching.score(output, &answers);
        assert_eq!(score(Matching::All, " to DOVER.\u{1}"), 0.5);
        assert_eq!(score(Matching::All, "Calais and dover"), 1.0);
        assert_eq!(score(Matching::Part, "Calais"), 1.0);
        assert_eq!(score(Matching::Part, "Cal\u{2}ais"), 0.0);
        assert_eq!(score(Matching::All, ""), 0.0);
    }

    #[test]
    fn tasks_have_distinct_names() {
        for task in RulerTask::ALL {
            assert_eq!(RulerTask::find(task.name()), Some(task));
        }
        assert_eq!(RulerTask::find("niah"), None);
    }
}
