//! The inspection as numbers and as a report.

use fox_plot::{DotPlot, DotRow, Image, MatrixImage, Scale};
use serde_json::{Value, json};

use super::{GLOBAL_FROM, HeadPicture, HeadSummary, Inspection, LOCAL_BELOW, Reach};
use crate::report::Report;

/// Tokens shown on their gates' colours.
const EXCERPT: usize = 160;
/// Tokens in the table of gates.
const TOKEN_ROWS: usize = 10;

/// Labels of the colour bars of F and A.
const DECAY: &str = "fraction of key j that is left";
const WEIGHT: &str = "log10 of the attention weight";

impl Inspection {
    /// The raw numbers: every head, the pictures' values and the gates of the chosen heads.
    pub fn json(&self) -> Value {
        let matrix = |m: &MatrixImage| {
            // JSON has no NaN: entries above the diagonal are null.
            let rows: Vec<Vec<Option<f32>>> = m
                .values
                .chunks(m.cols)
                .map(|row| row.iter().map(|v| v.is_finite().then_some(*v as f32)).collect())
                .collect();
            json!(rows)
        };
        let picture = |p: &HeadPicture| {
            json!({
                "layer": p.place.0,
                "head": p.place.1,
                "gates": p.gates,
                "forget_matrix": p.forget.as_ref().map(matrix),
                "attention_map": matrix(&p.attention.map),
                "queries_sampled": p.attention.rows,
            })
        };
        json!({
            "model": self.model,
            "tokens": self.tokens,
            "log_pruning_tolerance": self.log_pruning_tolerance,
            "heads": self.heads,
            "pictures": self.pictures.iter().map(picture).collect::<Vec<_>>(),
            "token_gates": self.token_gates,
        })
    }

    /// Fraction of all attention blocks that pruning skips.
    pub fn pruned(&self) -> f64 {
        let sum = |pick: fn(&HeadSummary) -> i64| self.heads.iter().map(pick).sum::<i64>() as f64;
        1.0 - sum(|h| h.blocks_visited) / sum(|h| h.blocks).max(1.0)
    }

    /// The self-contained page; `name` gives the name of a token, `texts` what each of the first tokens adds to the text.
    pub fn report(&self, name: &dyn Fn(u32) -> String, texts: &[String]) -> Report {
        let mut report = Report::new(
            &format!("What {} forgets", self.model),
            &format!(
                "{} tokens, {} heads. Everything on this page was computed from the model's own forget gates, queries and keys.",
                self.tokens.len(),
                self.heads.len()
            ),
        );
        self.add_facts(&mut report);
        self.add_memory(&mut report);
        self.add_pictures(&mut report, "A head's forget matrix and its attention");
        self.add_tokens(&mut report, name, texts);
        self.add_table(&mut report);
        report
    }

    fn add_facts(&self, report: &mut Report) {
        let mut facts = Vec::new();
        for reach in [Reach::Local, Reach::Medium, Reach::Global] {
            let count =
                self.heads.iter().filter(|h| h.half_life.is_some_and(|l| l.reach == reach)).count();
            let meaning = match reach {
                Reach::Local => format!("local heads (half-life below {LOCAL_BELOW} tokens)"),
                Reach::Medium => "medium heads".to_string(),
                Reach::Global => format!("global heads ({GLOBAL_FROM} tokens and more)"),
            };
            facts.push((count.to_string(), meaning));
        }
        facts.push((
            format!("{:.0}%", 100.0 * self.pruned()),
            format!("of the attention blocks skipped (tolerance e^{})", self.log_pruning_tolerance),
        ));
        if self.heads.iter().any(|h| h.half_life.is_some()) {
            report.facts(&facts);
        } else {
            report.text("This model has no forget gates: it can only ignore, not forget.");
        }
    }

    /// Half-lives and gates over the text.
    pub fn add_memory(&self, report: &mut Report) {
        let mut charts: Vec<String> =
            half_life_chart(&self.heads).into_iter().map(|c| c.fragment()).collect();
        // Layers without gates have no strip.
        let gated = self.heads.iter().filter(|head| head.half_life.is_some());
        let mut layers: Vec<usize> = gated.map(|head| head.layer).collect();
        layers.dedup();
        for (layer, strip) in layers.into_iter().zip(&self.gate_strips) {
            charts.push(strip.fragment(&Image {
                title: format!("Gates of layer {layer} over the text"),
                x_label: "position (tokens)".into(),
                y_label: String::new(),
                x_max: self.tokens.len() as f64,
                y_max: strip.rows as f64,
                range: (0.0, 1.0),
                color_label: "gate".into(),
                aspect: (18.0 / strip.rows as f64).clamp(1.2, 5.0),
                row_names: (0..strip.rows).map(|h| format!("H{h}")).collect(),
                diagonal: Vec::new(),
            }));
        }
        if !charts.is_empty() {
            report.heading("How long each head remembers");
            report.text("The half-life is how many tokens it takes until what a head has read weighs half. Dots are medians over the text, lines reach from the 10% to the 90% quantile.");
            report.charts(&charts);
        }
    }

    /// F and A of the chosen heads.
    pub fn add_pictures(&self, report: &mut Report, heading: &str) {
        report.heading(heading);
        report.text("Left, the forget matrix F: how much of key j is left when query i looks. Right, the attention map A of the same head: where it looks, on a logarithmic scale. A head whose memory is short beside the text is also shown at the end of it, closer.");
        report.charts(&self.attention_charts());
    }

