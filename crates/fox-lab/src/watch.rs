//! The page of a run under way: loss, speed, learning rate and half-lives of the heads, read from its folder.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use fox_eval::report::Report;
use fox_plot::{HeatMap, LineChart, Scale, Series};
use fox_train::metrics::{EvalRecord, MetricsLog, Record, StepRecord};
use fox_train::{Recipe, RunFolder};

use crate::output;

/// Seconds after which a browser loads the page again.
const REFRESH: u64 = 5;
/// Bytes of a request that are read, and how long it may take to come.
const REQUEST_BYTES: u64 = 8192;
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// Points of a curve; a longer log is thinned out.
const MOST_POINTS: usize = 1000;
/// Heads of a layer that a table shows; more are left to the curves.
const MOST_HEADS: usize = 32;

/// The page of a run.
///
/// # Errors
/// A folder without a run, or files of it that cannot be read.
pub fn page(run: &Path) -> Result<Report> {
    let recipe = RunFolder::recipe(run)?;
    let records = MetricsLog::read(run)?.records;
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    for record in records {
        match record {
            Record::Train(step) => steps.push(step),
            Record::Eval(eval) => evals.push(eval),
        }
    }
    let title = run.file_name().unwrap_or(run.as_os_str()).to_string_lossy();
    let info = RunFolder::info(run)?;
    let lead = format!("{}, {} parameters", info.recipe, output::grouped(info.parameters));
    let mut page = Report::new(&format!("{title}: training"), &lead);
    let Some(last) = steps.last() else {
        page.text("No step is written yet; this page loads again.");
        return Ok(page);
    };
    page.facts(&facts(&recipe, last, evals.last()));
    page.charts(&[loss_chart(&steps, &evals), speed_chart(&steps), rate_chart(&steps)]);
    let gates: Vec<&StepRecord> = steps.iter().filter(|s| heads(s).next().is_some()).collect();
    if let Some(now) = gates.last() {
        page.heading("Half-lives of the forget gates");
        page.text(
            "Tokens after which a head weighs a key half as much; long ones are needed to recall what stands far back.",
        );
        page.charts(&[memory_chart(&gates), memory_map(now)]);
    }
    page.footer(&format!("Made by fox watch of {}.", run.display()));
    Ok(page)
}

fn facts(recipe: &Recipe, last: &StepRecord, eval: Option<&EvalRecord>) -> Vec<(String, String)> {
    let fact = |value: String, name: &str| (value, name.to_string());
    let steps = recipe.steps();
    let left = steps.saturating_sub(last.step) * recipe.tokens_per_step();
    let mut facts = vec![
        fact(format!("{:.0}%", 100.0 * last.step as f64 / steps.max(1) as f64), "of the steps"),
        fact(output::grouped(last.tokens), "tokens"),
        fact(last.loss.map_or("not finite".into(), |x| format!("{x:.4}")), "training loss"),
    ];
    facts.extend(eval.map(|eval| fact(format!("{:.4}", eval.evaluation.loss), "held-out loss")));
    facts.push(fact(output::grouped(last.tokens_per_second.round() as u64), "tokens/s"));
    let seconds = left as f64 / last.tokens_per_second.max(1e-9);
    facts.push(match left {
        0 => fact("finished".into(), "state"),
        _ => fact(output::duration(seconds), "left"),
    });
    facts
}

/// Every n-th of many values, and the last one.
fn thinned<T>(values: &[T]) -> impl Iterator<Item = &T> {
    let every = values.len().div_ceil(MOST_POINTS).max(1);
    let last = values.len().saturating_sub(1);
    values.iter().enumerate().filter(move |(i, _)| i % every == 0 || *i == last).map(|(_, v)| v)
}

fn curve(steps: &[StepRecord], value: impl Fn(&StepRecord) -> Option<f64>) -> Vec<(f64, f64)> {
    thinned(steps).filter_map(|s| Some((s.tokens as f64, value(s)?))).collect()
}

fn loss_chart(steps: &[StepRecord], evals: &[EvalRecord]) -> String {
    let mut chart = LineChart::new("Loss", "tokens", "nats per token");
    let train = curve(steps, |s| s.loss);
    let held_out: Vec<(f64, f64)> =
        thinned(evals).map(|e| (e.tokens as f64, e.evaluation.loss)).collect();
    // The first steps are far above all others and would flatten the rest.
    let settled = train.iter().skip(train.len() / 10).chain(&held_out).map(|(_, y)| *y);
    let (low, high) = settled.fold((f64::MAX, f64::MIN), |(l, h), y| (l.min(y), h.max(y)));
    if low < high {
        chart.y_range = Some((low - 0.05 * (high - low), high + 0.05 * (high - low)));
    }
    chart.series.push(Series::new("training", 0, train));
    if !held_out.is_empty() {
        chart.series.push(Series::new("held out", 1, held_out));
    }
    chart.fragment()
}

