//! The figures of the demo with their intervals, and their verdict in words.
//!
//! An interval is a 95% bootstrap over seeds and, within a seed, over documents or needles. All models are resampled
//! with the same documents, so that differences between models are paired.

use fox_base::random::SplitMix64;
use fox_eval::loss::Bins;
use fox_eval::needle::NeedleMap;
use fox_eval::stats::{Interval, bootstrap_weights, interval};

use super::Evaluation;
use super::models::DemoModel;
use super::runs::DemoRun;

/// Resamples behind every interval.
const REPLICATES: usize = 400;
/// Seed of the bootstrap: the same runs give the same intervals.
const SEED: u64 = 0x6465_6d6f;
/// Relative difference below which training speeds count as equal: the machine may be shared.
const EQUAL_SPEED: f64 = 0.05;

/// A value and its resampled values.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The estimate from all runs, documents and needles.
    pub value: f64,
    resampled: Vec<f64>,
}

impl Figure {
    /// The estimate with its 95% interval.
    pub fn interval(&self) -> Interval {
        interval(self.value, self.resampled.iter().copied())
    }

    fn minus(&self, other: &Figure) -> Figure {
        let pairs = self.resampled.iter().zip(&other.resampled);
        Figure { value: self.value - other.value, resampled: pairs.map(|(a, b)| a - b).collect() }
    }

    /// The weighted mean of figures.
    fn mean(terms: &[(f64, &Figure)]) -> Figure {
        let total: f64 = terms.iter().map(|(weight, _)| weight).sum();
        let mean = |pick: &dyn Fn(&Figure) -> f64| {
            terms.iter().map(|(weight, figure)| weight * pick(figure)).sum::<f64>() / total
        };
        Figure {
            value: mean(&|f| f.value),
            resampled: (0..REPLICATES).map(|r| mean(&|f| f.resampled[r])).collect(),
        }
    }
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
pub struct SeedFigures {
    /// The seed.
    pub seed: u64,
    /// Mean loss at the second half of the training length.
    pub loss_inside: f64,
    /// Mean loss between twice and four times the training length.
    pub loss_beyond: f64,
    /// Their difference: negative if the model improves beyond its training length.
    pub change: f64,
    /// Fraction of needles found at four times the training length.
    pub needles: f64,
}

/// The figures of one model over all its seeds.
#[derive(Debug)]
pub struct ModelFigures {
    /// In tables and legends.
    pub name: &'static str,
    /// One entry per run.
    pub seeds: Vec<SeedFigures>,
    /// Loss by position: the center of each bin, and the figure.
    pub curve: Vec<(f64, Figure)>,
    /// Mean loss at the first quarter of the training length.
    pub start: Figure,
    /// See [`SeedFigures::loss_inside`].
    pub inside: Figure,
    /// See [`SeedFigures::loss_beyond`].
    pub beyond: Figure,
    /// See [`SeedFigures::change`].
    pub change: Figure,
    /// Fraction of needles found, by prompt length.
    pub needles: Vec<(usize, Figure)>,
    /// Training tokens per second, averaged over seeds.
    pub speed: f64,
}

/// All figures, FoX first.
#[derive(Debug)]
pub struct Figures {
    /// One entry per model.
    pub models: Vec<ModelFigures>,
    /// FoX against the best Transformer.
    pub comparisons: Vec<Comparison>,
    /// Mean attainable loss where [`SeedFigures::loss_inside`] and [`SeedFigures::loss_beyond`] are measured.
    pub attainable: [f64; 2],
}

/// The kind of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// Nats per token; lower is better.
    Loss,
    /// A fraction of needles.
    Needles,
    /// Tokens per second.
    Speed,
}

/// FoX against the Transformer that is best in this figure.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Name of the figure.
    pub what: String,
    /// Its kind.
    pub kind: FigureKind,
    /// The value of FoX.
    pub fox: f64,
    /// The value of the best Transformer.
    pub other: f64,
    /// Name of that Transformer.
    pub other_name: &'static str,
    /// FoX minus the Transformer; speeds have no interval.
    pub difference: Option<Interval>,
    /// Whether FoX is better; `None` if the difference is not significant.
    pub better: Option<bool>,
}

impl Figures {
    /// Computes the figures; `attainable` is the lowest possible loss at every position.
    pub fn new(
        models: &[(DemoModel, Vec<DemoRun>)],
        evaluation: &Evaluation,
        attainable: &[f64],
    ) -> Self {
        let t = evaluation.trained_on;
        let models: Vec<ModelFigures> = models
            .iter()
            .enumerate()
            .map(|(i, (model, runs))| ModelFigures::new(model.name, i, runs, evaluation))
            .collect();
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        Figures {
            comparisons: comparisons(&models, t),
            models,
            attainable: [mean(&attainable[t / 2..t]), mean(&attainable[2 * t..4 * t])],
        }
    }

    /// The result in one sentence, with or without intervals.
    pub fn verdict(&self, evaluation: &Evaluation, intervals: bool) -> String {
        let (t, length) = (evaluation.trained_on, evaluation.length());
        let range = |text: String| if intervals { format!(" ({text})") } else { String::new() };
        let mut losses = Vec::new();
        let mut needles = Vec::new();
        for m in &self.models {
            let change = m.change.interval();
            let ends = range(format!("{:+.3} to {:+.3}", change.low, change.high));
            losses.push(format!("the loss of {} {}{ends}", m.name, direction(&change)));
            let found = m.needles_at(length).interval();
            let ends = range(format!("{:.0} to {:.0}", 100.0 * found.low, 100.0 * found.high));
            needles.push(format!("{} {:.0}%{ends}", m.name, 100.0 * found.value));
        }
        format!(
            "Trained on sequences of {t} tokens and evaluated up to {length}, {}; needles found at {length} tokens: {}.",
            losses.join(", "),
            needles.join(", ")
        )
    }

