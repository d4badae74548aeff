//! Samples: texts of a task, fitted to a length in tokens.

use fox_base::random::{SplitMix64, mix};
use fox_data::Tokenizer;

use super::{RulerTask, facts, frequency, needles, tracking};
use crate::needle::{break_before, sentence_ends};
use crate::{Error, Result};

/// Tokens of a prompt, at most.
const LONGEST: usize = 1 << 24;

/// A prompt and its right answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Token ids, the start marker first.
    pub prompt: Vec<u32>,
    /// The right answers.
    pub outputs: Vec<String>,
    /// Wrong answers of the same form; empty without candidates.
    pub wrong: Vec<String>,
    /// Tokens to generate.
    pub max_tokens: usize,
}

/// What surrounds the facts of a sample.
pub(super) enum Filler<'a> {
    /// A passage of the haystack.
    Text,
    /// Sentences or lines, as many as fit.
    Units(Box<dyn FnMut() -> String + 'a>),
    /// A list of words, made for the number of words that fit.
    Words(Box<dyn FnOnce(usize) -> Vec<String> + 'a>),
}

/// The texts of a sample before they are fitted to a length.
pub(super) struct Draft<'a> {
    /// In front of everything.
    pub intro: String,
    /// What fills the length.
    pub filler: Filler<'a>,
    /// Facts at random positions of the filler, in this order.
    pub facts: Vec<String>,
    /// The end of the prompt: the question and the words before the answer.
    pub question: String,
    /// The right answers.
    pub outputs: Vec<String>,
    /// Wrong answers.
    pub wrong: Vec<String>,
}

/// Makes samples from a seed and a text.
pub struct Generator<'a> {
    tokenizer: &'a Tokenizer,
    haystack: Vec<u32>,
    breaks: Vec<u32>,
    candidates: usize,
    seed: u64,
    identity: String,
}

