//! Heat maps: a grid of coloured cells with their values.

use std::fmt::Write as _;

use super::color::{hex, ink_on, sequential};
use super::layout::{self, shortened, text_width};
use super::{Anchor, WIDTH, escape, n, open, text};

/// A heat map of `rows.len() * cols.len()` cells.
#[derive(Clone, Debug)]
pub struct HeatMap {
    /// Title above the map.
    pub title: String,
    /// Label below the columns.
    pub x_label: String,
    /// Label beside the rows.
    pub y_label: String,
    /// Names of the columns.
    pub cols: Vec<String>,
    /// Names of the rows, top to bottom.
    pub rows: Vec<String>,
    /// Values in row-major order; NaN is left blank.
    pub values: Vec<f64>,
    /// Values at the two ends of the colour map.
    pub range: (f64, f64),
    /// Formats the value of a cell.
    pub label: fn(f64) -> String,
}

impl HeatMap {
    /// The SVG fragment.
    pub fn fragment(&self) -> String {
        // Long row names are placed above their cells.
        let above = self.rows.iter().any(|name| text_width(name) > 52.0);
        let left = match above {
            true if self.y_label.is_empty() => 12.0,
            true => 30.0,
            false => 64.0,
        };
        let right = WIDTH - 12.0;
        let title = layout::title_lines(&self.title, left);
        let top = 28.0 + layout::title_extra(&title);
        let width = (right - left) / self.cols.len().max(1) as f64;
        let (name_height, height) = (if above { 18.0 } else { 0.0 }, 34.0);
        let bottom = top + (name_height + height) * self.rows.len() as f64;
        let lines = self.cols.iter().map(|name| name.lines().count()).max().unwrap_or(1).max(1);
        let below = bottom + 16.0 * lines as f64;
        let mut svg = open(below + 24.0, &self.title);
        layout::title(&mut svg, left, &title);
        for (r, name) in self.rows.iter().enumerate() {
            let y = top + (name_height + height) * r as f64 + name_height;
            match above {
                true => {
                    let name = shortened(name, right - left);
                    text(&mut svg, (left, y - 5.0), Anchor::Start, "dim", &name);
                }
                false => {
                    text(&mut svg, (left - 8.0, y + height / 2.0 + 4.0), Anchor::End, "dim", name)
                }
            }
            for c in 0..self.cols.len() {
                let value = self.values.get(r * self.cols.len() + c).copied().unwrap_or(f64::NAN);
                self.cell(&mut svg, (left + width * c as f64, y), (width, height), (r, c), value);
            }
        }
        // Where the names of columns would touch, some are left out.
        let longest = self.cols.iter().flat_map(|name| name.lines()).map(text_width);
        let every = ((longest.fold(0.0, f64::max) + 6.0) / width).ceil().max(1.0) as usize;
        for (c, name) in self.cols.iter().enumerate().step_by(every) {
            let x = left + width * (c as f64 + 0.5);
            for (line, part) in name.lines().enumerate() {
                let y = bottom + 16.0 * (line + 1) as f64;
                text(&mut svg, (x, y), Anchor::Middle, "dim", part);
            }
        }
        text(&mut svg, ((left + right) / 2.0, below + 18.0), Anchor::Middle, "", &self.x_label);
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
            escape(&self.cols[col].replace('\n', " ")),
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
    fn cells_show_values_and_nan_is_blank() {
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
        assert!(svg.contains("<title>512, 0%: 50</title>"), "row by row: {svg}");
        assert_eq!(svg.matches("fill:var(--grid)").count(), 2);
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn long_row_names_are_above_cells() {
        let map = HeatMap {
            title: "t".into(),
            x_label: String::new(),
            y_label: String::new(),
            cols: vec!["64\nx 4".into(), "1024\nx 256".into()],
            rows: vec!["a model with a long name".into(), "b".into()],
            values: vec![0.0; 4],
            range: (0.0, 1.0),
            label: |v| format!("{v:.0}"),
        };
        let svg = map.fragment();
        // Both names are aligned with the left edge of the cells, each above its row.
        for (name, y) in [("a model with a long name", 41), ("b", 93)] {
            let at = format!("<text x=\"12\" y=\"{y}\" class=\"dim\">{name}</text>");
            assert!(svg.contains(&at), "{at} in {svg}");
        }
        assert!(svg.contains(">1024</text>") && svg.contains(">x 256</text>"));
        assert!(svg.contains("<title>1024 x 256, b: 0</title>"));
    }
}