    /// F, where there are gates, and A of the chosen heads, as SVG fragments.
    pub(crate) fn attention_charts(&self) -> Vec<String> {
        let mut charts = Vec::new();
        for picture in &self.pictures {
            let n = self.tokens.len() as f64;
            let name = format!("L{} H{}", picture.place.0, picture.place.1);
            let image = |title: String, color_label: &str, range| Image {
                title,
                color_label: color_label.into(),
                x_label: "key j (tokens)".into(),
                y_label: "query i".into(),
                x_max: n,
                y_max: n,
                range,
                aspect: 1.0,
                row_names: Vec::new(),
                diagonal: Vec::new(),
            };
            if let Some(forget) = &picture.forget {
                let title = format!("{name}: forget matrix F");
                charts.push(forget.fragment(&image(title, DECAY, (0.0, 1.0))));
            }
            let map = log_shares(&picture.attention.map);
            let title = format!("{name}: attention map A, log10 of the weight");
            charts.push(map.fragment(&image(title, WEIGHT, (-3.0, 0.0))));
            let Some(close_up) = &picture.close_up else { continue };
            let last = close_up.last;
            let image = |title: String, color_label: &str, range| Image {
                x_label: format!("key j (of the last {last} tokens)"),
                x_max: last as f64,
                y_max: last as f64,
                ..image(title, color_label, range)
            };
            let title = format!("{name}: F of the last {last} tokens");
            charts.push(close_up.forget.fragment(&image(title, DECAY, (0.0, 1.0))));
            let title = format!("{name}: A of the last {last} tokens, log10");
            let map = log_shares(&close_up.attention);
            charts.push(map.fragment(&image(title, WEIGHT, (-3.0, 0.0))));
        }
        charts
    }

    fn add_tokens(&self, report: &mut Report, name: &dyn Fn(u32) -> String, texts: &[String]) {
        if self.token_gates.is_empty() {
            return;
        }
        report.heading("What makes it forget");
        report.text("Mean gate over all heads when a token is read; tokens that occur at least twice. A low gate wipes what came before.");
        let mut rows = vec![["token", "occurs", "mean gate"].map(String::from).to_vec()];
        let row = |t: &super::TokenGate| {
            let text = format!("{:?}", name(t.id));
            vec![text, t.count.to_string(), format!("{:.3}", t.mean_gate)]
        };
        let n = self.token_gates.len();
        if n > 2 * TOKEN_ROWS {
            rows.extend(self.token_gates[..TOKEN_ROWS].iter().map(row));
            rows.push(vec!["...".into(), String::new(), String::new()]);
            rows.extend(self.token_gates[n - TOKEN_ROWS..].iter().map(row));
        } else {
            rows.extend(self.token_gates.iter().map(row));
        }
        report.table(&rows);
        for picture in self.pictures.iter().filter(|p| p.forget.is_some()).take(2) {
            report.text(&format!(
                "The start of the text on the gates of L{} H{} (yellow: kept, dark: forgotten):",
                picture.place.0, picture.place.1
            ));
            let tokens = texts.iter().zip(&picture.gates).take(EXCERPT);
            let shown = tokens.filter(|(text, _)| !text.is_empty());
            let tokens: Vec<(String, f64)> =
                shown.map(|(text, gate)| (text.clone(), f64::from(*gate))).collect();
            report.tokens(&tokens);
        }
    }

    fn add_table(&self, report: &mut Report) {
        report.heading("All heads");
        let head = [
            "head",
            "half-life",
            "reach",
            "mean gate",
            "entropy (nats)",
            "evenness",
            "mean distance",
            "blocks pruned",
        ];
        let mut rows = vec![head.map(String::from).to_vec()];
        for h in &self.heads {
            rows.push(vec![
                h.name(),
                h.half_life.map_or("-".into(), |l| tokens(l.median)),
                h.half_life.map_or("-".into(), |l| l.reach.name().into()),
                h.mean_gate.map_or("-".into(), |g| format!("{g:.3}")),
                format!("{:.2}", h.entropy),
                format!("{:.2}", h.evenness),
                tokens(h.distance),
                format!("{:.0}%", 100.0 * h.pruned()),
            ]);
        }
        report.table(&rows);
    }
}

/// Half-life of every head; `None` without gates.
pub fn half_life_chart(heads: &[HeadSummary]) -> Option<DotPlot> {
    // An axis has no place for infinity; this is far beyond any text.
    const FOREVER: f64 = 1e6;
    let row = |h: &HeadSummary| {
        let life = h.half_life?;
        Some(DotRow {
            name: h.name(),
            value: life.median.clamp(0.5, FOREVER),
            spread: Some((life.low.clamp(0.5, FOREVER), life.high.clamp(0.5, FOREVER))),
            color: match life.reach {
                Reach::Local => 0,
                Reach::Medium => 4,
                Reach::Global => 1,
            },
        })
    };
    let rows: Vec<DotRow> = heads.iter().filter_map(row).collect();
    (!rows.is_empty()).then(|| DotPlot {
        title: "Half-life of every head".into(),
        x_label: "tokens until half is forgotten".into(),
        x_scale: Scale::Log2,
        rows,
        legend: vec![("local".into(), 0), ("medium".into(), 4), ("global".into(), 1)],
        marks: Vec::new(),
    })
}

/// Weights on a logarithmic scale; zeros map to the lower end.
fn log_shares(map: &MatrixImage) -> MatrixImage {
    let log = |v: &f64| if v.is_nan() { f64::NAN } else { v.max(1e-9).log10() };
    MatrixImage { values: map.values.iter().map(log).collect(), ..map.clone() }
}

fn tokens(count: f64) -> String {
    match count {
        c if c >= 1e6 => "> 1M".into(),
        c if c >= 100.0 => format!("{c:.0}"),
        c => format!("{c:.1}"),
    }
}