fn speed_chart(steps: &[StepRecord]) -> String {
    let mut chart = LineChart::new("Speed", "tokens", "tokens/s");
    chart.series.push(Series::new("tokens/s", 0, curve(steps, |s| Some(s.tokens_per_second))));
    chart.fragment()
}

fn rate_chart(steps: &[StepRecord]) -> String {
    let mut chart = LineChart::new("Learning rate", "tokens", "learning rate");
    chart.series.push(Series::new("learning rate", 0, curve(steps, |s| Some(s.lr))));
    chart.fragment()
}

/// Half-lives of all heads that have one, with layer and head.
fn heads(step: &StepRecord) -> impl Iterator<Item = (usize, usize, f64)> {
    let layers = step.half_lives.iter().flatten().enumerate();
    let heads =
        layers.flat_map(|(l, heads)| heads.iter().enumerate().map(move |(h, x)| (l, h, *x)));
    heads.filter(|(_, _, x)| x.is_finite() && *x > 0.0)
}

fn memory_chart(steps: &[&StepRecord]) -> String {
    let mut chart = LineChart::new("Over the run", "tokens", "half-life in tokens");
    chart.y_scale = Scale::Log10;
    let sorted = |step: &StepRecord| {
        let mut all: Vec<f64> = heads(step).map(|(_, _, x)| x).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    // Twice the quantile.
    let at = |step: &StepRecord, halves: usize| {
        let all = sorted(step);
        (step.tokens as f64, all[halves * (all.len() - 1) / 2])
    };
    for (color, (name, halves)) in
        [("longest", 2), ("median", 1), ("shortest", 0)].into_iter().enumerate()
    {
        let points = thinned(steps).map(|step| at(step, halves)).collect();
        chart.series.push(Series::new(name, color, points));
    }
    chart.fragment()
}

fn memory_map(step: &StepRecord) -> String {
    let layers = step.half_lives.as_deref().unwrap_or_default();
    let columns = layers.iter().map(Vec::len).max().unwrap_or(0).min(MOST_HEADS);
    let value = |layer: &Vec<f64>, head: usize| {
        let x = layer.get(head).copied().unwrap_or(f64::NAN);
        if x.is_finite() && x > 0.0 { x.log10() } else { f64::NAN }
    };
    let values: Vec<f64> =
        layers.iter().flat_map(|layer| (0..columns).map(move |h| value(layer, h))).collect();
    let high = values.iter().copied().filter(|x| x.is_finite()).fold(1.0, f64::max);
    let map = HeatMap {
        title: format!("Each head after step {}", step.step),
        x_label: "head".into(),
        y_label: "layer".into(),
        cols: (0..columns).map(|h| h.to_string()).collect(),
        rows: (0..layers.len()).map(|l| l.to_string()).collect(),
        values,
        range: (0.0, high),
        label: |x| match 10f64.powf(x) {
            tokens if tokens < 10.0 => format!("{tokens:.1}"),
            tokens => format!("{tokens:.0}"),
        },
    };
    map.fragment()
}

/// Answers requests for the page of a run, one after the other, until the process ends. A request that does not come in
/// time is dropped.
///
/// # Errors
/// A socket that cannot accept connections any more.
pub fn serve(listener: &TcpListener, run: &Path) -> Result<()> {
    for connection in listener.incoming() {
        // A browser that goes away, or sends nothing, must not end the server.
        let _ = answer(connection?, run);
    }
    Ok(())
}

fn answer(connection: TcpStream, run: &Path) -> Result<()> {
    connection.set_read_timeout(Some(REQUEST_TIME))?;
    connection.set_write_timeout(Some(REQUEST_TIME))?;
    let mut line = String::new();
    BufReader::new((&connection).take(REQUEST_BYTES)).read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (status, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/")) => match page(run) {
            Ok(page) => ("200 OK", page.html()),
            Err(error) => ("500 Internal Server Error", fox_plot::escape(&format!("{error:#}"))),
        },
        (Some("GET"), _) => ("404 Not Found", "the page is /".into()),
        _ => ("405 Method Not Allowed", "only GET is answered".into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {}\r\nRefresh: {REFRESH}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
        body.len()
    );
    (&connection).write_all(head.as_bytes())?;
    (&connection).write_all(body.as_bytes())?;
    Ok(())
}
