//! The report of the demo.

use fox_data::SyntheticTokenizer;
use fox_data::synthetic::SyntheticDocument;
use fox_eval::learning::{Learning, learning_chart};
use fox_eval::loss::Bins;
use fox_eval::needle::{Cell, NeedleMap};
use fox_eval::report::Report;
use fox_plot::{DotPlot, DotRow, Image, LineChart, Scale, Series, VerticalMark};

use super::figures::{Comparison, Figure, FigureKind, SeedFigures};
use super::models::DemoModel;
use super::runs::DemoRun;
use super::{BEYOND, Options, Results, summary};
use crate::{output, provenance};

/// Words of the excerpt before and after a new chapter begins.
const AROUND: usize = 24;
/// Words of the example at the top of the page.
const EXAMPLE: usize = 60;

/// The report, with all numbers.
pub fn report(f: &Results, options: &Options) -> Report {
    let mut page =
        Report::new("What a forget gate is for", &f.figures.verdict(&f.evaluation, false));
    page.charts(&[loss_chart(f).fragment(), forget_chart(f)]);
    forgotten(&mut page, f);
    corpus(&mut page, f, options);
    figures(&mut page, f);
    needles(&mut page, f);
    inside(&mut page, f);
    training(&mut page, f);
    page.heading("A sample from FoX");
    page.text("Sampled from the trained model after the first sentences of a held-out document.");
    page.sample(&f.sample);
    page.heading("Where to go from here");
    page.text("Longer documents, more seeds, shorter training sequences, other heads, your text:");
    page.code(&commands(f, options));
    page.set_numbers(summary::json(f, options));
    let numbers = "the numbers are in demo.json beside this page, the models in the run folders.";
    page.footer(&provenance::footer(&f.device, &provenance::command(), numbers));
    page
}

/// The loss by position of all models, and the attainable loss.
fn loss_chart(f: &Results) -> LineChart {
    let t = f.evaluation.trained_on as f64;
    let mut chart =
        LineChart::new("Loss at every position", "position (tokens)", "loss, nats per token");
    chart.x_scale = Scale::Log2;
    chart.marks = vec![VerticalMark { x: t, label: "training length".into() }];
    // The losses of the first positions are so high that they would flatten the chart.
    let first = t / 8.0;
    for (color, model) in f.figures.models.iter().enumerate() {
        let shown = || model.curve.iter().filter(|(at, _)| *at >= first);
        let points = shown().map(|(at, figure)| (*at, figure.value)).collect();
        let interval = |(at, figure): &(f64, Figure)| {
            let around = figure.interval();
            (*at, around.low, around.high)
        };
        let band = shown().map(interval).collect();
        chart.series.push(Series { band, ..Series::new(model.name, color, points) });
    }
    let names = ["attainable".to_string(), format!("attainable, recalling {t} tokens")];
    for (i, (name, values)) in names.into_iter().zip(&f.attainable).enumerate() {
        let points = binned(values).into_iter().filter(|p| p.0 >= first).collect();
        chart.series.push(Series { dashed: true, ..Series::new(name, [5, 4][i], points) });
    }
    chart
}

/// A curve over positions, averaged over bins.
fn binned(values: &[f64]) -> Vec<(f64, f64)> {
    let bins = Bins::new(values.len().max(1));
    (0..bins.len())
        .map(|bin| {
            let values = &values[bins.range(bin)];
            (bins.center(bin), values.iter().sum::<f64>() / values.len() as f64)
        })
        .collect()
}

/// The forget matrix F of the shown head, with the chapters on its diagonal.
fn forget_chart(f: &Results) -> String {
    let n = f.head.inspection.tokens.len() as f64;
    let Some(forget) = &f.head.picture().forget else { return String::new() };
    forget.fragment(&Image {
        title: format!("What FoX (head {}) remembers: matrix F", f.head.name()),
        x_label: "of the word at position j ...".into(),
        y_label: "... when it reads position i".into(),
        x_max: n,
        y_max: n,
        range: (0.0, 1.0),
        color_label: "fraction that is left".into(),
        aspect: 1.0,
        row_names: Vec::new(),
        diagonal: f
            .head
            .chapters
            .iter()
            .map(|at| (*at as f64, "A new chapter begins.".into()))
            .collect(),
    })
}

