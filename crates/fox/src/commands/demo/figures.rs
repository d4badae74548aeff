//! The figures of the demo with their intervals, and what they say in words.
//!
//! An interval is a 95% bootstrap over seeds and, inside a seed, over documents or needles. All models are resampled
//! with the same documents, so that differences between models are those on the same text.

use fox_base::random::SplitMix64;
use fox_eval::loss::Bins;
use fox_eval::needle::NeedleMap;
use fox_eval::stats::{Interval, bootstrap_weights, interval};

use super::Questions;
use super::contest::Run;
use super::models::Contestant;

/// Resamples behind every interval.
const REPLICATES: usize = 400;
/// Fixed, so that the same runs give the same intervals.
const SEED: u64 = 0x6465_6d6f;
/// Speeds that differ by less than this part are called equal: others may use the machine, too.
const EQUAL_SPEED: f64 = 0.05;

/// A value and its resampled values.
#[derive(Clone, Debug)]
pub struct Figure {
    /// From all runs, documents and needles.
    pub value: f64,
    resampled: Vec<f64>,
}

impl Figure {
    /// With the ends of the 95% interval.
    pub fn interval(&self) -> Interval {
        interval(self.value, self.resampled.iter().copied())
    }

    fn minus(&self, other: &Figure) -> Figure {
        let pairs = self.resampled.iter().zip(&other.resampled);
        Figure { value: self.value - other.value, resampled: pairs.map(|(a, b)| a - b).collect() }
    }

    /// The weighted mean of figures.
    fn mean(parts: &[(f64, &Figure)]) -> Figure {
        let total: f64 = parts.iter().map(|(weight, _)| weight).sum();
        let mean = |pick: &dyn Fn(&Figure) -> f64| {
            parts.iter().map(|(weight, figure)| weight * pick(figure)).sum::<f64>() / total
        };
        Figure {
            value: mean(&|f| f.value),
            resampled: (0..REPLICATES).map(|r| mean(&|f| f.resampled[r])).collect(),
        }
    }
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
pub struct OfSeed {
    /// The seed.
    pub seed: u64,
    /// Mean loss of the second half of the training length.
    pub loss_inside: f64,
    /// Mean loss between twice and four times the training length.
    pub loss_beyond: f64,
    /// Their difference: below 0 the model gets better where it was never trained.
    pub change: f64,
    /// Share of needles found at four times the training length.
    pub needles: f64,
}

/// The figures of one model over all its seeds.
#[derive(Debug)]
pub struct OfModel {
    /// In tables and legends.
    pub name: &'static str,
    /// Every run by itself.
    pub seeds: Vec<OfSeed>,
    /// Loss at every bin of positions: the middle of the bin, and the figure.
    pub curve: Vec<(f64, Figure)>,
    /// Loss at the first quarter of the training length.
    pub start: Figure,
    /// See [`OfSeed::loss_inside`].
    pub inside: Figure,
    /// See [`OfSeed::loss_beyond`].
    pub beyond: Figure,
    /// See [`OfSeed::change`].
    pub change: Figure,
    /// Share of needles found, by length of the prompt.
    pub needles: Vec<(usize, Figure)>,
    /// Training tokens per second, mean over the seeds.
    pub speed: f64,
}

/// All figures, FoX first.
#[derive(Debug)]
pub struct Figures {
    /// One entry per model.
    pub models: Vec<OfModel>,
    /// FoX beside the best Transformer.
    pub comparisons: Vec<Comparison>,
    /// Mean attainable loss where [`OfSeed::loss_inside`] and [`OfSeed::loss_beyond`] are measured.
    pub attainable: [f64; 2],
}

/// FoX beside the Transformer that is best in this figure.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// What is compared.
    pub what: String,
    /// The value of FoX.
    pub fox: f64,
    /// The value of the other.
    pub other: f64,
    /// Who that is.
    pub other_name: &'static str,
    /// FoX less the other; speeds have no interval.
    pub difference: Option<Interval>,
    /// Whether FoX is better; nothing if that is not clear.
    pub better: Option<bool>,
}

