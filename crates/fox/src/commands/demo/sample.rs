//! A few sentences from the trained model.

use anyhow::Result;
use fox_data::SyntheticTokenizer;
use fox_model::{ForwardOptions, Model};

/// Words that are generated.
const WORDS: usize = 90;
/// Below 1 the likely words become more likely.
const TEMPERATURE: f64 = 0.8;

/// Continues a text word by word; the same model and text give the same words.
pub fn generate(model: &Model, prompt: &[u32]) -> Result<String> {
    let mut cache = model.new_cache(1, prompt.len() + WORDS)?;
    let mut next: Vec<i32> = prompt.iter().map(|id| *id as i32).collect();
    let (mut words, mut random) = (Vec::with_capacity(WORDS), 0x9e37_79b9_7f4a_7c15_u64);
    while words.len() < WORDS {
        let logits = model.decode(&[&next], &mut cache, &ForwardOptions::default())?.to_f64()?;
        let drawn = draw(&logits, &mut random);
        words.push(drawn);
        next = vec![drawn as i32];
    }
    Ok(SyntheticTokenizer.decode(&words)?)
}

/// An id with probability `softmax(logits / TEMPERATURE)`.
fn draw(logits: &[f64], random: &mut u64) -> u32 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| ((x - largest) / TEMPERATURE).exp()).collect();
    // Xorshift: small, and good enough to pick words with.
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    let mut left = (*random >> 11) as f64 / (1_u64 << 53) as f64 * weights.iter().sum::<f64>();
    for (id, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return id as u32;
        }
    }
    weights.len().saturating_sub(1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likely_words_are_drawn_and_impossible_ones_never() {
        let logits = [0.0, 2.0, f64::NEG_INFINITY, 0.0];
        let mut random = 7;
        let mut counts = [0; 4];
        for _ in 0..2000 {
            counts[draw(&logits, &mut random) as usize] += 1;
        }
        // exp(2 / 0.8) = 12.2 against 1 and 1.
        let share = f64::from(counts[1]) / 2000.0;
        assert!((share - 12.18 / 14.18).abs() < 0.03 && counts[2] == 0, "{counts:?}");
    }
}