/// The gates at the sentence that starts a chapter.
fn forgotten(page: &mut Report, f: &Results) {
    let (gates, tokens) = (&f.head.picture().gates, &f.head.inspection.tokens);
    let Some(&chapter) = f.head.chapters.first() else { return };
    let word = |id: u32| format!(" {}", SyntheticTokenizer.word(id).unwrap_or_default());
    let sentence = chapter..(chapter + 4).min(gates.len());
    let retained: f64 = gates[sentence.clone()].iter().map(|g| f64::from(*g)).product();
    let lowest = sentence.min_by(|a, b| gates[*a].total_cmp(&gates[*b])).unwrap_or(chapter);
    page.text(&format!(
        "\"A new chapter begins.\" invalidates all earlier facts. After that sentence this head retains {:.1}% of its earlier weights. Mean of F between two words of the same chapter: {:.0}%; of different chapters: {:.1}%. Below are the words around the first dot, colored by the head's forget gate (yellow: remember, dark: forget); the lowest gate of the sentence is {:.3}, at \"{}\".",
        100.0 * retained,
        100.0 * f.head.inside,
        100.0 * f.head.across,
        gates[lowest],
        word(tokens[lowest]).trim(),
    ));
    let around = chapter.saturating_sub(AROUND).max(1)..(chapter + 4 + AROUND).min(tokens.len());
    let shown: Vec<(String, f64)> =
        around.map(|i| (word(tokens[i]), f64::from(gates[i]))).collect();
    page.tokens(&shown);
}

fn corpus(page: &mut Report, f: &Results, options: &Options) {
    page.heading("What the models read");
    page.text("In a chapter each person does one thing. A model that has read what Ann does can predict the word after the next \"Ann\", until a new chapter begins: then each person does something else. Chapters have 32 to 2,047 words, so a good model remembers for as long as the chapter lasts, and not longer.");
    let document = SyntheticDocument::new(&f.evaluation.corpus, 0).take(EXAMPLE);
    let ids: Vec<u32> = document.map(|token| token.id).collect();
    page.sample(&format!("{} ...", SyntheticTokenizer.decode(&ids).unwrap_or_default()));
    page.text(&format!(
        "FoX (Pro) and the same layers with RoPE instead of the forget gate, bases 10,000 and 500,000: {:.2}M parameters each, trained from scratch with {} seed{} on {} tokens in sequences of {}, then evaluated on sequences of up to {}. The dashed line is exact: the loss of a predictor that knows all rules of the corpus and their probabilities. No model can be below it.",
        f.models[0].1[0].model.params().count() as f64 / 1e6,
        options.seeds,
        if options.seeds == 1 { "" } else { "s" },
        output::grouped(options.tokens),
        f.evaluation.trained_on,
        f.evaluation.length(),
    ));
}

fn figures(page: &mut Report, f: &Results) {
    page.heading("The figures");
    let mut rows = summary::rows(f);
    // Speed is in another table.
    rows.iter_mut().for_each(|row| row.truncate(5));
    page.table(&rows);
    page.text("Means over seeds and documents with 95% intervals, from a bootstrap over both.");
    page.charts(&[changes(f).fragment(), found(f).fragment()]);
    page.heading("Where FoX wins and where it loses");
    page.text(&f.figures.losses());
    let mut rows =
        vec![["", "FoX", "best Transformer", "difference", ""].map(String::from).to_vec()];
    rows.extend(f.figures.comparisons.iter().map(comparison));
    page.table(&rows);
}

fn comparison(c: &Comparison) -> Vec<String> {
    let value = |v: f64| match c.kind {
        FigureKind::Speed => output::grouped(v as u64),
        FigureKind::Needles => format!("{:.0}%", 100.0 * v),
        FigureKind::Loss => format!("{v:.4}"),
    };
    let difference = match (c.difference, c.kind) {
        (None, _) => format!("{:+.0}%", 100.0 * (c.fox / c.other - 1.0)),
        (Some(d), FigureKind::Needles) => {
            format!("{:+.0}% ({:+.0}..{:+.0})", 100.0 * d.value, 100.0 * d.low, 100.0 * d.high)
        }
        (Some(d), _) => summary::change(&d),
    };
    let verdict = match c.better {
        Some(true) => "better",
        Some(false) => "worse",
        None => "no clear difference",
    };
    let other = format!("{} {}", value(c.other), c.other_name.replace("Transformer ", ""));
    vec![c.what.clone(), value(c.fox), other, difference, verdict.into()]
}

/// The change of the loss by model and seed.
fn changes(f: &Results) -> DotPlot {
    let mut rows = Vec::new();
    for (color, m) in f.figures.models.iter().enumerate() {
        let change = m.change.interval();
        rows.push(DotRow {
            name: m.name.to_string(),
            value: change.value,
            spread: Some((change.low, change.high)),
            color,
        });
        let seed = |s: &SeedFigures| DotRow {
            name: format!("seed {}", s.seed),
            value: s.change,
            spread: None,
            color,
        };
        rows.extend(m.seeds.iter().map(seed));
    }
    DotPlot {
        title: "Change of the loss by seed".into(),
        x_label: "nats; below 0: longer context helps".into(),
        x_scale: Scale::Linear,
        rows,
        legend: Vec::new(),
        marks: vec![(0.0, "no change".into())],
    }
}