impl Figures {
    /// Evaluates the runs; `attainable` is the lowest loss at every position.
    pub fn new(
        models: &[(Contestant, Vec<Run>)],
        questions: &Questions,
        attainable: &[f64],
    ) -> Self {
        let t = questions.trained_on;
        let models: Vec<OfModel> = models
            .iter()
            .enumerate()
            .map(|(i, (contestant, runs))| OfModel::new(contestant.name, i, runs, questions))
            .collect();
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        Figures {
            comparisons: comparisons(&models, t),
            models,
            attainable: [mean(&attainable[t / 2..t]), mean(&attainable[2 * t..4 * t])],
        }
    }

    /// What came out, in one sentence, whatever it is; with intervals or without.
    pub fn verdict(&self, questions: &Questions, intervals: bool) -> String {
        let (t, length) = (questions.trained_on, questions.length());
        let range = |text: String| if intervals { format!(" ({text})") } else { String::new() };
        let mut losses = Vec::new();
        let mut needles = Vec::new();
        for m in &self.models {
            let change = m.change.interval();
            let ends = range(format!("{:+.3} to {:+.3}", change.low, change.high));
            losses.push(format!("the loss of {} {}{ends}", m.name, moves(&change)));
            let found = m.needles_at(length).interval();
            let ends = range(format!("{:.0} to {:.0}", 100.0 * found.low, 100.0 * found.high));
            needles.push(format!("{} {:.0}%{ends}", m.name, 100.0 * found.value));
        }
        format!(
            "Trained on {t} tokens and read on to {length}, {}; needles found at {length} tokens: {}.",
            losses.join(", "),
            needles.join(", ")
        )
    }

    /// Where FoX is worse, in one sentence.
    pub fn losses(&self) -> String {
        let name = |c: &Comparison| format!("{} ({})", c.what, c.other_name);
        let worse: Vec<String> =
            self.comparisons.iter().filter(|c| c.better == Some(false)).map(name).collect();
        let equal = self.comparisons.iter().filter(|c| c.better.is_none()).count();
        let unclear = match equal {
            0 => String::new(),
            n => format!(
                " In {n} of the {} comparisons neither is clearly better.",
                self.comparisons.len()
            ),
        };
        match worse.is_empty() {
            true => format!(
                "In none of these {} comparisons FoX is clearly worse than the best Transformer.{unclear}",
                self.comparisons.len()
            ),
            false => {
                format!("FoX is worse than the best Transformer in: {}.{unclear}", worse.join("; "))
            }
        }
    }
}

/// The direction of a change, if it is clear.
fn moves(change: &Interval) -> String {
    match change {
        c if c.high < 0.0 => format!("falls by {:.3}", -c.value),
        c if c.low > 0.0 => format!("rises by {:.3}", c.value),
        c => format!("does not clearly change, {:+.3}", c.value),
    }
}