impl<'a> Generator<'a> {
    /// Samples in `text`, each with at least `candidates` right and wrong answers together.
    ///
    /// # Errors
    /// An empty text, and words that the tokenizer does not have.
    pub fn new(
        text: &str,
        tokenizer: &'a Tokenizer,
        candidates: usize,
        seed: u64,
    ) -> Result<Generator<'a>> {
        let haystack = tokenizer.encode(text)?;
        if haystack.is_empty() {
            return Err(Error::Empty { what: "the haystack".into() });
        }
        let hash = twox_hash::XxHash3_64::oneshot(bytemuck::cast_slice(&haystack));
        let identity = format!(
            "ruler-v1 seed {seed}, {candidates} candidates in {hash:016x} by {}",
            tokenizer.identity()
        );
        let breaks = sentence_ends(tokenizer)?;
        Ok(Generator { tokenizer, haystack, breaks, candidates, seed, identity })
    }

    /// Everything that decides the samples, in words.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The sample number `index` of a task: prompt and answer have at most `length` tokens together.
    ///
    /// # Errors
    /// A length that is too short for the task or longer than the text.
    pub fn sample(&self, task: RulerTask, length: usize, index: u64) -> Result<Sample> {
        let key = [task as u64, length as u64, index];
        let seed = key.iter().fold(mix(self.seed), |seed, part| mix(seed ^ mix(part + 1)));
        let mut random = SplitMix64::new(seed);
        let mut units = SplitMix64::new(random.bits());
        let draft = match task {
            RulerTask::VariableTracking => tracking::draft(&mut random),
            RulerTask::CommonWords => frequency::common(&mut random, &mut units),
            RulerTask::FrequentWords => frequency::frequent(&mut random, &mut units),
            RulerTask::Qa1 => facts::one_hop(&mut random),
            RulerTask::Qa2 => facts::two_hops(&mut random),
            RulerTask::Phonebook => facts::phonebook(&mut random, &mut units),
            niah => needles::draft(niah, &mut random, &mut units),
        };
        let mut order = SplitMix64::new(mix(seed ^ 1));
        self.fit(task, draft, length, &mut order)
    }

    fn fit(
        &self,
        task: RulerTask,
        mut draft: Draft<'_>,
        length: usize,
        random: &mut SplitMix64,
    ) -> Result<Sample> {
        if length > LONGEST {
            return Err(Error::Argument(format!(
                "a length of {length} tokens is above {LONGEST}, the longest that is generated"
            )));
        }
        let encode = |text: &str| self.tokenizer.encode(text);
        let intro = encode(&draft.intro)?;
        let question = encode(&draft.question)?;
        let facts: Vec<Vec<u32>> =
            draft.facts.iter().map(|fact| encode(fact)).collect::<fox_data::Result<_>>()?;
        // Room for a right answer and as much again.
        let answer = encode(&format!(" {}", draft.outputs.join(", ")))?;
        let max_tokens = 2 * answer.len() + 8;
        let needed = 1 + intro.len() + facts.concat().len() + question.len() + max_tokens;
        let Some(room) = length.checked_sub(needed) else {
            return Err(Error::Argument(format!(
                "a sample of {} with its answer needs {needed} tokens, not {length}",
                task.name()
            )));
        };
        let body = match draft.filler {
            Filler::Text => self.passage(room, length, &facts, random)?,
            Filler::Units(next) => spread(units(next, room, encode)?, facts, random),
            Filler::Words(list) => {
                let known = [&draft.outputs[..], &draft.wrong].concat();
                words(list, &known, room, encode)?
            }
        };
        let prompt = [vec![self.tokenizer.bos()], intro, body, question].concat();
        let total = self.candidates.max(2 * draft.outputs.len());
        draft.wrong.retain(|wrong| !draft.outputs.contains(wrong));
        draft.wrong.truncate(if self.candidates == 0 { 0 } else { total - draft.outputs.len() });
        Ok(Sample { prompt, outputs: draft.outputs, wrong: draft.wrong, max_tokens })
    }

    /// `room` tokens of the haystack with the facts behind random sentences.
    fn passage(
        &self,
        room: usize,
        length: usize,
        facts: &[Vec<u32>],
        random: &mut SplitMix64,
    ) -> Result<Vec<u32>> {
        let available = self.haystack.len();
        if room > available {
            return Err(Error::Argument(format!(
                "the haystack has {available} tokens, but a prompt of {length} needs {room}; give a longer text"
            )));
        }
        let start = random.below((available - room + 1) as u64) as usize;
        let hay = &self.haystack[start..start + room];
        let mut places: Vec<usize> = facts
            .iter()
            .map(|_| break_before(&self.breaks, hay, random.below(room as u64 + 1) as usize))
            .collect();
        places.sort_unstable();
        let (mut body, mut done) = (Vec::with_capacity(room), 0);
        for (fact, place) in facts.iter().zip(places) {
            body.extend(&hay[done..place]);
            body.extend(fact);
            done = place;
        }
        body.extend(&hay[done..]);
        Ok(body)
    }
}

/// Units until the room is used up.
fn units(
    mut next: Box<dyn FnMut() -> String + '_>,
    room: usize,
    encode: impl Fn(&str) -> fox_data::Result<Vec<u32>>,
) -> Result<Vec<Vec<u32>>> {
    let (mut list, mut used) = (Vec::new(), 0);
    loop {
        let unit = encode(&next())?;
        // A unit without tokens would never use up the room.
        used += unit.len().max(1);
        if used > room {
            return Ok(list);
        }
        list.push(unit);
    }
}

/// Facts between units, at random places in their order.
fn spread(units: Vec<Vec<u32>>, facts: Vec<Vec<u32>>, random: &mut SplitMix64) -> Vec<u32> {
    let mut places: Vec<usize> =
        facts.iter().map(|_| random.below(units.len() as u64 + 1) as usize).collect();
    places.sort_unstable();
    let mut facts = places.into_iter().zip(facts).peekable();
    let mut body = Vec::new();
    for (i, unit) in units.iter().enumerate() {
        while let Some((_, fact)) = facts.next_if(|(place, _)| *place == i) {
            body.extend(fact);
        }
        body.extend(unit);
    }
    body.extend(facts.flat_map(|(_, fact)| fact));
    body
}

