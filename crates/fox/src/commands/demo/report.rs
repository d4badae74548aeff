//! The demo's report: a page, its numbers, and a few lines for the terminal.

use fox_eval::learning::learning_chart;
use fox_eval::loss::{LossCurve, loss_chart, slope_chart};
use fox_eval::report::Page;
use fox_plot::{DotPlot, DotRow, Scale, Series};
use serde_json::{Value, json};

use super::train::Trained;
use super::{Args, BEYOND, Findings};
use crate::output;

/// Changes of the loss below this many nats are within the noise of a few dozen documents.
const LEVEL: f64 = 0.03;

/// The mean loss inside the training length, and over the last positions, four times as far.
struct Outcome {
    inside: f64,
    beyond: f64,
}

impl Outcome {
    fn new(curve: &LossCurve, trained_on: usize) -> Self {
        Outcome {
            inside: curve.mean_over(trained_on / 2..trained_on),
            beyond: curve.mean_over((BEYOND - 1) * trained_on..BEYOND * trained_on),
        }
    }

    fn change(&self) -> f64 {
        self.beyond - self.inside
    }
}

impl Findings {
    fn trained_on(&self) -> usize {
        self.fox.training_length
    }

    fn outcomes(&self) -> Vec<Outcome> {
        self.curves.iter().map(|c| Outcome::new(c, self.trained_on())).collect()
    }

    fn contestants(&self) -> [&Trained; 2] {
        [&self.fox, &self.transformer]
    }
}

/// The page.
pub fn page(f: &Findings, args: &Args) -> Page {
    let mut page = Page::new(
        "A Forgetting Transformer and a Transformer",
        &format!(
            "FoX (Pro) and the same layer with RoPE instead of a forget gate: two models of {:.2}M parameters, trained from scratch on {} tokens of the embedded corpus in sequences of {}, then evaluated on sequences of {}. {:.0} seconds on {}.",
            f.fox.parameters as f64 / 1e6,
            output::grouped(args.tokens),
            f.trained_on(),
            BEYOND * f.trained_on(),
            f.seconds,
            f.device,
        ),
    );
    headline(&mut page, f);
    losses(&mut page, f);
    needles(&mut page, f);
    inside(&mut page, f);
    speed(&mut page, f);
    page.heading("A sample from FoX");
    page.text("Words drawn from the trained model, after the first sentences of a document it has never seen. In this corpus the name that follows a title was said before, or is new.");
    page.sample(&f.sample);
    page.heading("Where to go from here");
    page.text(
        "Longer documents, other needles, another look inside, and training on text of your own:",
    );
    page.code(&commands(f, args));
    page.footer("Made by fox demo. The numbers are in demo.json beside this page; the models are in the run folders.");
    page
}

fn headline(page: &mut Page, f: &Findings) {
    let outcomes = f.outcomes();
    let longest = BEYOND * f.trained_on();
    let mut facts = Vec::new();
    for (trained, outcome) in f.contestants().into_iter().zip(&outcomes) {
        facts.push((
            format!("{:+.3}", outcome.change()),
            format!(
                "{}: change of the loss from the training length ({:.3}) to {BEYOND} times beyond ({:.3} nats)",
                trained.name, outcome.inside, outcome.beyond
            ),
        ));
    }
    for map in &f.needles {
        facts.push((
            format!("{:.0}%", 100.0 * map.accuracy_at(longest)),
            format!(
                "{}: needles found at {longest} tokens (chance {:.0}%)",
                map.model,
                100.0 * f.chance
            ),
        ));
    }
    facts.push((
        format!("{:.0}%", 100.0 * f.inspection.pruned()),
        "of FoX's attention blocks skipped by pruning (ACP), for the same output".into(),
    ));
    page.facts(&facts);
    page.text(&verdict(f));
}

/// What came out, in one paragraph, whatever it is.
fn verdict(f: &Findings) -> String {
    let outcomes = f.outcomes();
    let describe = |o: &Outcome| {
        let word = match o.change() {
            c if c < -LEVEL => "keeps falling",
            c if c <= LEVEL => "stays level",
            _ => "rises",
        };
        format!("{word} ({:+.3})", o.change())
    };
    format!(
        "Beyond the training length of {} tokens, the loss of {} {} and the loss of {} {}. A model that could use everything it has read would reach the dashed line.",
        f.trained_on(),
        f.fox.name,
        describe(&outcomes[0]),
        f.transformer.name,
        describe(&outcomes[1]),
    )
}

