//! A line chart as SVG: axes with round numbers, one colour per line, a legend.

use std::fmt::Write as _;

/// A line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// `(x, y)`, in order of x.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 900.0;
const PLOT: (f64, f64, f64, f64) = (70.0, 40.0, 560.0, 400.0);
const COLORS: [&str; 10] = [
    "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf",
    "#bcbd22", "#7f7f7f",
];

/// Linear in both axes, scaled to the points. Every tenth line has another dash pattern.
pub fn line_chart(title: &str, x_label: &str, y_label: &str, series: &[Series]) -> String {
    let (left, top, width, height) = PLOT;
    let all =
        || series.iter().flat_map(|s| &s.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    let (x0, x1) = range(all().map(|p| p.0));
    let (y0, y1) = range(all().map(|p| p.1));
    let px = |x: f64| left + (x - x0) / (x1 - x0) * width;
    let py = |y: f64| top + height - (y - y0) / (y1 - y0) * height;
    let total = (top + height + 60.0).max(top + 22.0 * series.len() as f64 + 20.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {total}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{total}\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"24\" font-size=\"16\">{}</text>\n",
        escape(title)
    );
    // Writing to a String cannot fail.
    for tick in ticks(x0, x1) {
        let (x, bottom) = (px(tick), top + height);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#eee\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 18.0,
            short(tick)
        );
    }
    for tick in ticks(y0, y1) {
        let (y, right) = (py(tick), left + width);
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#eee\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 8.0,
            y + 4.0,
            short(tick)
        );
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#444\"/>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(18 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        left + width / 2.0,
        top + height + 42.0,
        escape(x_label),
        top + height / 2.0,
        escape(y_label)
    );
    for (i, line) in series.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        let dash = ["none", "6 3", "2 3"][i / COLORS.len() % 3];
        let mut path = String::new();
        for (x, y) in line.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite()) {
            let _ = write!(path, "{:.1},{:.1} ", px(*x), py(*y));
        }
        let legend = top + 12.0 + 22.0 * i as f64;
        let start = left + width + 16.0;
        let _ = writeln!(
            svg,
            "<polyline points=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/>\
             <line x1=\"{start}\" y1=\"{legend}\" x2=\"{}\" y2=\"{legend}\" stroke=\"{color}\" stroke-width=\"2.5\" stroke-dasharray=\"{dash}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            start + 22.0,
            start + 28.0,
            legend + 4.0,
            escape(&line.name)
        );
    }
    svg + "</svg>\n"
}

/// The least and greatest value, a little apart in any case.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    let margin = ((high - low) * 0.03).max(1e-9 + low.abs() * 1e-6);
    (low - margin, high + margin)
}

/// Four to ten round numbers between two values.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let raw = (high - low) / 6.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

/// A number without needless digits: `2.5`, `300k`, `1.2M`.
fn short(x: f64) -> String {
    let (value, unit) = match x.abs() {
        a if a >= 1e9 => (x / 1e9, "B"),
        a if a >= 1e6 => (x / 1e6, "M"),
        a if a >= 1e4 => (x / 1e3, "k"),
        _ => (x, ""),
    };
    let text = format!("{value:.3}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let all = ticks(0.3, 5.2);
        assert_eq!(all, [1.0, 2.0, 3.0, 4.0, 5.0]);
        for (low, high) in [(0.0, 1.0), (1e-6, 3e-6), (-4.0, 900.0), (2.31, 2.34)] {
            let all = ticks(low, high);
            assert!((3..=10).contains(&all.len()), "{low} {high}: {all:?}");
            assert!(all.iter().all(|t| *t >= low && *t <= high));
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(short(2.5), "2.5");
        assert_eq!(short(300_000.0), "300k");
        assert_eq!(short(1_200_000.0), "1.2M");
        assert_eq!(short(0.0), "0");
    }

    #[test]
    fn a_chart_has_every_line_and_survives_odd_values() {
        let series = |name: &str, points: &[(f64, f64)]| Series {
            name: name.into(),
            points: points.to_vec(),
        };
        let svg = line_chart(
            "a < b",
            "x",
            "y",
            &[series("one", &[(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)]), series("none", &[])],
        );
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN"), "{svg}");
        assert!(line_chart("", "", "", &[]).ends_with("</svg>\n"));
    }
}
