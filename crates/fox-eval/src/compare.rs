//! Several models side by side, in one report with the paper's kinds of tables and figures.

use serde::Serialize;
use serde_json::{Value, json};

use crate::inspect::{HeadSummary, Reach, half_life_chart};
use crate::learning::{Learning, learning_chart};
use crate::loss::{LossReport, loss_chart, slope_chart};
use crate::needle::NeedleReport;
use crate::report::Report;
use crate::stats::Interval;
use crate::tasks::{LONGBENCH, TaskReport};

/// Properties of a model that need no forward pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelFacts {
    /// Name in the report.
    pub name: String,
    /// Path of the checkpoint or run folder.
    pub folder: String,
    /// Name of its architecture.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: usize,
    /// Length of its training sequences.
    pub training_length: Option<usize>,
}

/// Statistics of a model's heads over a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelHeads {
    /// Name of the model.
    pub model: String,
    /// Length of the text in tokens.
    pub tokens: usize,
    /// All heads; empty for a model without attention.
    pub heads: Vec<HeadSummary>,
}

/// All results of a comparison.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// The models, in the order of the command line.
    pub models: Vec<ModelFacts>,
    /// Learning curves of the models that are run folders.
    pub learning: Vec<Learning>,
    /// Loss at every position.
    pub loss: Option<LossReport>,
    /// Needles.
    pub needle: Option<NeedleReport>,
    /// Tasks.
    pub tasks: TaskReport,
    /// Heads.
    pub heads: Vec<ModelHeads>,
    /// Measurements that were skipped, with the option that enables each.
    pub left_out: Vec<String>,
}

impl Comparison {
    /// All numbers.
    pub fn json(&self) -> Value {
        json!({
            "models": self.models,
            "learning": self.learning,
            "loss": self.loss,
            "needle": self.needle,
            "tasks": self.tasks,
            "heads": self.heads,
            "left_out": self.left_out,
        })
    }

    /// A row per model: its size, and one figure per kind of measurement.
    pub fn overview(&self) -> Vec<Vec<String>> {
        let mut head = vec!["model".to_string(), "architecture".into(), "parameters".into()];
        head.push("trained on".into());
        if let Some(loss) = &self.loss {
            head.extend([loss.mean_name(), "dL/d ln i beyond".into()]);
        }
        if let Some(needle) = &self.needle {
            let longest = needle.grid.lengths.iter().max().copied().unwrap_or(0);
            head.push(format!("needles at {longest}"));
        }
        if !self.tasks.results.is_empty() {
            head.push("tasks".into());
        }
        if !self.heads.is_empty() {
            head.push("blocks pruned".into());
        }
        let mut rows = vec![head];
        rows.extend((0..self.models.len()).map(|m| self.overview_of(m)));
        rows
    }

    fn overview_of(&self, m: usize) -> Vec<String> {
        let model = &self.models[m];
        let name = model.name.as_str();
        let percent = |fraction: f64| format!("{:.1}%", 100.0 * fraction);
        let mut row = vec![
            name.to_string(),
            model.architecture.clone(),
            millions(model.parameters),
            model.training_length.map_or("-".into(), |l| l.to_string()),
        ];
        if let Some(loss) = &self.loss {
            let curve = loss.curves.iter().find(|c| c.model == name);
            let beyond = curve.and_then(|c| c.slope_beyond_training);
            row.push(curve.map_or("-".into(), |c| with_ends(&c.mean, 4)));
            row.push(beyond.map_or("-".into(), |slope| with_ends(&slope, 4)));
        }
        if let Some(needle) = &self.needle {
            let longest = needle.grid.lengths.iter().max().copied().unwrap_or(0);
            let map = needle.maps.iter().find(|map| map.model == name);
            row.push(map.map_or("-".into(), |map| percent(map.accuracy_at(longest))));
        }
        if !self.tasks.results.is_empty() {
            row.push(self.tasks.mean_share(name).map_or("-".into(), percent));
        }
        if !self.heads.is_empty() {
            let heads = self.heads.iter().find(|h| h.model == name);
            row.push(heads.filter(|h| !h.heads.is_empty()).map_or("-".into(), |h| {
                let count = h.heads.len() as f64;
                percent(h.heads.iter().map(HeadSummary::pruned).sum::<f64>() / count)
            }));
        }
        row
    }