    /// In one sentence, where FoX is worse.
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

/// The direction of a change, if it is significant.
fn direction(change: &Interval) -> String {
    match change {
        c if c.high < 0.0 => format!("falls by {:.3}", -c.value),
        c if c.low > 0.0 => format!("rises by {:.3}", c.value),
        c => format!("does not clearly change, {:+.3}", c.value),
    }
}

impl ModelFigures {
    fn new(name: &'static str, index: usize, runs: &[DemoRun], evaluation: &Evaluation) -> Self {
        let (t, length) = (evaluation.trained_on, evaluation.length());
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
            let terms: Vec<(f64, &Figure)> = (0..bins.len())
                .filter(inside)
                .map(|b| (bins.range(b).len() as f64, &by_bin[b]))
                .collect();
            Figure::mean(&terms)
        };
        let (inside, beyond) = (over(t / 2..t), over(2 * t..4 * t));
        let of_seed = |run: &DemoRun| {
            let losses = run.losses.mean();
            let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
            let (inside, beyond) = (mean(&losses[t / 2..t]), mean(&losses[2 * t..4 * t]));
            SeedFigures {
                seed: run.seed,
                loss_inside: inside,
                loss_beyond: beyond,
                change: beyond - inside,
                needles: run.needles.accuracy_at(length),
            }
        };
        let lengths = evaluation.grid.lengths.iter();
        ModelFigures {
            name,
            seeds: runs.iter().map(of_seed).collect(),
            start: over(0..t / 4),
            change: beyond.minus(&inside),
            inside,
            beyond,
            needles: lengths
                .map(|l| (*l, needles(runs, &seeds, *l, evaluation.grid.cases)))
                .collect(),
            speed: runs.iter().map(|r| r.tokens_per_second).sum::<f64>() / runs.len() as f64,
            curve: by_bin.into_iter().enumerate().map(|(b, f)| (bins.center(b), f)).collect(),
        }
    }

    /// The fraction of needles found at this length of the grid.
    pub fn needles_at(&self, length: usize) -> &Figure {
        let found = self.needles.iter().find(|(l, _)| *l == length);
        // The lengths are those of the grid; the last is the longest.
        &found.unwrap_or(&self.needles[self.needles.len() - 1]).1
    }
}

/// The fraction of needles found at a length. Seeds are resampled by `seeds`, needles within every cell.
fn needles(runs: &[DemoRun], seeds: &[Vec<u32>], length: usize, cases: u64) -> Figure {
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

fn comparisons(models: &[ModelFigures], t: usize) -> Vec<Comparison> {
    let loss = |what: String, pick: &dyn Fn(&ModelFigures) -> &Figure| {
        compare(models, what, FigureKind::Loss, pick)
    };
    let mut list = vec![
        loss(format!("loss at positions 1 to {}", t / 4), &|m| &m.start),
        loss(format!("loss at positions {} to {t}", t / 2 + 1), &|m| &m.inside),
        loss(format!("loss at positions {} to {}", 2 * t + 1, 4 * t), &|m| &m.beyond),
    ];
    for (i, (length, _)) in models[0].needles.iter().enumerate() {
        let what = format!("needles found at {length} tokens");
        list.push(compare(models, what, FigureKind::Needles, &|m| &m.needles[i].1));
    }
    let fastest = models[1..].iter().max_by(|a, b| a.speed.total_cmp(&b.speed));
    list.extend(fastest.map(|other| {
        let ratio = models[0].speed / other.speed;
        Comparison {
            what: "training speed in tokens per second".into(),
            kind: FigureKind::Speed,
            fox: models[0].speed,
            other: other.speed,
            other_name: other.name,
            difference: None,
            better: ((ratio - 1.0).abs() > EQUAL_SPEED).then_some(ratio > 1.0),
        }
    }));
    list
}

/// FoX against the best Transformer; `kind` says whether lower is better.
fn compare(
    models: &[ModelFigures],
    what: String,
    kind: FigureKind,
    pick: &dyn Fn(&ModelFigures) -> &Figure,
) -> Comparison {
    let sign = if kind == FigureKind::Loss { -1.0 } else { 1.0 };
    let score = |m: &&ModelFigures| sign * pick(m).value;
    let best = models[1..].iter().max_by(|a, b| score(a).total_cmp(&score(b)));
    let (fox, other) = (pick(&models[0]), best.unwrap_or(&models[0]));
    let difference = fox.minus(pick(other)).interval();
    let clear = difference.low > 0.0 || difference.high < 0.0;
    Comparison {
        what,
        kind,
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

    fn model(name: &'static str, inside: f64, beyond: f64, found: f64, speed: f64) -> ModelFigures {
        ModelFigures {
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
    fn describes_the_direction_of_changes() {
        assert_eq!(direction(&figure(-0.05).interval()), "falls by 0.050");
        assert_eq!(direction(&figure(0.05).interval()), "rises by 0.050");
        assert_eq!(direction(&figure(0.004).interval()), "does not clearly change, +0.004");
    }

    #[test]
    fn lists_where_fox_is_worse() {
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
