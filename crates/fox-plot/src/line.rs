//! Line charts: series with bands, a legend, and marks on the x axis.

use std::fmt::Write as _;

use super::axis::Axis;
use super::layout::{self, ROW, shortened, text_width};
use super::{Anchor, COLORS, Scale, WIDTH, escape, n, open, segment, series_color, text};

/// One series.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// The points, in order of `x`.
    pub points: Vec<(f64, f64)>,
    /// A band around the line: `(x, low, high)`.
    pub band: Vec<(f64, f64, f64)>,
    /// Index of the series colour.
    pub color: usize,
    /// Whether it is dashed: a reference, or a series beyond the number of colours.
    pub dashed: bool,
}

impl Series {
    /// A solid line without a band.
    pub fn new(name: impl Into<String>, color: usize, points: Vec<(f64, f64)>) -> Self {
        Series { name: name.into(), points, color, ..Series::default() }
    }
}

/// A mark on the x axis, such as the training length.
#[derive(Clone, Debug)]
pub struct VerticalMark {
    /// Its value.
    pub x: f64,
    /// Its label.
    pub label: String,
}

/// A line chart.
#[derive(Clone, Debug)]
pub struct LineChart {
    /// Title above the chart.
    pub title: String,
    /// Label of the x axis.
    pub x_label: String,
    /// Label of the y axis.
    pub y_label: String,
    /// Scale of the x axis.
    pub x_scale: Scale,
    /// Scale of the y axis.
    pub y_scale: Scale,
    /// The series.
    pub series: Vec<Series>,
    /// Vertical marks.
    pub marks: Vec<VerticalMark>,
    /// A fixed range of the y axis; lines are clipped to it.
    pub y_range: Option<(f64, f64)>,
}

impl LineChart {
    /// A chart with linear axes, no lines and no marks.
    pub fn new(
        title: impl Into<String>,
        x_label: impl Into<String>,
        y_label: impl Into<String>,
    ) -> Self {
        LineChart {
            title: title.into(),
            x_label: x_label.into(),
            y_label: y_label.into(),
            x_scale: Scale::Linear,
            y_scale: Scale::Linear,
            series: Vec::new(),
            marks: Vec::new(),
            y_range: None,
        }
    }

    /// Adds a series in the next colour; dashed if all colours are used.
    pub fn add_line(&mut self, name: impl Into<String>, points: Vec<(f64, f64)>) {
        let index = self.series.len();
        let dashed = (index / COLORS) % 2 == 1;
        self.series.push(Series { dashed, ..Series::new(name, index, points) });
    }

    /// The SVG fragment.
    pub fn fragment(&self) -> String {
        let right = WIDTH - 14.0;
        let y = match self.y_range {
            Some((low, high)) => Axis::around([low, high].into_iter(), self.y_scale),
            None => Axis::around(self.ys(), self.y_scale).padded(0.02),
        };
        let y = y.ending_at_ticks();
        let y_ticks = y.ticks(5);
        let longest = y_ticks.iter().map(|tick| text_width(&tick.1)).fold(0.0, f64::max);
        let left = (longest + 30.0).max(56.0);
        let x = Axis::around(self.xs(), self.x_scale);
        // Points of a linear axis, such as training steps, end where they end.
        let x = if self.x_scale == Scale::Linear { x } else { x.ending_at_ticks() };
        let x = x.placed(left, right);

        let title = layout::title_lines(&self.title, left);
        let legend = self.legend_rows(right - left);
        let marks: Vec<(f64, &str)> = self
            .marks
            .iter()
            .filter_map(|mark| Some((x.place(mark.x)?, mark.label.as_str())))
            .collect();
        let labels = layout::mark_labels(&marks, left, right);
        let label_rows = labels.iter().map(|label| label.1 + 1).max().unwrap_or(0);
        let legend_top = 35.0 + layout::title_extra(&title);
        let top = legend_top - 5.0 + ROW * legend.len() as f64 + 15.0 * label_rows as f64;
        let bottom = top + 220.0;
        let y = y.placed(bottom, top);

        let mut svg = open(bottom + 42.0, &self.title);
        layout::title(&mut svg, left, &title);
        self.legend(&mut svg, (left, legend_top), right - left, &legend);
        for (value, label) in &y_ticks {
            let Some(at) = y.place(*value) else { continue };
            segment(&mut svg, "grid", (left, at), (right, at));
            text(&mut svg, (left - 6.0, at + 4.0), Anchor::End, "dim", label);
        }
        layout::x_ticks(&mut svg, &x, (top, bottom));
        segment(&mut svg, "axis", (left, bottom), (right, bottom));
        for ((at, label), (center, row)) in marks.iter().zip(labels) {
            segment(&mut svg, "mark", (*at, top), (*at, bottom));
            let above = top - 5.0 - 15.0 * row as f64;
            text(&mut svg, (center, above), Anchor::Middle, "dim", label);
        }
        let clip = format!("clip-{:x}", fingerprint(&self.title));
        let _ = write!(
            svg,
            "<clipPath id=\"{clip}\"><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/></clipPath><g clip-path=\"url(#{clip})\">",
            n(left - 1.5),
            n(top - 1.5),
            n(right - left + 3.0),
            n(bottom - top + 3.0)
        );
        for series in &self.series {
            band(&mut svg, series, &x, &y);
        }
        for series in &self.series {
            line(&mut svg, series, &x, &y);
        }
        svg.push_str("</g>");
        text(&mut svg, ((left + right) / 2.0, bottom + 35.0), Anchor::Middle, "", &self.x_label);
        vertical_label(&mut svg, (13.0, (top + bottom) / 2.0), &self.y_label);
        svg.push_str("</svg>");
        svg
    }