    /// The report.
    pub fn report(&self) -> Report {
        let names: Vec<&str> = self.models.iter().map(|m| m.name.as_str()).collect();
        let mut report = Report::new(
            &names.join(", "),
            "The same documents, needles, questions and texts for every model.",
        );
        report.table(&self.overview());
        self.add_losses(&mut report);
        self.add_needles(&mut report);
        self.add_tasks(&mut report);
        self.add_heads(&mut report);
        report.set_numbers(self.json());
        if !self.left_out.is_empty() {
            report.heading("Left out");
            for reason in &self.left_out {
                report.text(reason);
            }
        }
        report
    }

    fn trained_on(&self, model: &str) -> Option<usize> {
        self.models.iter().find(|m| m.name == model).and_then(|m| m.training_length)
    }

    fn add_losses(&self, report: &mut Report) {
        if self.loss.is_none() && self.learning.is_empty() {
            return;
        }
        report.heading("Loss");
        let mut charts = Vec::new();
        if let Some(loss) = &self.loss {
            charts.push(loss_chart(&loss.curves).fragment());
            charts.push(slope_chart(&loss.curves).fragment());
        }
        if !self.learning.is_empty() {
            charts.push(learning_chart(&self.learning).fragment());
        }
        report.charts(&charts);
        let Some(loss) = &self.loss else { return };
        report.text("Bands and ranges are 95% bootstrap intervals over documents. The slope is the change of the loss per e-fold of the position: below 0, more context still helps.");
        let mut head = vec!["perplexity of the first".to_string()];
        let lengths: Vec<usize> = loss
            .curves
            .first()
            .map(|c| c.perplexities.iter().map(|p| p.length).collect())
            .unwrap_or_default();
        head.extend(lengths.iter().map(|length| format!("{length} tokens")));
        let mut rows = vec![head];
        for curve in &loss.curves {
            let mut row = vec![curve.model.clone()];
            row.extend(curve.perplexities.iter().map(|p| with_ends(&p.perplexity, 3)));
            rows.push(row);
        }
        report.table(&rows);
    }

    fn add_needles(&self, report: &mut Report) {
        let Some(needle) = &self.needle else { return };
        report.heading("Needles in a haystack");
        report.text(&format!(
            "{} cases per cell; guessing finds {:.1}%.",
            needle.grid.cases,
            100.0 * needle.chance
        ));
        let found = needle
            .maps
            .iter()
            .map(|map| map.accuracy_chart(&needle.grid, self.trained_on(&map.model)));
        let likely = needle
            .maps
            .iter()
            .map(|map| map.log_prob_chart(&needle.grid, self.trained_on(&map.model)));
        let charts: Vec<String> = found.chain(likely).map(|chart| chart.fragment()).collect();
        report.charts(&charts);
    }

    fn add_tasks(&self, report: &mut Report) {
        let is_long = |task: &str| LONGBENCH.contains(&task);
        let tables = [
            (
                "Short tasks",
                "Zero-shot, as lm-evaluation-harness asks and judges. Shares in percent, each with its standard error.",
                self.tasks.only(|task| !is_long(task)),
            ),
            (
                "LongBench",
                "Greedy answers, judged as LongBench does, in percent.",
                self.tasks.only(is_long),
            ),
        ];
        for (heading, text, tasks) in tables {
            if !tasks.results.is_empty() {
                report.heading(heading).text(text).table(&tasks.table());
            }
        }
    }

