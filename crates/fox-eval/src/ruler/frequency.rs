//! Common and frequent words: which words of a list occur most often.

use fox_base::random::SplitMix64;

use super::draft::{Draft, Filler, shuffled};
use crate::words::WORDS;

/// Words that are asked for in the list of common words.
const COMMON: usize = 10;
/// How much more often a common word occurs than another one, where the list is long enough.
const RATIO: usize = 10;
/// Words of the Zipf distribution.
const VOCABULARY: usize = 50;
/// Words that are asked for of the Zipf distribution.
const FREQUENT: usize = 3;

/// A list in which ten words occur about ten times as often as the others.
pub(super) fn common<'a>(random: &mut SplitMix64, units: &'a mut SplitMix64) -> Draft<'a> {
    let words: Vec<String> = shuffled(&WORDS, random).into_iter().map(String::from).collect();
    let (outputs, wrong) = (words[..COMMON].to_vec(), words[COMMON..].to_vec());
    let list = move |count: usize| {
        let (common, rare) = words.split_at(COMMON);
        // `count = COMMON * RATIO * times + rare.len() * times`, with fewer rare words in a short list.
        let times = (count / (COMMON * RATIO + rare.len())).max(1);
        let often = (RATIO * times).min(count * 2 / 3 / COMMON).max(1);
        let others = count.saturating_sub(COMMON * often);
        let mut list: Vec<String> =
            common.iter().flat_map(|word| std::iter::repeat_n(word.clone(), often)).collect();
        let repeated = rare.iter().flat_map(|word| std::iter::repeat_n(word.clone(), times));
        list.extend(repeated.take(others));
        list.truncate(count);
        shuffled(&list, units)
    };
    Draft {
        intro: "In the following list some words occur much more often than the others.\nList:"
            .into(),
        filler: Filler::Words(Box::new(list)),
        facts: Vec::new(),
        question: format!(
            "\nWhich {COMMON} words occur most often in the list above?\nThe {COMMON} words that occur most often are"
        ),
        outputs,
        wrong,
    }
}

/// Invented words whose counts fall with the square of their rank.
pub(super) fn frequent<'a>(random: &mut SplitMix64, units: &'a mut SplitMix64) -> Draft<'a> {
    let mut words: Vec<String> = Vec::with_capacity(VOCABULARY);
    while words.len() < VOCABULARY {
        let word = invented(random);
        if !words.contains(&word) {
            words.push(word);
        }
    }
    let (outputs, wrong) = (words[..FREQUENT].to_vec(), words[FREQUENT..].to_vec());
    let list = move |count: usize| {
        let zeta: f64 = (1..=VOCABULARY).map(|rank| (rank as f64).powi(-2)).sum();
        let times = |rank: usize| (count as f64 * (rank as f64).powi(-2) / zeta).round() as usize;
        let mut list: Vec<String> = words
            .iter()
            .zip(1..)
            .flat_map(|(word, rank)| std::iter::repeat_n(word.clone(), times(rank).max(1)))
            .collect();
        list.truncate(count);
        shuffled(&list, units)
    };
    Draft {
        intro: "The following text consists of invented words.\nText:".into(),
        filler: Filler::Words(Box::new(list)),
        facts: Vec::new(),
        question: format!(
            "\nWhich {FREQUENT} invented words occur most often in the text above?\n\
             The {FREQUENT} words that occur most often are"
        ),
        outputs,
        wrong,
    }
}

/// Six letters, consonants and vowels in turn.
fn invented(random: &mut SplitMix64) -> String {
    const CONSONANTS: [char; 14] =
        ['b', 'd', 'f', 'g', 'k', 'l', 'm', 'n', 'p', 'r', 's', 't', 'v', 'z'];
    const VOWELS: [char; 5] = ['a', 'e', 'i', 'o', 'u'];
    (0..3).flat_map(|_| [random.pick(&CONSONANTS), random.pick(&VOWELS)]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::draft::Generator;
    use super::super::{RulerTask, Sample};
    use fox_data::Tokenizer;

    fn counts(sample: &Sample, tokenizer: &Tokenizer) -> HashMap<String, usize> {
        let prompt = tokenizer.decode(&sample.prompt).unwrap();
        let list = prompt.split(['\n', ':']).find(|part| part.starts_with(' ')).unwrap();
        let mut counts = HashMap::new();
        for word in list.split_whitespace() {
            *counts.entry(word.to_string()).or_default() += 1;
        }
        counts
    }

    #[test]
    fn right_words_occur_most_often() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let generator = Generator::new("text", &tokenizer, 16, 0).unwrap();
        for task in [RulerTask::CommonWords, RulerTask::FrequentWords] {
            for (length, index) in [(1024, 0), (1024, 1), (4096, 2), (16384, 3)] {
                let sample = generator.sample(task, length, index).unwrap();
                let counts = counts(&sample, &tokenizer);
                let of = |word: &String| counts.get(word).copied().unwrap_or(0);
                let least = sample.outputs.iter().map(of).min().unwrap();
                let others = counts.iter().filter(|(word, _)| !sample.outputs.contains(word));
                let most = others.map(|(_, count)| *count).max().unwrap_or(0);
                assert!(least > most, "{task:?} {length}: {least} {most}");
            }
        }
    }
}
