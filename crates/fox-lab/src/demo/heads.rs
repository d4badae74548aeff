//! The head of FoX that forgets most selectively at the start of a chapter.

use anyhow::Result;
use fox_data::SyntheticTokenizer;
use fox_data::synthetic::{SyntheticDocument, SyntheticToken, TokenKind};
use fox_eval::inspect::{HeadPicture, InspectOptions, Inspection, cumulative, inspect};

use super::Evaluation;
use super::runs::DemoRun;

/// Minimum number of new chapters in the inspected document.
const CHAPTERS: usize = 3;

/// An inspection of all heads, and the head that is shown.
pub struct InspectedHead {
    /// Gates and attention of all heads in one document.
    pub inspection: Inspection,
    /// Index of the shown head among `inspection.pictures`.
    pub shown: usize,
    /// Positions of the first words of "A new chapter begins.", counted from the start marker.
    pub chapters: Vec<usize>,
    /// Mean of the forget matrix F over pairs of tokens in the same chapter.
    pub inside: f64,
    /// Mean of F over pairs in different chapters.
    pub across: f64,
}

impl InspectedHead {
    /// The picture of the shown head.
    pub fn picture(&self) -> &HeadPicture {
        &self.inspection.pictures[self.shown]
    }

    /// `L1 H0`.
    pub fn name(&self) -> String {
        let (layer, head) = self.picture().place;
        format!("L{layer} H{head}")
    }
}

/// Inspects all heads on a document with several chapters and selects the one whose F differs most between pairs within
/// a chapter and pairs across chapters.
pub fn most_selective(run: &DemoRun, evaluation: &Evaluation) -> Result<InspectedHead> {
    let (ids, chapters) = document(evaluation);
    let (heads, layers) = (run.model.config().heads().0, run.model.config().num_layers);
    let all = (0..layers).flat_map(|layer| (0..heads).map(move |head| (layer, head))).collect();
    let options = InspectOptions { heads: all, pixels: 256, ..InspectOptions::default() };
    let inspection = inspect(&run.subject("FoX", evaluation), &ids, &options)?;
    let contrasts: Vec<(f64, f64)> =
        inspection.pictures.iter().map(|picture| contrast(&picture.gates, &chapters)).collect();
    let shown = (0..contrasts.len())
        .max_by(|a, b| {
            let difference = |i: usize| contrasts[i].0 - contrasts[i].1;
            difference(*a).total_cmp(&difference(*b))
        })
        .unwrap_or(0);
    let (inside, across) = contrasts[shown];
    Ok(InspectedHead { inspection, shown, chapters, inside, across })
}

/// The first held-out document with enough chapters of sufficient length, and the starts of its chapters.
fn document(evaluation: &Evaluation) -> (Vec<u32>, Vec<usize>) {
    let length = evaluation.length();
    let read = |index: u64| -> (Vec<u32>, Vec<usize>) {
        let tokens: Vec<SyntheticToken> =
            SyntheticDocument::new(&evaluation.corpus, index).take(length - 1).collect();
        let opens = |i: &usize| {
            tokens[*i].kind == TokenKind::Chapter
                && (*i == 0 || tokens[i - 1].kind != TokenKind::Chapter)
        };
        let ids = std::iter::once(SyntheticTokenizer::BOS).chain(tokens.iter().map(|t| t.id));
        (ids.collect(), (0..tokens.len()).filter(opens).map(|i| i + 1).collect())
    };
    let clear = |chapters: &[usize]| {
        let edges: Vec<usize> = [&[0], chapters, &[length]].concat();
        chapters.len() >= CHAPTERS && edges.windows(2).all(|w| w[1] - w[0] >= length / 10)
    };
    (0..10_000).map(read).find(|(_, chapters)| clear(chapters)).unwrap_or_else(|| read(0))
}

/// Mean of F over pairs of tokens of the same chapter, and over pairs of different chapters.
fn contrast(gates: &[f32], chapters: &[usize]) -> (f64, f64) {
    // A gate of exactly 0 would give differences of infinities.
    let c = cumulative(gates.iter().map(|gate| gate.max(f32::MIN_POSITIVE).ln()));
    let chapter_of = |token: usize| chapters.partition_point(|begin| *begin <= token);
    let chapter: Vec<usize> = (0..c.len()).map(chapter_of).collect();
    let mut sums = [(0.0, 0_u64); 2];
    for i in 0..c.len() {
        for j in 0..i {
            let sum = &mut sums[usize::from(chapter[i] != chapter[j])];
            *sum = (sum.0 + (c[i] - c[j]).exp(), sum.1 + 1);
        }
    }
    let mean = |(sum, count): (f64, u64)| sum / count.max(1) as f64;
    (mean(sums[0]), mean(sums[1]))
}

#[cfg(test)]
mod tests {
    use super::contrast;

    #[test]
    fn contrast_detects_forgetting_at_chapters() {
        // Two chapters of three tokens; the gate of the fourth token closes.
        let (inside, across) = contrast(&[1.0, 1.0, 1.0, 0.0, 1.0, 1.0], &[3]);
        assert!(inside == 1.0 && across < 1e-30, "{inside} {across}");
        let (inside, across) = contrast(&[1.0; 6], &[3]);
        assert_eq!((inside, across), (1.0, 1.0));
        // A half at every token: pairs one apart weigh 1/2, two apart 1/4.
        let (inside, _) = contrast(&[0.5; 6], &[3]);
        assert!((inside - (4.0 * 0.5 + 2.0 * 0.25) / 6.0).abs() < 1e-6, "{inside}");
    }
}