fn losses(page: &mut Page, f: &Findings) {
    page.heading("Learning, and the loss at every position");
    let learning = learning_chart(&f.contestants().map(|t| t.learning.clone()));
    let mut loss = loss_chart(&f.curves);
    let first =
        loss.series.iter().filter_map(|s| s.points.first()).map(|p| p.0).fold(1.0, f64::max);
    let names = ["attainable, perfect memory", "attainable, memory as long as in training"];
    for (i, (name, values)) in names.iter().zip(&f.attainable).enumerate() {
        let points = binned(values).into_iter().filter(|p| p.0 >= first).collect();
        let series = Series { dashed: true, ..Series::new(*name, [2, 5][i], points) };
        loss.series.push(series);
    }
    page.charts(&[
        learning.fragment(),
        loss.fragment(),
        slope_chart(&f.curves).fragment(),
        by_window(f).fragment(),
    ]);
    page.text("The corpus states facts once and asks for them much later, at all distances, so every doubling of the context makes a perfect reader better by the same amount. The bands are 95% bootstrap intervals over documents.");
    let mut rows = vec![
        ["", "parameters", "training loss", "up to training length", &format!("at {BEYOND}x")]
            .map(String::from)
            .to_vec(),
    ];
    for (trained, o) in f.contestants().into_iter().zip(f.outcomes()) {
        rows.push(vec![
            trained.name.clone(),
            output::grouped(trained.parameters),
            trained.learning.smoothed().last().map_or("-".into(), |p| format!("{:.4}", p.1)),
            format!("{:.4}", o.inside),
            format!("{:.4}", o.beyond),
        ]);
    }
    page.table(&rows);
}

/// Mean loss over stretches as long as a training sequence.
fn by_window(f: &Findings) -> DotPlot {
    let t = f.trained_on();
    let mut rows = Vec::new();
    for window in 0..BEYOND {
        for (color, curve) in f.curves.iter().enumerate() {
            let stretch = format!("{}..{}", window * t, (window + 1) * t);
            rows.push(DotRow {
                name: if color == 0 { stretch } else { String::new() },
                value: curve.mean_over(window * t..(window + 1) * t),
                spread: None,
                color,
            });
        }
    }
    DotPlot {
        title: "Mean loss by stretch of the document".into(),
        x_label: "loss, nats".into(),
        x_scale: Scale::Linear,
        rows,
        legend: f.contestants().iter().enumerate().map(|(c, t)| (t.name.clone(), c)).collect(),
        marks: Vec::new(),
    }
}

fn needles(page: &mut Page, f: &Findings) {
    page.heading("Needles in a haystack");
    page.text(&format!(
        "A title with its name stands somewhere in a long text; at its end the model is given the title and must say the name. {} texts per cell; guessing finds {:.0}%.",
        f.grid.cases,
        100.0 * f.chance
    ));
    let charts: Vec<String> = f
        .needles
        .iter()
        .map(|map| map.accuracy_chart(&f.grid, Some(f.trained_on())).fragment())
        .chain(
            f.needles
                .iter()
                .map(|map| map.log_prob_chart(&f.grid, Some(f.trained_on())).fragment()),
        )
        .collect();
    page.charts(&charts);
}

fn inside(page: &mut Page, f: &Findings) {
    f.inspection.add_memory(page);
    f.inspection.add_pictures(page, "What FoX forgets and where it looks");
    page.text("For comparison, a head of the Transformer on the same text: it has no forget matrix, only attention.");
    page.charts(&f.transformer_inspection.attention_charts());
    let mut rows = vec![
        ["FoX head", "half-life", "reach", "entropy (nats)", "blocks pruned"]
            .map(String::from)
            .to_vec(),
    ];
    for h in &f.inspection.heads {
        rows.push(vec![
            h.name(),
            h.half_life.map_or("-".into(), |l| format!("{:.1}", l.median.min(1e6))),
            h.half_life.map_or("-".into(), |l| l.reach.name().into()),
            format!("{:.2}", h.entropy),
            format!("{:.0}%", 100.0 * h.pruned()),
        ]);
    }
    page.table(&rows);
}