    fn xs(&self) -> impl Iterator<Item = f64> {
        let points = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.0));
        points.chain(self.marks.iter().map(|m| m.x))
    }

    fn ys(&self) -> impl Iterator<Item = f64> {
        self.series.iter().flat_map(|s| {
            s.points.iter().map(|p| p.1).chain(s.band.iter().flat_map(|b| [b.1, b.2]))
        })
    }

    /// The entries of the legend as indices of series, wrapped into rows that fit.
    fn legend_rows(&self, width: f64) -> Vec<Vec<usize>> {
        let named: Vec<usize> =
            (0..self.series.len()).filter(|i| !self.series[*i].name.is_empty()).collect();
        let widths: Vec<f64> = named.iter().map(|i| self.entry_width(*i, width)).collect();
        let rows = layout::rows_of(&widths, width);
        rows.into_iter().map(|row| row.into_iter().map(|i| named[i]).collect()).collect()
    }

    fn entry_width(&self, series: usize, width: f64) -> f64 {
        42.0 + text_width(&shortened(&self.series[series].name, width - 42.0))
    }

    fn legend(&self, svg: &mut String, (left, top): (f64, f64), width: f64, rows: &[Vec<usize>]) {
        for (r, row) in rows.iter().enumerate() {
            let (mut at, y) = (left, top + ROW * r as f64);
            for &i in row {
                let series = &self.series[i];
                let _ = write!(
                    svg,
                    "<line class=\"line\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" style=\"stroke:{}{}\"/>",
                    n(at),
                    n(y - 4.0),
                    n(at + 20.0),
                    n(y - 4.0),
                    series_color(series.color),
                    dash(series),
                );
                let name = shortened(&series.name, width - 42.0);
                text(svg, (at + 26.0, y), Anchor::Start, "", &name);
                at += self.entry_width(i, width);
            }
        }
    }
}

/// A range of the y axis for learning curves that neither the high losses of the first steps nor a run that diverges
/// stretch: from the lowest value to the 95% quantile of all values after the first tenth of each curve.
pub fn learning_range<'a>(
    curves: impl IntoIterator<Item = &'a [(f64, f64)]>,
) -> Option<(f64, f64)> {
    let (mut late, mut low) = (Vec::new(), f64::INFINITY);
    for curve in curves {
        let (Some(first), Some(last)) = (curve.first(), curve.last()) else { continue };
        let start = first.0 + 0.1 * (last.0 - first.0);
        for (x, y) in curve.iter().filter(|point| point.1.is_finite()) {
            low = low.min(*y);
            if *x >= start {
                late.push(*y);
            }
        }
    }
    late.sort_by(f64::total_cmp);
    let high = *late.get((0.95 * late.len() as f64) as usize)?;
    let pad = 0.05 * (high - low).max(0.01);
    Some((low - pad, high + pad))
}

fn dash(series: &Series) -> &'static str {
    if series.dashed { ";stroke-dasharray:5 4;stroke-width:1.5" } else { "" }
}

fn line(svg: &mut String, series: &Series, x: &Axis, y: &Axis) {
    let mut path = String::new();
    // A value that cannot be shown interrupts the line.
    let placed: Vec<Option<(f64, f64)>> =
        series.points.iter().map(|(px, py)| Some((x.place(*px)?, y.place(*py)?))).collect();
    for points in placed.split(Option::is_none) {
        for (i, (px, py)) in points.iter().flatten().enumerate() {
            let _ = write!(path, "{}{} {}", if i > 0 { "L" } else { "M" }, n(*px), n(*py));
        }
        // A single point has no line.
        if let [Some((px, py))] = points {
            let color = series_color(series.color);
            let _ = write!(
                svg,
                "<circle cx=\"{}\" cy=\"{}\" r=\"3.5\" style=\"fill:{color}\"/>",
                n(*px),
                n(*py)
            );
        }
    }
    let _ = write!(
        svg,
        "<path class=\"line\" d=\"{path}\" style=\"stroke:{}{}\"><title>{}</title></path>",
        series_color(series.color),
        dash(series),
        escape(&series.name)
    );
}

