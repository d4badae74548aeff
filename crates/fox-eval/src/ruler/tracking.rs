//! Variable tracking: all variables that a chain of assignments gives one value.

use fox_base::random::SplitMix64;

use super::draft::{Draft, Filler};
use super::needles::NOISE;

/// Variables of a chain.
const CHAIN: usize = 5;
/// Names beside those of both chains, for wrong answers.
const OTHERS: usize = 64;

/// Two chains of assignments between repeated sentences; one of them is asked for.
pub(super) fn draft(random: &mut SplitMix64) -> Draft<'static> {
    let names = names(2 * CHAIN + OTHERS, random);
    let values = [0, 1].map(|i| 10_000 + 45_000 * i + random.below(45_000));
    let (mut chains, mut facts) = ([0, 0], Vec::new());
    while chains != [CHAIN; 2] {
        let chain = match chains {
            [CHAIN, _] => 1,
            [_, CHAIN] => 0,
            _ => usize::from(random.chance(0.5)),
        };
        let at = chain * CHAIN + chains[chain];
        facts.push(match chains[chain] {
            0 => format!("\nVAR {} = {}\n", names[at], values[chain]),
            _ => format!("\nVAR {} = VAR {}\n", names[at], names[at - 1]),
        });
        chains[chain] += 1;
    }
    let mut sentences = NOISE.into_iter().cycle();
    let value = values[0];
    Draft {
        intro: "Keep track of the variables that are assigned in the following text.\n".into(),
        filler: Filler::Units(Box::new(move || sentences.next().unwrap_or_default().to_string())),
        facts,
        question: format!(
            "\nWhich {CHAIN} variables have the value {value}, directly or through another variable?\n\
             The variables with the value {value} are"
        ),
        outputs: names[..CHAIN].to_vec(),
        wrong: names[CHAIN..].to_vec(),
    }
}

/// Distinct names of five capital letters.
fn names(count: usize, random: &mut SplitMix64) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(count);
    while names.len() < count {
        let letter = |_| char::from(b'A' + random.below(26) as u8);
        let name: String = (0..5).map(letter).collect();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_end_at_their_values() {
        let mut random = SplitMix64::new(3);
        for _ in 0..20 {
            let draft = draft(&mut random);
            assert_eq!(draft.facts.len(), 2 * CHAIN);
            let mut known: Vec<(String, String)> = Vec::new();
            for fact in &draft.facts {
                let (name, value) = fact.trim().split_once(" = ").unwrap();
                // A variable is assigned before it is used.
                let value = match value.strip_prefix("VAR ") {
                    Some(other) => known.iter().find(|(n, _)| n == other).unwrap().1.clone(),
                    None => value.to_string(),
                };
                known.push((name.strip_prefix("VAR ").unwrap().to_string(), value));
            }
            let asked = draft.question.rsplit("value ").next().unwrap();
            let value = asked.split(' ').next().unwrap();
            let right = known.iter().filter(|(_, v)| v == value).map(|(n, _)| n.clone());
            assert_eq!(right.collect::<Vec<_>>(), draft.outputs);
        }
    }
}