impl OfModel {
    fn new(name: &'static str, index: usize, runs: &[Run], questions: &Questions) -> Self {
        let (t, length) = (questions.trained_on, questions.length());
        let bins = Bins::new(length);
        let groups = runs[0].losses.groups();
        let documents = bootstrap_weights(groups, REPLICATES, SEED);
        let seeds = bootstrap_weights(runs.len(), REPLICATES, SEED + 1 + index as u64);
        let mean_over_runs = |weights: Option<(&[u32], &[u32])>| -> Vec<f64> {
            let mut sums = vec![0.0; bins.len()];
            for (r, run) in runs.iter().enumerate() {
                let drawn = weights.map_or(1.0, |(seeds, _)| f64::from(seeds[r]));
                if drawn > 0.0 {
                    let means = run.losses.bin_means(weights.map(|(_, docs)| docs), &bins);
                    sums.iter_mut().zip(means).for_each(|(sum, mean)| *sum += drawn * mean);
                }
            }
            sums.iter().map(|sum| sum / runs.len() as f64).collect()
        };
        let all = mean_over_runs(None);
        let resampled: Vec<Vec<f64>> =
            seeds.iter().zip(&documents).map(|(s, d)| mean_over_runs(Some((s, d)))).collect();
        let by_bin: Vec<Figure> = (0..bins.len())
            .map(|bin| Figure {
                value: all[bin],
                resampled: resampled.iter().map(|means| means[bin]).collect(),
            })
            .collect();
        let over = |range: std::ops::Range<usize>| {
            let inside = |b: &usize| {
                let positions = bins.range(*b);
                positions.start >= range.start && positions.end <= range.end
            };
            let parts: Vec<(f64, &Figure)> = (0..bins.len())
                .filter(inside)
                .map(|b| (bins.range(b).len() as f64, &by_bin[b]))
                .collect();
            Figure::mean(&parts)
        };
        let (inside, beyond) = (over(t / 2..t), over(2 * t..4 * t));
        let of_seed = |run: &Run| {
            let losses = run.losses.mean();
            let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
            let (inside, beyond) = (mean(&losses[t / 2..t]), mean(&losses[2 * t..4 * t]));
            OfSeed {
                seed: run.seed,
                loss_inside: inside,
                loss_beyond: beyond,
                change: beyond - inside,
                needles: run.needles.accuracy_at(length),
            }
        };
        let lengths = questions.grid.lengths.iter();
        OfModel {
            name,
            seeds: runs.iter().map(of_seed).collect(),
            start: over(0..t / 4),
            change: beyond.minus(&inside),
            inside,
            beyond,
            needles: lengths
                .map(|l| (*l, needles(runs, &seeds, *l, questions.grid.cases)))
                .collect(),
            speed: runs.iter().map(|r| r.tokens_per_second).sum::<f64>() / runs.len() as f64,
            curve: by_bin.into_iter().enumerate().map(|(b, f)| (bins.center(b), f)).collect(),
        }
    }

    /// The share of needles found at this length of the grid.
    pub fn needles_at(&self, length: usize) -> &Figure {
        let found = self.needles.iter().find(|(l, _)| *l == length);
        // The lengths are those of the grid; the last is the longest.
        &found.unwrap_or(&self.needles[self.needles.len() - 1]).1
    }
}

/// Needles found at a length: seeds are drawn as the weights say, needles in every cell anew.
fn needles(runs: &[Run], seeds: &[Vec<u32>], length: usize, cases: u64) -> Figure {
    let cells = |map: &NeedleMap| -> Vec<f64> {
        map.cells.iter().filter(|c| c.length == length).map(|c| c.accuracy).collect()
    };
    let mut random = SplitMix64::new(SEED ^ length as u64);
    let mut redrawn = |accuracies: &[f64]| {
        let draws = accuracies.len() as u64 * cases;
        let found = accuracies
            .iter()
            .flat_map(|accuracy| (0..cases).map(move |_| *accuracy))
            .filter(|accuracy| random.uniform() < *accuracy)
            .count();
        found as f64 / draws as f64
    };
    let mut resample = |weights: &Vec<u32>| {
        let drawn = runs.iter().zip(weights);
        let sum: f64 = drawn
            .flat_map(|(run, times)| (0..*times).map(move |_| run))
            .map(|run| redrawn(&cells(&run.needles)))
            .sum();
        sum / runs.len() as f64
    };
    Figure {
        value: runs.iter().map(|run| run.needles.accuracy_at(length)).sum::<f64>()
            / runs.len() as f64,
        resampled: seeds.iter().map(&mut resample).collect(),
    }
}

