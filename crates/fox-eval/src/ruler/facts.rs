//! Questions over a given text, and phone books.

use fox_base::random::SplitMix64;

use super::draft::{Draft, Filler, shuffled};
use crate::words::{FIRST_NAMES, LAST_NAMES, TOWNS, WORDS};

/// People of whom the text says something, for a question about one of them.
const PEOPLE: usize = 8;
/// Pairs of friends, for a question that needs two facts.
const PAIRS: usize = 4;
/// Names without a middle initial.
const NAMES: u64 = (FIRST_NAMES.len() * LAST_NAMES.len()) as u64;

/// Where does one of several people live?
pub(super) fn one_hop(random: &mut SplitMix64) -> Draft<'static> {
    let (people, towns, things) = cast(PEOPLE, random);
    let fact = |i: usize| {
        let (name, town, thing) = (&people[i], towns[i], things[i]);
        format!("\n{name} has a {thing}. {name} lives in {town}, not far from the market.\n")
    };
    let name = &people[0];
    Draft {
        intro: "Answer the question at the end from the following text.\n".into(),
        filler: Filler::Text,
        facts: shuffled(&(0..PEOPLE).map(fact).collect::<Vec<_>>(), random),
        question: format!("\nQuestion: Where does {name} live?\nAnswer: {name} lives in"),
        outputs: vec![towns[0].into()],
        wrong: towns[1..].iter().map(|town| town.to_string()).collect(),
    }
}

/// Where does the friend of a person live?
pub(super) fn two_hops(random: &mut SplitMix64) -> Draft<'static> {
    let (people, towns, _) = cast(2 * PAIRS, random);
    let mut facts = Vec::new();
    for i in 0..PAIRS {
        let (name, friend, town) = (&people[i], &people[PAIRS + i], towns[i]);
        facts.push(format!("\nThe best friend of {name} is {friend}.\n"));
        facts.push(format!("\n{friend} lives in {town}, not far from the market.\n"));
    }
    let name = &people[0];
    Draft {
        intro: "Answer the question at the end from the following text.\n".into(),
        filler: Filler::Text,
        facts: shuffled(&facts, random),
        question: format!(
            "\nQuestion: Where does the best friend of {name} live?\n\
             Answer: The best friend of {name} lives in"
        ),
        outputs: vec![towns[0].into()],
        wrong: towns[1..].iter().map(|town| town.to_string()).collect(),
    }
}

/// Distinct names, all towns and all things, in random order.
fn cast(
    people: usize,
    random: &mut SplitMix64,
) -> (Vec<String>, Vec<&'static str>, Vec<&'static str>) {
    let first = random.below(NAMES);
    let people = (0..people as u64).map(|i| name(first + i)).collect();
    (people, shuffled(&TOWNS, random), shuffled(&WORDS, random))
}

/// A phone book, two numbers of it looked up, and a third name.
pub(super) fn phonebook<'a>(random: &mut SplitMix64, units: &'a mut SplitMix64) -> Draft<'a> {
    let first = random.below(NAMES);
    let entries: Vec<(String, String)> =
        (0..3).map(|i| (name(first + i), number(random))).collect();
    let line = |(name, number): &(String, String)| format!("{name}: {number}\n");
    // The first numbers of the book are wrong answers.
    let mut preview = units.clone();
    let mut wrong: Vec<String> = entries[1..].iter().map(|(_, number)| number.clone()).collect();
    wrong.extend((0..64).map(|_| number(&mut preview)));
    let mut next = first + entries.len() as u64;
    let question = format!(
        "\nNumbers that were looked up in the phone book above:\n{}{}{}:",
        line(&entries[1]),
        line(&entries[2]),
        entries[0].0
    );
    Draft {
        intro: "Phone book:\n".into(),
        filler: Filler::Units(Box::new(move || {
            next += 1;
            format!("{}: {}\n", name(next), number(units))
        })),
        facts: shuffled(&entries.iter().map(line).collect::<Vec<_>>(), random),
        question,
        outputs: vec![entries[0].1.clone()],
        wrong,
    }
}

/// The name number `number`; from [`NAMES`] on with a middle initial.
fn name(number: u64) -> String {
    let (round, at) = (number / NAMES, (number % NAMES) as usize);
    // Neighbours differ in both names.
    let first = FIRST_NAMES[at % FIRST_NAMES.len()];
    let last = LAST_NAMES[(at * 7 + at / FIRST_NAMES.len()) % LAST_NAMES.len()];
    match round {
        0 => format!("{first} {last}"),
        round => {
            let initials: String =
                format!("{round}").bytes().map(|digit| char::from(b'A' + digit - b'0')).collect();
            format!("{first} {initials}. {last}")
        }
    }
}

fn number(random: &mut SplitMix64) -> String {
    format!("{:03}-{:04}", 100 + random.below(900), random.below(10_000))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::RulerTask;
    use super::super::draft::Generator;
    use super::*;
    use fox_data::Tokenizer;

    #[test]
    fn names_are_distinct() {
        let names: BTreeSet<String> = (0..3 * NAMES).map(name).collect();
        assert_eq!(names.len() as u64, 3 * NAMES);
    }

    #[test]
    fn phone_book_has_one_entry_per_name() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let generator = Generator::new("text", &tokenizer, 16, 4).unwrap();
        let sample = generator.sample(RulerTask::Phonebook, 4096, 1).unwrap();
        let prompt = tokenizer.decode(&sample.prompt).unwrap();
        let (book, question) = prompt.split_once("\n\n").unwrap();
        let entries: Vec<(&str, &str)> =
            book.lines().skip(1).map(|line| line.split_once(": ").unwrap()).collect();
        let names: BTreeSet<&str> = entries.iter().map(|(name, _)| *name).collect();
        assert!(entries.len() > 100 && names.len() == entries.len());
        let asked = question.lines().last().unwrap().trim_end_matches(':');
        let entry = entries.iter().find(|(name, _)| *name == asked).unwrap();
        assert_eq!(entry.1, sample.outputs[0]);
        assert!(sample.wrong.iter().all(|wrong| entries.iter().any(|(_, n)| n == wrong)));
    }

    #[test]
    fn two_hops_lead_to_one_town() {
        let mut random = SplitMix64::new(9);
        let draft = two_hops(&mut random);
        let asked = draft.question.split("best friend of ").nth(1).unwrap();
        let name = asked.strip_suffix(" live?\nAnswer: The ").unwrap();
        let stated = format!("\nThe best friend of {name} is ");
        let friend = draft.facts.iter().find_map(|f| f.strip_prefix(&stated)).unwrap();
        let friend = friend.trim_end().trim_end_matches('.');
        let town = format!("\n{friend} lives in {},", draft.outputs[0]);
        assert_eq!(draft.facts.iter().filter(|fact| fact.starts_with(&town)).count(), 1);
    }
}