fn band(svg: &mut String, series: &Series, x: &Axis, y: &Axis) {
    let edge = |pick: fn(&(f64, f64, f64)) -> f64| -> Vec<String> {
        let point = |b: &(f64, f64, f64)| {
            let (px, py) = (x.place(b.0)?, y.place(pick(b))?);
            Some(format!("{} {}", n(px), n(py)))
        };
        series.band.iter().filter_map(point).collect()
    };
    let (upper, mut lower) = (edge(|b| b.2), edge(|b| b.1));
    lower.reverse();
    if upper.len() > 1 {
        let _ = write!(
            svg,
            "<path class=\"band\" d=\"M{}Z\" style=\"fill:{}\"/>",
            [upper, lower].concat().join("L"),
            series_color(series.color)
        );
    }
}

pub(super) fn vertical_label(svg: &mut String, at: (f64, f64), content: &str) {
    let _ = write!(
        svg,
        "<text transform=\"translate({} {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        n(at.0),
        n(at.1),
        escape(content)
    );
}

/// Distinguishes the clip paths of charts on one page.
fn fingerprint(title: &str) -> u64 {
    twox_hash::XxHash3_64::oneshot(title.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> LineChart {
        let mut chart = LineChart::new("L(i) <test>", "position", "loss");
        chart.x_scale = Scale::Log2;
        let mut series = Series::new("FoX", 0, vec![(1.0, 2.0), (2.0, f64::NAN), (4.0, 1.0)]);
        series.band = vec![(1.0, 1.9, 2.1), (4.0, 0.9, 1.1)];
        chart.series.push(series);
        chart.marks.push(VerticalMark { x: 2.0, label: "training length".into() });
        chart
    }

    #[test]
    fn chart_has_lines_bands_marks_and_legend() {
        let svg = chart().fragment();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>"));
        assert!(svg.contains("L(i) &lt;test&gt;"), "{svg}");
        assert_eq!(svg.matches("class=\"band\"").count(), 1);
        assert_eq!(svg.matches("class=\"mark\"").count(), 1);
        // The legend's sample and the line, interrupted at the missing value.
        assert_eq!(svg.matches("class=\"line\"").count(), 2);
        assert!(svg.contains("d=\"M56 "), "{svg}");
        assert!(svg.contains("M446 "), "{svg}");
        // Without neighbours, both values are dots.
        assert_eq!(svg.matches("<circle ").count(), 2, "{svg}");
    }

    #[test]
    fn dashes_series_beyond_the_colours() {
        let mut chart = LineChart::new("many", "x", "y");
        for i in 0..2 * COLORS {
            chart.add_line(format!("run {i}"), vec![(0.0, i as f64), (1.0, i as f64)]);
        }
        let style = |s: &Series| (series_color(s.color), s.dashed);
        let styles: std::collections::HashSet<_> = chart.series.iter().map(style).collect();
        assert_eq!(styles.len(), 2 * COLORS);
        assert!(!chart.series[COLORS - 1].dashed && chart.series[COLORS].dashed);
    }

    #[test]
    fn labels_of_marks_are_above_the_frame() {
        let svg = chart().fragment();
        let height = |part: &str, attribute: &str| -> f64 {
            let at = svg.find(part).unwrap();
            let start = svg[..at].rfind('<').unwrap();
            let value = svg[start..].split(&format!("{attribute}=\"")).nth(1).unwrap();
            value.split('"').next().unwrap().parse().unwrap()
        };
        assert!(height(">training length<", "y") < height("class=\"mark\"", "y1"));
        assert!(height(">FoX</text>", "y") < height(">training length<", "y"), "{svg}");
    }

    #[test]
    fn learning_range_ignores_first_steps() {
        let mut falling: Vec<(f64, f64)> = (0..200).map(|i| (f64::from(i), 2.0)).collect();
        falling[0].1 = 1000.0;
        let mut diverges = falling.clone();
        diverges[199].1 = 1e9;
        let (low, high) = learning_range([&falling[..], &diverges[..]]).unwrap();
        assert!(low < 2.0 && high < 2.1, "{low} {high}");
        assert_eq!(learning_range([]), None);
    }

    #[test]
    fn empty_chart_renders() {
        let svg = LineChart::new("nothing", "x", "y").fragment();
        assert!(svg.ends_with("</svg>"));
        assert!(!svg.contains("NaN"));
    }
}
