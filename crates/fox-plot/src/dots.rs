//! Dot plots: per row a dot for a value and a line for its interval.

use std::fmt::Write as _;

use super::axis::Axis;
use super::layout::{self, ROW, shortened, text_width};
use super::{Anchor, Scale, WIDTH, escape, n, open, segment, series_color, text};

/// Width of the names of rows; the middle of longer ones is left out.
const NAME_WIDTH: f64 = 190.0;

/// One row of a dot plot.
#[derive(Clone, Debug)]
pub struct DotRow {
    /// Label at the left.
    pub name: String,
    /// Value of the dot.
    pub value: f64,
    /// Ends of the interval.
    pub spread: Option<(f64, f64)>,
    /// Index of the series colour.
    pub color: usize,
}

/// A dot plot.
#[derive(Clone, Debug)]
pub struct DotPlot {
    /// Title above the plot.
    pub title: String,
    /// Label of the axis.
    pub x_label: String,
    /// Scale of the axis.
    pub x_scale: Scale,
    /// The rows, top to bottom.
    pub rows: Vec<DotRow>,
    /// Legend: names and indices of colours.
    pub legend: Vec<(String, usize)>,
    /// Vertical lines at these values, with labels.
    pub marks: Vec<(f64, String)>,
}

impl DotPlot {
    /// The SVG fragment.
    pub fn fragment(&self) -> String {
        let names: Vec<String> =
            self.rows.iter().map(|row| shortened(&row.name, NAME_WIDTH)).collect();
        let longest = names.iter().map(|name| text_width(name)).fold(20.0, f64::max);
        let (left, right) = (longest + 14.0, WIDTH - 18.0);
        let title = layout::title_lines(&self.title, left);
        let entries: Vec<f64> =
            self.legend.iter().map(|(name, _)| 32.0 + text_width(name)).collect();
        let legend = layout::rows_of(&entries, right - left);
        let values = self.rows.iter().flat_map(|r| {
            let (low, high) = r.spread.unwrap_or((r.value, r.value));
            [r.value, low, high]
        });
        let values = values.chain(self.marks.iter().map(|m| m.0));
        let x = Axis::around(values, self.x_scale).padded(0.01).ending_at_ticks();
        let x = x.placed(left, right);
        let marks: Vec<(f64, &str)> = self
            .marks
            .iter()
            .filter_map(|(value, label)| Some((x.place(*value)?, label.as_str())))
            .collect();
        let labels = layout::mark_labels(&marks, left, right);
        let label_rows = labels.iter().map(|label| label.1 + 1).max().unwrap_or(0);
        let legend_top = 31.0 + layout::title_extra(&title);
        let top = legend_top - 3.0 + ROW * legend.len() as f64 + 14.0 * label_rows as f64;
        let height = if self.rows.len() > 24 { 13.0 } else { 19.0 };
        let bottom = top + height * self.rows.len() as f64 + 4.0;

        let mut svg = open(bottom + 42.0, &self.title);
        layout::title(&mut svg, left, &title);
        for (r, row) in legend.iter().enumerate() {
            let (mut at, y) = (left, legend_top + ROW * r as f64);
            for &i in row {
                let (name, color) = &self.legend[i];
                let _ = write!(
                    svg,
                    "<circle cx=\"{}\" cy=\"{}\" r=\"4.5\" style=\"fill:{}\"/>",
                    n(at + 5.0),
                    n(y),
                    series_color(*color)
                );
                text(&mut svg, (at + 14.0, y + 4.0), Anchor::Start, "", name);
                at += entries[i];
            }
        }
        layout::x_ticks(&mut svg, &x, (top, bottom));
        for ((at, label), (center, row)) in marks.iter().zip(labels) {
            segment(&mut svg, "mark", (*at, top), (*at, bottom));
            let y = top - 4.0 - 14.0 * row as f64;
            text(&mut svg, (center, y), Anchor::Middle, "dim", label);
        }
        for (i, row) in self.rows.iter().enumerate() {
            let y = top + height * (i as f64 + 0.5) + 2.0;
            text(&mut svg, (left - 8.0, y + 4.0), Anchor::End, "dim", &names[i]);
            dot(&mut svg, row, &x, y);
        }
        text(&mut svg, ((left + right) / 2.0, bottom + 34.0), Anchor::Middle, "", &self.x_label);
        svg.push_str("</svg>");
        svg
    }
}

fn dot(svg: &mut String, row: &DotRow, x: &Axis, y: f64) {
    let color = series_color(row.color);
    if let Some((Some(low), Some(high))) = row.spread.map(|(a, b)| (x.place(a), x.place(b))) {
        let _ = write!(
            svg,
            "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" style=\"stroke:{color};stroke-width:2.5;opacity:.45\"/>",
            n(low),
            n(y),
            n(high),
            n(y)
        );
    }
    if let Some(at) = x.place(row.value) {
        let _ = write!(
            svg,
            "<circle cx=\"{}\" cy=\"{}\" r=\"4.5\" style=\"fill:{color}\"><title>{}: {}</title></circle>",
            n(at),
            n(y),
            escape(&row.name),
            n(row.value)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_dots_and_intervals() {
        let row = |name: &str, value, spread| DotRow { name: name.into(), value, spread, color: 0 };
        let plot = DotPlot {
            title: "half-life".into(),
            x_label: "tokens".into(),
            x_scale: Scale::Log2,
            rows: vec![row("L0 H0", 4.0, Some((2.0, 8.0))), row("L0 H1", f64::NAN, None)],
            legend: vec![("local".into(), 0)],
            marks: vec![(32.0, "local".into())],
        };
        let svg = plot.fragment();
        // One in the legend, one in the plot; NaN has none.
        assert_eq!(svg.matches("<circle ").count(), 2);
        assert_eq!(svg.matches("opacity:.45").count(), 1);
        assert!(!svg.contains("NaN"));
    }
}
