//! Heat maps: a grid of cells with their values written in them.

use std::fmt::Write as _;

use super::color::{hex, ink_on, sequential};
use super::{Anchor, WIDTH, escape, n, open, text};

/// A heat map of `rows.len() * cols.len()` cells.
#[derive(Clone, Debug)]
pub struct HeatMap {
    /// Above the map.
    pub title: String,
    /// Under the columns.
    pub x_label: String,
    /// Beside the rows.
    pub y_label: String,
    /// Names of the columns.
    pub cols: Vec<String>,
    /// Names of the rows, top to bottom.
    pub rows: Vec<String>,
    /// Values row by row; what is no number is left blank.
    pub values: Vec<f64>,
    /// The values that get the two ends of the colour map.
    pub range: (f64, f64),
    /// What is written in a cell.
    pub label: fn(f64) -> String,
}

impl HeatMap {
    /// The SVG fragment.
    pub fn fragment(&self) -> String {
        let (left, top, right) = (64.0, 28.0, WIDTH - 12.0);
        let width = (right - left) / self.cols.len().max(1) as f64;
        let height = 34.0;
        let bottom = top + height * self.rows.len() as f64;
        let mut svg = open(bottom + 40.0, &self.title);
        text(&mut svg, (left, 17.0), Anchor::Start, "title", &self.title);
        for (r, name) in self.rows.iter().enumerate() {
            let y = top + height * r as f64;
            text(&mut svg, (left - 8.0, y + height / 2.0 + 4.0), Anchor::End, "dim", name);
            for c in 0..self.cols.len() {
                let value = self.values.get(r * self.cols.len() + c).copied().unwrap_or(f64::NAN);
                self.cell(&mut svg, (left + width * c as f64, y), (width, height), (r, c), value);
            }
        }
        for (c, name) in self.cols.iter().enumerate() {
            let x = left + width * (c as f64 + 0.5);
            text(&mut svg, (x, bottom + 16.0), Anchor::Middle, "dim", name);
        }
        text(&mut svg, ((left + right) / 2.0, bottom + 34.0), Anchor::Middle, "", &self.x_label);
        super::line::vertical_label(&mut svg, (13.0, (top + bottom) / 2.0), &self.y_label);
        svg.push_str("</svg>");
        svg
    }

    fn cell(
        &self,
        svg: &mut String,
        at: (f64, f64),
        (width, height): (f64, f64),
        (row, col): (usize, usize),
        value: f64,
    ) {
        let missing = value.is_nan();
        let color = sequential((value - self.range.0) / (self.range.1 - self.range.0));
        let fill = if missing { "var(--grid)".to_string() } else { hex(color) };
        let shown = if missing { String::new() } else { (self.label)(value) };
        let _ = write!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"3\" style=\"fill:{fill}\"><title>{}, {}: {}</title></rect>",
            n(at.0 + 1.0),
            n(at.1 + 1.0),
            n(width - 2.0),
            n(height - 2.0),
            escape(&self.cols[col]),
            escape(&self.rows[row]),
            escape(&shown)
        );
        if width >= 30.0 && !missing {
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" style=\"fill:{}\" pointer-events=\"none\">{}</text>",
                n(at.0 + width / 2.0),
                n(at.1 + height / 2.0 + 4.0),
                ink_on(color),
                escape(&shown)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_carry_their_values_and_missing_ones_are_blank() {
        let map = HeatMap {
            title: "needle".into(),
            x_label: "length".into(),
            y_label: "depth".into(),
            cols: vec!["256".into(), "512".into()],
            rows: vec!["0%".into(), "100%".into()],
            values: vec![1.0, 0.5, f64::NAN],
            range: (0.0, 1.0),
            label: |v| format!("{:.0}", 100.0 * v),
        };
        let svg = map.fragment();
        assert_eq!(svg.matches("<rect ").count(), 4);
        assert!(svg.contains(">100</text>") && svg.contains(">50</text>"));
        assert_eq!(svg.matches("fill:var(--grid)").count(), 2);
        assert!(!svg.contains("NaN"));
    }
}
