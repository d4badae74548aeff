//! What a run prints at its end: its figures and the next commands.

use std::path::Path;

use fox_train::Summary;

use crate::output;

/// How far the lowest held-out loss is below the last one where it is worth a line, in nats.
const OVERFITTING: f64 = 0.01;

/// The figures of a run and what to do with it.
pub fn text(summary: &Summary, out: &Path) -> String {
    let row = |name: &str, value: String| vec![format!("  {name}"), value];
    let loss = |x: f64| format!("{x:.4}");
    let mut rows = vec![
        row("parameters", output::grouped(summary.parameters)),
        row("steps", output::grouped(summary.steps)),
        row("tokens", output::grouped(summary.tokens)),
        row("tokens/s", output::grouped(summary.tokens_per_second as u64)),
    ];
    rows.extend(summary.train_loss.map(|x| row("training loss", loss(x))));
    if let Some(evaluation) = &summary.evaluation {
        rows.push(row(&evaluation.name(), loss(evaluation.loss)));
        for window in &evaluation.by_position {
            let name = format!("  positions {} to {}", window.from, window.to - 1);
            rows.push(row(&name, loss(window.loss)));
        }
        rows.push(row("perplexity per token", format!("{:.3}", evaluation.loss.exp())));
    }
    rows.extend(summary.bits_per_byte.map(|x| row("bits per byte", loss(x))));
    if summary.skips > 0 {
        rows.push(row("steps left out", output::grouped(summary.skips)));
    }
    let end = match summary.finished {
        true => next(summary, out),
        false => {
            format!("stopped after step {}; run the same command again to go on\n", summary.steps)
        }
    };
    format!("{} in {}\n{}{end}", summary.recipe, out.display(), output::table(&rows))
}

/// FoX beside the Transformer of the same sizes, data and steps.
pub fn comparison(fox: (&Summary, &Path), transformer: (&Summary, &Path)) -> String {
    let loss = |summary: &Summary| summary.evaluation.as_ref().map(|e| e.loss);
    let number = |x: Option<f64>| x.map_or("-".into(), |x| format!("{x:.4}"));
    let row = |name: &str, summary: &Summary| {
        let end = summary.evaluation.as_ref().and_then(|e| e.by_position.last()).map(|w| w.loss);
        vec![
            name.to_string(),
            output::grouped(summary.parameters),
            number(loss(summary)),
            number(end),
            number(summary.bits_per_byte),
            output::grouped(summary.tokens_per_second as u64),
        ]
    };
    let head = ["", "parameters", "held-out loss", "last positions", "bits/byte", "tokens/s"];
    let rows =
        [head.map(String::from).to_vec(), row("FoX", fox.0), row("Transformer", transformer.0)];
    let mut text = output::table(&rows);
    if let (Some(a), Some(b)) = (loss(fox.0), loss(transformer.0)) {
        let how = if a < b { "below" } else { "above" };
        text += &format!("FoX is {:.4} nats per token {how} the Transformer\n", (a - b).abs());
    }
    let (a, b) = (fox.1.display(), transformer.1.display());
    text + &format!("fox compare {a} {b} makes a report of both\n")
}

/// The export and the commands that use it.
fn next(summary: &Summary, out: &Path) -> String {
    let run = out.display();
    let mut text = format!("exported to {} (Hugging Face format)\n", out.join("export").display());
    let last = summary.evaluation.as_ref().map(|evaluation| evaluation.loss);
    if let (Some(lowest), Some(last)) = (summary.lowest, last)
        && lowest.loss < last - OVERFITTING
    {
        text += &format!(
            "the held-out loss was lowest after {} tokens ({:.4}): the model overfits, train on fewer with --tokens\n",
            output::grouped(lowest.tokens),
            lowest.loss,
        );
    }
    let more = 2 * summary.tokens.max(1);
    text += "next:\n";
    let inspect = (format!("fox inspect {run}"), "what each head remembers, as a page");
    let longer = (format!("the same command with --tokens {more}"), "train it longer");
    let first = match out.join("export/chat_template.jinja").is_file() {
        true => (format!("fox chat {run}"), "talk to it"),
        false => (format!("fox generate {run} -p \"...\""), "continue a text"),
    };
    let commands = match summary.evaluation.as_ref().is_some_and(|evaluation| evaluation.masked) {
        true => [
            (format!("fox eval loss {run}"), "pseudo-likelihood of held-out text"),
            inspect,
            (format!("fox embed {run} --text \"...\""), "the vector of a text"),
            longer,
        ],
        false => [first, inspect, (format!("fox serve {run}"), "page and HTTP server"), longer],
    };
    for (command, what) in commands {
        text += &format!("  {command:<44} {what}\n");
    }
    text
}