fn comparisons(models: &[OfModel], t: usize) -> Vec<Comparison> {
    let lower =
        |what: String, pick: &dyn Fn(&OfModel) -> &Figure| compare(models, what, pick, -1.0);
    let higher =
        |what: String, pick: &dyn Fn(&OfModel) -> &Figure| compare(models, what, pick, 1.0);
    let mut list = vec![
        lower(format!("loss at positions 1 to {}", t / 4), &|m| &m.start),
        lower(format!("loss at positions {} to {t}", t / 2 + 1), &|m| &m.inside),
        lower(format!("loss at positions {} to {}", 2 * t + 1, 4 * t), &|m| &m.beyond),
    ];
    for (i, (length, _)) in models[0].needles.iter().enumerate() {
        list.push(higher(format!("needles found at {length} tokens"), &|m| &m.needles[i].1));
    }
    let fastest = models[1..].iter().max_by(|a, b| a.speed.total_cmp(&b.speed));
    list.extend(fastest.map(|other| {
        let ratio = models[0].speed / other.speed;
        Comparison {
            what: "training speed in tokens per second".into(),
            fox: models[0].speed,
            other: other.speed,
            other_name: other.name,
            difference: None,
            better: ((ratio - 1.0).abs() > EQUAL_SPEED).then_some(ratio > 1.0),
        }
    }));
    list
}

/// FoX beside the best of the others; `sign` is -1 where less is better.
fn compare(
    models: &[OfModel],
    what: String,
    pick: &dyn Fn(&OfModel) -> &Figure,
    sign: f64,
) -> Comparison {
    let score = |m: &&OfModel| sign * pick(m).value;
    let best = models[1..].iter().max_by(|a, b| score(a).total_cmp(&score(b)));
    let (fox, other) = (pick(&models[0]), best.unwrap_or(&models[0]));
    let difference = fox.minus(pick(other)).interval();
    let clear = difference.low > 0.0 || difference.high < 0.0;
    Comparison {
        what,
        fox: fox.value,
        other: pick(other).value,
        other_name: other.name,
        difference: Some(difference),
        better: clear.then_some(sign * difference.value > 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64) -> Figure {
        // Resampled values spread by 0.01 to both sides.
        let resampled = (0..REPLICATES).map(|r| value + 0.01 * (r as f64 / 199.5 - 1.0)).collect();
        Figure { value, resampled }
    }

    fn model(name: &'static str, inside: f64, beyond: f64, found: f64, speed: f64) -> OfModel {
        OfModel {
            name,
            seeds: Vec::new(),
            curve: Vec::new(),
            start: figure(2.0),
            inside: figure(inside),
            beyond: figure(beyond),
            change: figure(beyond - inside),
            needles: vec![(256, figure(found))],
            speed,
        }
    }

    #[test]
    fn words_follow_the_figures() {
        assert_eq!(moves(&figure(-0.05).interval()), "falls by 0.050");
        assert_eq!(moves(&figure(0.05).interval()), "rises by 0.050");
        assert_eq!(moves(&figure(0.004).interval()), "does not clearly change, +0.004");
    }

    #[test]
    fn fox_loses_where_its_figures_are_worse() {
        let models = [
            model("FoX", 1.5, 1.3, 0.9, 80.0),
            model("A", 1.4, 1.4, 0.5, 100.0),
            model("B", 1.45, 1.35, 0.6, 90.0),
        ];
        let list = comparisons(&models, 256);
        let found: Vec<_> = list.iter().map(|c| (c.other_name, c.better)).collect();
        // Start: equal; inside: worse than A; beyond: better than B; needles: better than B; speed: slower than A.
        let want = [
            ("B", None),
            ("A", Some(false)),
            ("B", Some(true)),
            ("B", Some(true)),
            ("A", Some(false)),
        ];
        assert_eq!(found, want);
        let figures = Figures { models: models.into(), comparisons: list, attainable: [1.0, 1.0] };
        assert_eq!(
            figures.losses(),
            "FoX is worse than the best Transformer in: loss at positions 129 to 256 (A); training speed in tokens per \
             second (A). In 1 of the 5 comparisons neither is clearly better."
        );
    }
}
