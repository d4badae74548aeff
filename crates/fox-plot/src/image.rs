//! Matrices as images: one pixel per block of entries.

use std::fmt::Write as _;

use super::color::{Rgb, sequential};
use super::layout::{self, shortened, text_width};
use super::line::vertical_label;
use super::{Anchor, WIDTH, axis, n, open, png, text};

/// A matrix of pixels, already averaged over blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixImage {
    /// Rows of pixels, top to bottom.
    pub rows: usize,
    /// Columns of pixels.
    pub cols: usize,
    /// `[rows, cols]` values in row-major order; NaN is left blank.
    pub values: Vec<f64>,
}

/// Width of the names of rows; the middle of longer ones is left out.
const NAME_WIDTH: f64 = 120.0;

/// Title, axes and colours of a matrix image.
#[derive(Clone, Debug)]
pub struct Image {
    /// Title above the image.
    pub title: String,
    /// Label below the image.
    pub x_label: String,
    /// Label at the left.
    pub y_label: String,
    /// Value of the x axis at the last column; 0 at the first.
    pub x_max: f64,
    /// Value of the y axis at the last row.
    pub y_max: f64,
    /// Values at the two ends of the colour map.
    pub range: (f64, f64),
    /// Label of the colour bar: what the colour stands for.
    pub color_label: String,
    /// Aspect ratio, width over height.
    pub aspect: f64,
    /// Labels of the rows instead of a y axis.
    pub row_names: Vec<String>,
    /// Marks on the diagonal, in units of `x_max`, with labels to the right where a triangular matrix is empty, if there
    /// is room.
    pub diagonal: Vec<(f64, String)>,
}

impl MatrixImage {
    /// The matrix as a PNG in a data URI; NaN is transparent.
    pub(crate) fn data_uri(&self, range: (f64, f64)) -> String {
        let mut palette: Vec<Rgb> = vec![[0; 3]];
        palette.extend((0..255).map(|i| sequential(f64::from(i) / 254.0)));
        let pixels: Vec<u8> = self
            .values
            .iter()
            .map(|v| match (v - range.0) / (range.1 - range.0) {
                share if share.is_nan() => 0,
                share => 1 + (share.clamp(0.0, 1.0) * 254.0).round() as u8,
            })
            .collect();
        // Compressing into memory cannot fail.
        let file = png::encode(self.cols, &pixels, &palette).unwrap_or_default();
        format!("data:image/png;base64,{}", png::base64(&file))
    }

    /// The same with every row repeated, so that smoothing does not mix rows that stand for different things.
    fn with_tall_rows(&self) -> MatrixImage {
        const REPEATS: usize = 8;
        let rows = self.values.chunks(self.cols.max(1));
        let values = rows.flat_map(|row| std::iter::repeat_n(row, REPEATS).flatten().copied());
        MatrixImage { rows: REPEATS * self.rows, cols: self.cols, values: values.collect() }
    }