fn speed(page: &mut Page, f: &Findings) {
    page.heading("Speed");
    page.text("The floor is the time that the matrix products of a step, those of attention included, would take at the rate this machine reaches in a plain matrix product; norms, gates, the softmax and the optimizer come on top of it.");
    let mut rows =
        vec![["", "training time", "tokens per second", "of the floor"].map(String::from).to_vec()];
    for trained in f.contestants() {
        rows.push(vec![
            trained.name.clone(),
            format!("{:.0} s", trained.seconds),
            output::grouped(trained.tokens_per_second as u64),
            format!("{:.0}%", 100.0 * trained.floor_fraction),
        ]);
    }
    page.table(&rows);
    page.text(&format!("Evaluation took {:.0} s.", f.evaluation_seconds));
}

fn commands(f: &Findings, args: &Args) -> String {
    let (fox, transformer) = (f.fox.folder.display(), f.transformer.folder.display());
    let t = f.trained_on();
    let out = args.out.display();
    let models = format!("FoX={fox} Transformer={transformer}");
    format!(
        "fox eval loss {models} --length {} --out {out}/loss\n\
         fox eval needle {models} --lengths {t},{},{} --mode standard --out {out}/needle\n\
         fox inspect {fox} --length {} --out {out}/inspect.html\n\
         fox demo --tokens {} --out {out}-longer\n\
         fox train {} --data YOUR-PREPARED-DATA --out runs/mine\n",
        16 * t,
        4 * t,
        16 * t,
        16 * t,
        4 * args.tokens,
        f.fox.recipe,
    )
}

/// The numbers of the page.
pub fn json(f: &Findings) -> Value {
    let outcomes = f.outcomes();
    let contestant = |(i, t): (usize, &Trained)| {
        json!({
            "name": t.name,
            "parameters": t.parameters,
            "training_seconds": t.seconds,
            "tokens_per_second": t.tokens_per_second,
            "floor_fraction": t.floor_fraction,
            "training_losses": t.learning.losses,
            "heldout_losses": t.heldout,
            "loss_inside": outcomes[i].inside,
            "loss_beyond": outcomes[i].beyond,
            "loss_curve": f.curves[i],
            "needles": f.needles[i],
        })
    };
    json!({
        "training_length": f.trained_on(),
        "evaluation_length": BEYOND * f.trained_on(),
        "needle_grid": f.grid,
        "chance": f.chance,
        "models": f.contestants().into_iter().enumerate().map(contestant).collect::<Vec<_>>(),
        "heads": f.inspection.heads,
        "pruned": f.inspection.pruned(),
        "sample": f.sample,
        "seconds": f.seconds,
        "evaluation_seconds": f.evaluation_seconds,
        "device": f.device,
    })
}

/// The lines for the terminal.
pub fn text(f: &Findings, args: &Args) -> String {
    let longest = BEYOND * f.trained_on();
    let mut rows = vec![
        [
            "",
            "loss, training length",
            &format!("loss at {longest}"),
            &format!("needles at {longest}"),
            "tokens/s",
        ]
        .map(String::from)
        .to_vec(),
    ];
    for (i, (trained, o)) in f.contestants().into_iter().zip(f.outcomes()).enumerate() {
        rows.push(vec![
            trained.name.clone(),
            format!("{:.4}", o.inside),
            format!("{:.4}", o.beyond),
            format!("{:.0}%", 100.0 * f.needles[i].accuracy_at(longest)),
            format!("{:.0}", trained.tokens_per_second),
        ]);
    }
    format!(
        "{}{}\n{:.0} s in all; report: {}\n",
        output::table(&rows),
        verdict(f),
        f.seconds,
        args.out.join("report.html").display()
    )
}

/// A curve of every position, averaged over positions of equal ratio.
fn binned(values: &[f64]) -> Vec<(f64, f64)> {
    let bins = fox_eval::loss::Bins::new(values.len().max(1));
    (0..bins.len())
        .map(|bin| {
            let part = &values[bins.range(bin)];
            (bins.center(bin), part.iter().sum::<f64>() / part.len() as f64)
        })
        .collect()
}