    fn add_heads(&self, report: &mut Report) {
        if self.heads.iter().all(|model| model.heads.is_empty()) {
            return;
        }
        report.heading("How long each head remembers");
        report.text("The half-life is how many tokens it takes until what a head has read weighs half. Dots are medians over the text, lines reach from the 10% to the 90% quantile.");
        let mut charts = Vec::new();
        let head =
            ["model", "local heads", "medium", "global", "median half-life", "mean entropy (nats)"];
        let mut rows = vec![head.map(String::from).to_vec()];
        for model in self.heads.iter().filter(|model| !model.heads.is_empty()) {
            if let Some(mut chart) = half_life_chart(&model.heads) {
                chart.title = format!("{}: half-life of every head", model.model);
                // A mark at the training length in every chart, so that axes can be compared.
                let trained =
                    self.trained_on(&model.model).map(|l| (l as f64, "trained on".into()));
                chart.marks.extend(trained);
                charts.push(chart.fragment());
            }
            rows.push(memory_row(model));
        }
        if !charts.is_empty() {
            report.charts(&charts);
        }
        report.table(&rows);
    }
}

fn memory_row(model: &ModelHeads) -> Vec<String> {
    let lives: Vec<_> = model.heads.iter().filter_map(|h| h.half_life).collect();
    let count = |reach: Reach| match lives.is_empty() {
        true => "-".to_string(),
        false => lives.iter().filter(|l| l.reach == reach).count().to_string(),
    };
    let mut medians: Vec<f64> = lives.iter().map(|l| l.median).collect();
    medians.sort_by(f64::total_cmp);
    let median = match crate::stats::quantile(&medians, 0.5) {
        m if m.is_nan() => "-".into(),
        m if m >= 1e6 => "> 1M".into(),
        m => format!("{m:.1}"),
    };
    let entropy = model.heads.iter().map(|h| h.entropy).sum::<f64>() / model.heads.len() as f64;
    vec![
        model.model.clone(),
        count(Reach::Local),
        count(Reach::Medium),
        count(Reach::Global),
        median,
        format!("{entropy:.2}"),
    ]
}

fn with_ends(interval: &Interval, digits: usize) -> String {
    let Interval { value, low, high } = interval;
    format!("{value:.digits$} ({low:.digits$}..{high:.digits$})")
}

fn millions(count: usize) -> String {
    match count as f64 / 1e6 {
        m if m < 10.0 => format!("{m:.2}M"),
        m => format!("{m:.0}M"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::{Bins, LossCurve, LossSums};
    use crate::tasks::{Figure, Metric, TaskResult};

    fn facts(name: &str) -> ModelFacts {
        ModelFacts {
            name: name.into(),
            folder: "f".into(),
            architecture: "FoX (Pro)".into(),
            parameters: 1_500_000,
            training_length: Some(8),
        }
    }

    #[test]
    fn report_has_measurements_and_lists_what_was_skipped() {
        let mut sums = LossSums::new(16);
        sums.add(0, &[2.0; 16], &Bins::new(16));
        let curves = vec![LossCurve::new("a", &sums, Some(8)), LossCurve::new("b", &sums, Some(8))];
        let figure = Figure { metric: Metric::Acc, value: 0.5, stderr: None, items: 2 };
        let result =
            |task: &str| TaskResult { task: task.into(), model: "b".into(), figures: vec![figure] };
        let comparison = Comparison {
            models: vec![facts("a"), facts("b")],
            loss: Some(LossReport {
                data: "d".into(),
                trained_on: false,
                masked_every: None,
                curves,
            }),
            tasks: TaskReport { results: vec![result("piqa"), result("trec")] },
            left_out: vec!["Needles need a text.".into()],
            ..Comparison::default()
        };
        let rows = comparison.overview();
        assert_eq!(rows[0].len(), rows[1].len());
        assert_eq!(rows[1][..5], ["a", "FoX (Pro)", "1.50M", "8", "2.0000 (2.0000..2.0000)"]);
        assert_eq!(rows[2].last().unwrap(), "50.0%");
        let html = comparison.report().html();
        for part in ["Loss at every position", "Short tasks", "LongBench", "Left out", "piqa acc"] {
            assert!(html.contains(part), "{part}");
        }
        assert!(!html.contains("How long each head remembers"));
        assert_eq!(comparison.json()["tasks"]["results"][0]["task"], "piqa");
    }
}