/// The list of words for the number of words that fits; `known` are its words.
fn words(
    list: Box<dyn FnOnce(usize) -> Vec<String> + '_>,
    known: &[String],
    room: usize,
    encode: impl Fn(&str) -> fox_data::Result<Vec<u32>>,
) -> Result<Vec<u32>> {
    let tokens = encode(&format!(" {}", known.join(" ")))?.len();
    let (mut body, mut used) = (Vec::new(), 0);
    // Words have about the same number of tokens; what does not fit in the end is left out.
    for word in list(room * known.len() / tokens.max(1)) {
        let ids = encode(&format!(" {word}"))?;
        used += ids.len();
        if used > room {
            break;
        }
        body.extend(ids);
    }
    Ok(body)
}

/// All items in random order.
pub(super) fn shuffled<T: Clone>(items: &[T], random: &mut SplitMix64) -> Vec<T> {
    let mut items = items.to_vec();
    for i in (1..items.len()).rev() {
        items.swap(i, random.below(i as u64 + 1) as usize);
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> String {
        "The sun rose over the hills. A cart went by, and the dog barked. ".repeat(200)
    }

    fn generator(tokenizer: &Tokenizer) -> Generator<'_> {
        Generator::new(&text(), tokenizer, 16, 7).unwrap()
    }

    #[test]
    fn every_task_fits_its_length() {
        for name in ["bytes", "gpt2"] {
            let tokenizer = Tokenizer::from_name(name).unwrap();
            let generator = generator(&tokenizer);
            for task in RulerTask::ALL {
                for length in [1024, 2500] {
                    let sample = generator.sample(task, length, 3).unwrap();
                    let used = sample.prompt.len() + sample.max_tokens;
                    let most = if name == "bytes" { 200 } else { 300 };
                    assert!(used <= length && used + most > length, "{task:?} {length} {used}");
                    assert_eq!(sample, generator.sample(task, length, 3).unwrap());
                    assert_ne!(sample, generator.sample(task, length, 4).unwrap());
                }
                assert!(generator.sample(task, 40, 0).is_err());
            }
        }
    }

    #[test]
    fn contexts_hold_the_right_answers() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let generator = generator(&tokenizer);
        for task in RulerTask::ALL {
            for index in 0..8 {
                let sample = generator.sample(task, 2048, index).unwrap();
                let text = tokenizer.decode(&sample.prompt).unwrap();
                for output in &sample.outputs {
                    assert!(text.contains(output.as_str()), "{task:?} {output}: {text}");
                    assert!(!sample.wrong.contains(output), "{task:?}");
                }
                let total = sample.outputs.len() + sample.wrong.len();
                assert!(total == 16.max(2 * sample.outputs.len()), "{task:?} {total}");
                assert!(!text.ends_with(' '), "{task:?}");
            }
        }
    }

    #[test]
    fn rejects_lengths_beyond_the_text() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let generator = Generator::new("short", &tokenizer, 16, 0).unwrap();
        let said = generator.sample(RulerTask::Qa1, 4096, 0).unwrap_err().to_string();
        assert!(said.starts_with("the haystack has 5 tokens"), "{said}");
        let said = generator.sample(RulerTask::Phonebook, 1 << 40, 0).unwrap_err().to_string();
        assert!(said.contains("is above 16777216"), "{said}");
        let said = generator.sample(RulerTask::Qa1, 64, 0).unwrap_err().to_string();
        assert!(said.contains("qa_1") && said.ends_with("tokens, not 64"), "{said}");
        assert!(Generator::new("", &tokenizer, 16, 0).is_err());
    }
}