    /// The SVG fragment of the matrix.
    pub fn fragment(&self, image: &Image) -> String {
        let names: Vec<String> =
            image.row_names.iter().map(|name| shortened(name, NAME_WIDTH)).collect();
        let longest = names.iter().map(|name| text_width(name)).fold(0.0, f64::max);
        let left = if names.is_empty() { 54.0 } else { (longest + 12.0).max(46.0) };
        let title = layout::title_lines(&image.title, left);
        let (top, bar) = (28.0 + layout::title_extra(&title), 62.0);
        let width = WIDTH - left - bar;
        let height = width / image.aspect;
        let total = top + height + 38.0;
        let mut svg = open(total, &image.title);
        layout::title(&mut svg, left, &title);
        let uri = match names.is_empty() {
            true => self.data_uri(image.range),
            false => self.with_tall_rows().data_uri(image.range),
        };
        let _ = write!(
            svg,
            "<image x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" preserveAspectRatio=\"none\" style=\"image-rendering:{}\" href=\"{uri}\"/>",
            n(left),
            n(top),
            n(width),
            n(height),
            // Few pixels stay sharp squares, many are smoothed when scaled down.
            if self.cols < 256 { "pixelated" } else { "auto" },
        );
        for share in [0.0, 0.5, 1.0] {
            let label = axis::label((image.x_max * share).round(), 0);
            let anchor = match share {
                0.0 => Anchor::Start,
                1.0 => Anchor::End,
                _ => Anchor::Middle,
            };
            text(&mut svg, (left + width * share, top + height + 15.0), anchor, "dim", &label);
            if image.row_names.is_empty() {
                let label = axis::label((image.y_max * share).round(), 0);
                let y = top + height * share + 4.0 + 5.0 * (1.0 - 2.0 * share);
                text(&mut svg, (left - 6.0, y), Anchor::End, "dim", &label);
            }
        }
        for (place, name) in &image.diagonal {
            let share = (place / image.x_max).clamp(0.0, 1.0);
            let (x, y) = (left + width * share, top + height * share);
            let _ = write!(
                svg,
                "<circle cx=\"{}\" cy=\"{}\" r=\"3.5\" style=\"fill:var(--s0);stroke:var(--card);stroke-width:1\"/>",
                n(x),
                n(y)
            );
            if x + 9.0 + text_width(name) < left + width {
                text(&mut svg, (x + 9.0, y + 4.0), Anchor::Start, "", name);
            }
        }
        for (i, name) in names.iter().enumerate() {
            let y = top + height * (i as f64 + 0.5) / names.len() as f64 + 4.0;
            text(&mut svg, (left - 6.0, y), Anchor::End, "dim", name);
        }
        let middle = (left + width / 2.0, top + height + 31.0);
        text(&mut svg, middle, Anchor::Middle, "", &image.x_label);
        if !image.y_label.is_empty() {
            vertical_label(&mut svg, (13.0, top + height / 2.0), &image.y_label);
        }
        color_bar(&mut svg, (left + width + 12.0, top), height, image);
        svg.push_str("</svg>");
        svg
    }
}

/// The colour bar beside an image, with its two ends and its label.
fn color_bar(svg: &mut String, at: (f64, f64), height: f64, image: &Image) {
    const STEPS: usize = 128;
    let ramp = (0..STEPS).map(|i| 1.0 - i as f64 / (STEPS - 1) as f64).collect();
    let ramp = MatrixImage { rows: STEPS, cols: 1, values: ramp };
    let _ = write!(
        svg,
        "<image x=\"{}\" y=\"{}\" width=\"10\" height=\"{}\" preserveAspectRatio=\"none\" href=\"{}\"/>",
        n(at.0),
        n(at.1),
        n(height),
        ramp.data_uri((0.0, 1.0)),
    );
    let (low, high) = image.range;
    let whole = low.fract() == 0.0 && high.fract() == 0.0;
    let decimals = if (high - low).abs() >= 10.0 || whole { 0 } else { 1 };
    for (value, y) in [(high, at.1 + 10.0), (low, at.1 + height)] {
        text(svg, (at.0 + 14.0, y), Anchor::Start, "dim", &axis::label(value, decimals));
    }
    // Between the two ends where it fits, else below the bar.
    match text_width(&image.color_label) + 30.0 <= height {
        true => vertical_label(svg, (at.0 + 26.0, at.1 + height / 2.0), &image.color_label),
        false => {
            let below = (WIDTH - 4.0, at.1 + height + 16.0);
            text(svg, below, Anchor::End, "", &image.color_label);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix_and_colour_bar_are_images() {
        let matrix = MatrixImage { rows: 2, cols: 2, values: vec![0.0, f64::NAN, 0.5, 1.0] };
        let image = Image {
            title: "F".into(),
            x_label: "key".into(),
            y_label: "query".into(),
            x_max: 64.0,
            y_max: 64.0,
            range: (0.0, 1.0),
            color_label: "F(i, j)".into(),
            aspect: 1.0,
            row_names: Vec::new(),
            diagonal: vec![(16.0, "here".into()), (60.0, "no room".into())],
        };
        let svg = matrix.fragment(&image);
        // The matrix and its colour bar.
        assert_eq!(svg.matches("<image ").count(), 2);
        assert!(svg.contains(">F(i, j)</text>"), "{svg}");
        assert!(svg.contains("data:image/png;base64,iVBORw0KGgo"), "{svg}");
        assert!(svg.len() < 12_000, "{}", svg.len());
        assert_eq!(svg.matches("<circle ").count(), 2);
        assert!(svg.contains(">here<") && !svg.contains("no room"), "{svg}");
    }
}