/// The fraction of needles found by length.
fn found(f: &Results) -> LineChart {
    let mut chart =
        LineChart::new("Needles found", "length of the prompt (tokens)", "fraction found");
    chart.x_scale = Scale::Log2;
    chart.y_range = Some((0.0, 1.0));
    let t = f.evaluation.trained_on as f64;
    chart.marks = vec![VerticalMark { x: t, label: "training length".into() }];
    for (color, m) in f.figures.models.iter().enumerate() {
        let points = m.needles.iter().map(|(l, figure)| (*l as f64, figure.value)).collect();
        let band = |(l, figure): &(usize, Figure)| {
            let around = figure.interval();
            (*l as f64, around.low, around.high)
        };
        let band = m.needles.iter().map(band).collect();
        chart.series.push(Series { band, ..Series::new(m.name, color, points) });
    }
    let ends = [f.evaluation.grid.lengths[0], f.evaluation.length()];
    let chance = ends.map(|l| (l as f64, f.chance)).to_vec();
    chart.series.push(Series { dashed: true, ..Series::new("chance", 5, chance) });
    chart
}

fn needles(page: &mut Report, f: &Results) {
    page.heading("Needles in a haystack");
    page.text(&format!(
        "The prompt says what a person does, starts a new chapter, and says once, somewhere in a long text, that the same person now does something else. At its end the model is given the name and must predict what the person does now. Texts per cell and seed: {}, all different; guessing finds {:.0}%.",
        f.evaluation.grid.cases,
        100.0 * f.chance
    ));
    let charts: Vec<String> = f
        .models
        .iter()
        .map(|(model, runs)| {
            let map = mean_map(model.name, runs);
            map.accuracy_chart(&f.evaluation.grid, Some(f.evaluation.trained_on)).fragment()
        })
        .collect();
    page.charts(&charts);
}

/// The needle map averaged over seeds.
fn mean_map(name: &str, runs: &[DemoRun]) -> NeedleMap {
    let cell = |i: usize| {
        let cells = runs.iter().map(|run| run.needles.cells[i]);
        let accuracy = cells.map(|c| c.accuracy).sum::<f64>() / runs.len() as f64;
        Cell { accuracy, ..runs[0].needles.cells[i] }
    };
    NeedleMap {
        model: name.to_string(),
        cells: (0..runs[0].needles.cells.len()).map(cell).collect(),
    }
}

fn inside(page: &mut Report, f: &Results) {
    f.head.inspection.add_memory(page);
    f.head.inspection.add_pictures(page, "What FoX forgets and where it looks");
}

fn training(page: &mut Report, f: &Results) {
    page.heading("Training");
    let first = |(model, runs): &(DemoModel, Vec<DemoRun>)| Learning {
        model: model.name.to_string(),
        ..runs[0].learning.clone()
    };
    let learning: Vec<Learning> = f.models.iter().map(first).collect();
    page.charts(&[learning_chart(&learning).fragment()]);
    let mut rows = vec![["", "training time", "tokens/s"].map(String::from).to_vec()];
    for (m, (_, runs)) in f.figures.models.iter().zip(&f.models) {
        let seconds: f64 = runs.iter().map(|r| r.seconds).sum::<f64>() / runs.len() as f64;
        rows.push(vec![
            m.name.to_string(),
            format!("{seconds:.0} s"),
            output::grouped(m.speed as u64),
        ]);
    }
    page.table(&rows);
    page.text(&format!(
        "Means over the seeds, on {}. All runs together took {:.0} s, this command {:.0} s.",
        f.device, f.machine_seconds, f.seconds
    ));
}

fn commands(f: &Results, options: &Options) -> String {
    let run = |i: usize| f.models[i].1[0].folder.display().to_string();
    let t = f.evaluation.trained_on;
    let out = options.out.display();
    let models = format!("FoX={} RoPE={}", run(0), run(1));
    format!(
        "fox eval loss {models} --length {long} --out {out}/loss\n\
         fox eval needle {models} --lengths {t},{},{long} --out {out}/needle\n\
         fox inspect {} --length {long} --out {out}/inspect.html\n\
         fox demo --seeds 5 --out {out}-5\n\
         fox demo --length {} --out {out}-short\n\
         fox train {} --data YOUR-PREPARED-DATA --out runs/mine\n",
        BEYOND * t,
        run(0),
        t / 2,
        f.models[0].0.recipe,
        long = 8 * t,
    )
}
