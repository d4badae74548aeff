//! Needles: values by keys, one or several of each, in repeated sentences, a text, or facts of the same form.

use fox_base::random::SplitMix64;

use super::RulerTask;
use super::draft::{Draft, Filler};
use crate::words::{ADJECTIVES, WORDS};

/// Sentences that repeat around a needle.
pub(super) const NOISE: [&str; 5] = [
    " The lamp is lit.",
    " The bread is warm.",
    " The road is long.",
    " We walk on.",
    " The day is done.",
];

/// Facts beside the one that is asked for, where a task has several.
const OTHERS: usize = 3;
/// Wrong answers, at most.
const WRONG: usize = 64;

/// What values and keys look like.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Words,
    Number,
    Uuid,
}

/// A draft of one of the eight needle tasks; `units` draws the facts that fill a list.
pub(super) fn draft<'a>(
    task: RulerTask,
    random: &mut SplitMix64,
    units: &'a mut SplitMix64,
) -> Draft<'a> {
    use RulerTask::{NiahMultikey1, NiahMultikey2, NiahMultikey3, NiahMultiquery, NiahMultivalue};
    let (key_form, value_form) = match task {
        RulerTask::NiahSingle3 => (Form::Words, Form::Uuid),
        NiahMultikey3 => (Form::Uuid, Form::Uuid),
        _ => (Form::Words, Form::Number),
    };
    // Keys of one sample are consecutive, so they differ.
    let first_key = random.below(KEYS);
    let key = {
        let keys = SplitMix64::new(random.bits());
        move |number: u64| match key_form {
            Form::Words => words_key(first_key + number),
            _ => value(key_form, &mut keys.after(4 * number)),
        }
    };
    let (keys, values) = match task {
        NiahMultikey1 => (1 + OTHERS as u64, 1),
        NiahMultiquery => (4, 1),
        NiahMultivalue => (1, 4),
        _ => (1, 1),
    };
    let kind = if value_form == Form::Uuid { "code" } else { "number" };
    let mut facts: Vec<(u64, String)> = (0..keys)
        .flat_map(|key| std::iter::repeat_n(key, values))
        .map(|key| (key, value(value_form, random)))
        .collect();
    let asked = if task == NiahMultiquery { keys } else { 1 };
    let outputs: Vec<String> =
        facts.iter().filter(|(key, _)| *key < asked).map(|(_, value)| value.clone()).collect();
    let names: Vec<String> = (0..asked).map(&key).collect();
    let question = question(kind, &names, outputs.len());
    let others = facts.iter().filter(|(key, _)| *key >= asked).map(|(_, value)| value.clone());
    let mut wrong: Vec<String> = others.collect();
    // The asked facts come first so far; the order in the text is another one.
    facts = super::draft::shuffled(&facts, random);
    let facts = facts.iter().map(|(number, value)| fact(kind, &key(*number), value)).collect();
    let filler = match task {
        RulerTask::NiahSingle1 => {
            let mut sentences = NOISE.into_iter().cycle();
            Filler::Units(Box::new(move || sentences.next().unwrap_or_default().to_string()))
        }
        NiahMultikey2 | NiahMultikey3 => {
            // The first values of the list are wrong answers.
            let mut preview = units.clone();
            wrong.extend((0..WRONG).map(|_| value(value_form, &mut preview)));
            let mut number = keys;
            Filler::Units(Box::new(move || {
                number += 1;
                fact(kind, &key(number), &value(value_form, units))
            }))
        }
        _ => Filler::Text,
    };
    wrong.extend((0..WRONG).map(|_| value(value_form, random)));
    let intro = format!("Some secret {kind}s are noted in the following text. Remember them.\n");
    Draft { intro, filler, facts, question, outputs, wrong }
}

fn fact(kind: &str, key: &str, value: &str) -> String {
    format!("\nThe secret {kind} of the {key} is {value}.\n")
}

fn question(kind: &str, keys: &[String], values: usize) -> String {
    let keys: Vec<String> = keys.iter().map(|key| format!("the {key}")).collect();
    let keys = match keys.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    };
    match values {
        1 => format!(
            "\nWhat is the secret {kind} of {keys}? It was noted above.\nThe secret {kind} of {keys} is"
        ),
        _ => format!(
            "\nWhat are all secret {kind}s of {keys}? They were noted above.\nThe secret {kind}s of {keys} are"
        ),
    }
}

/// Keys of two words.
const KEYS: u64 = (ADJECTIVES.len() * WORDS.len()) as u64;

/// The key number `number`; numbers from [`KEYS`] on repeat with a count.
fn words_key(number: u64) -> String {
    let (round, at) = (number / KEYS, (number % KEYS) as usize);
    // Neighbours differ in both words.
    let (adjective, noun) =
        (ADJECTIVES[at % ADJECTIVES.len()], WORDS[(at * 5 + at / 32) % WORDS.len()]);
    match round {
        0 => format!("{adjective} {noun}"),
        round => format!("{adjective} {noun} {}", round + 1),
    }
}

fn value(form: Form, random: &mut SplitMix64) -> String {
    match form {
        Form::Uuid => {
            let (a, b) = (random.bits(), random.bits());
            let hex = format!("{a:016x}{b:016x}");
            [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
        }
        // Both forms take two draws.
        _ => {
            random.bits();
            (1_000_000 + random.below(9_000_000)).to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::draft::Generator;
    use super::*;
    use fox_data::Tokenizer;

    #[test]
    fn keys_of_a_round_are_distinct() {
        let keys: BTreeSet<String> = (0..KEYS + 5).map(words_key).collect();
        assert_eq!(keys.len() as u64, KEYS + 5);
    }

    #[test]
    fn facts_name_each_key_once() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let text = "The sun rose over the hills. ".repeat(200);
        let generator = Generator::new(&text, &tokenizer, 16, 1).unwrap();
        for (task, facts) in [
            (RulerTask::NiahSingle1, 1),
            (RulerTask::NiahSingle3, 1),
            (RulerTask::NiahMultikey1, 4),
            (RulerTask::NiahMultivalue, 4),
            (RulerTask::NiahMultiquery, 4),
        ] {
            let sample = generator.sample(task, 3000, 2).unwrap();
            let prompt = tokenizer.decode(&sample.prompt).unwrap();
            let stated =
                prompt.lines().filter(|l| l.starts_with("The secret ") && l.ends_with('.'));
            assert_eq!(stated.count(), facts, "{task:?}: {prompt}");
        }
        // In a list all keys differ, and wrong answers are values of the list.
        for task in [RulerTask::NiahMultikey2, RulerTask::NiahMultikey3] {
            let sample = generator.sample(task, 4000, 2).unwrap();
            let prompt = tokenizer.decode(&sample.prompt).unwrap();
            let keys: Vec<&str> = prompt
                .lines()
                .filter(|line| line.starts_with("The secret ") && line.ends_with('.'))
                .filter_map(|line| line.split(" is ").next())
                .collect();
            assert!(keys.len() > 20, "{prompt}");
            assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
            assert!(sample.wrong.iter().all(|wrong| prompt.contains(wrong.as_str())), "{task:?}");
        }
    }
}
