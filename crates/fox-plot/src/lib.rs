//! Line charts, heat maps, dot plots and matrix images as SVG.
//!
//! A chart renders as a *fragment*, an `<svg>` element with colours from CSS variables, for an HTML page that includes
//! [`STYLE`] once, or as a [`standalone`] file that contains the style. Colours follow the reader's light or dark
//! preference. Every chart is [`WIDTH`] units wide, so that all texts have the same size and stay readable on a phone.
//!
//! ```
//! use fox_plot::{LineChart, standalone};
//!
//! let mut chart = LineChart::new("Loss at every position", "position", "loss");
//! chart.add_line("FoX", vec![(1.0, 2.0), (10.0, 1.6), (100.0, 1.4)]);
//! chart.add_line("Transformer", vec![(1.0, 2.0), (10.0, 1.7), (100.0, 1.6)]);
//! let svg = standalone(&chart.fragment());
//! assert!(svg.starts_with("<svg") && svg.contains("Transformer"));
//! ```

mod axis;
mod color;
mod dots;
mod heat;
mod image;
mod layout;
mod line;
mod png;

use std::fmt::Write as _;

pub use axis::Scale;
pub use color::{Rgb, ink_on, sequential};
pub use dots::{DotPlot, DotRow};
pub use heat::HeatMap;
pub use image::{Image, MatrixImage};
pub use line::{LineChart, Series, VerticalMark, learning_range};

/// Width of every chart in user units, about pixels on a phone.
pub const WIDTH: f64 = 460.0;

/// Colours and fonts, for light and dark.
pub const STYLE: &str = "\
:root{--ink:#1d2329;--dim:#66707a;--grid:#e3e7eb;--paper:#ffffff;--card:#ffffff;--edge:#dfe3e8;\
--s0:#d9480f;--s1:#1c6fd1;--s2:#2b8a3e;--s3:#9c36b5;--s4:#b08900;--s5:#0b7285}\
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--dim:#9aa4ae;--grid:#2d343b;--paper:#12161a;\
--card:#191e24;--edge:#2d343b;--s0:#ff8a4c;--s1:#6cb2ff;--s2:#69db7c;--s3:#da77f2;--s4:#ffd43b;--s5:#3bc9db}}\
svg.plot{width:100%;height:auto;display:block;font:12.5px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\
.plot text{fill:var(--ink)}.plot .dim{fill:var(--dim)}.plot .title{font-weight:600;font-size:14px}\
.plot .grid{stroke:var(--grid);stroke-width:1}.plot .axis{stroke:var(--dim);stroke-width:1}\
.plot .mark{stroke:var(--dim);stroke-width:1.2;stroke-dasharray:4 3}\
.plot .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}\
.plot .band{stroke:none;opacity:.18}";

/// Number of series colours in [`STYLE`].
const COLORS: usize = 6;

/// The CSS variable of the colour number `index`.
fn series_color(index: usize) -> String {
    format!("var(--s{})", index % COLORS)
}

/// A complete SVG file around a fragment, with style and background. Viewers without CSS variables, such as many outside
/// of browsers, show the light colours.
pub fn standalone(fragment: &str) -> String {
    let paper = "<rect width=\"100%\" height=\"100%\" style=\"fill:var(--paper)\"/>";
    match fragment.find('>') {
        Some(end) => {
            let (root, rest) = fragment.split_at(end + 1);
            with_plain_colors(&format!("{root}<style>{STYLE}</style>{paper}{rest}\n"))
        }
        None => fragment.to_string(),
    }
}

/// Inserts `property:COLOR;` before every `property:var(--name)` as a fallback.
fn with_plain_colors(svg: &str) -> String {
    let mut parts = svg.split(":var(--");
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let start = plain.rfind(|c: char| !(c.is_ascii_alphabetic() || c == '-'));
        let property = plain[start.map_or(0, |i| i + 1)..].to_string();
        if let Some(color) = part.split(')').next().and_then(light_color) {
            plain += &format!(":{color};{property}");
        }
        plain.push_str(":var(--");
        plain.push_str(part);
    }
    plain
}

/// The value of a variable in [`STYLE`]'s first, light list.
fn light_color(name: &str) -> Option<&'static str> {
    let (_, after) = STYLE.split_once(&format!("--{name}:"))?;
    after.split([';', '}']).next()
}

/// Escapes text for an element or an attribute.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // XML does not allow control characters, not even escaped.
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// A coordinate with at most two decimals.
fn n(value: f64) -> String {
    let mut text = format!("{value:.2}");
    if text.contains('.') {
        text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    }
    if text == "-0" { "0".into() } else { text }
}

/// Opens an `<svg>` of this height with a label for screen readers. Its size is what a document shows that does not
/// scale it, such as a paper; the style of a page overrides it.
fn open(height: f64, name: &str) -> String {
    let (width, height) = (n(WIDTH), n(height));
    format!(
        "<svg class=\"plot\" xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">",
        escape(name)
    )
}

/// The horizontal anchor of a text.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

fn text(svg: &mut String, at: (f64, f64), anchor: Anchor, class: &str, content: &str) {
    let anchor = match anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    };
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\"{anchor}{class}>{}</text>",
        n(at.0),
        n(at.1),
        escape(content)
    );
}

fn segment(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = write!(
        svg,
        "<line class=\"{class}\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>",
        n(from.0),
        n(from.1),
        n(to.0),
        n(to.1)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_numbers_and_escapes_text() {
        assert_eq!([n(1.0), n(1.204), n(-0.001), n(100.0)], ["1", "1.2", "0", "100"]);
        assert_eq!(escape("a<b> & \"c\"\u{1}"), "a&lt;b&gt; &amp; &quot;c&quot;\u{fffd}");
    }

    #[test]
    fn standalone_file_contains_its_style() {
        let file = standalone("<svg class=\"plot\"><g/></svg>");
        assert!(file.starts_with("<svg class=\"plot\"><style>:root{"), "{file}");
        assert!(file.ends_with("/><g/></svg>\n"), "{file}");
    }

    #[test]
    fn falls_back_to_plain_colors() {
        let file = standalone("<svg><path style=\"stroke:var(--s1);stroke-width:2\"/></svg>");
        assert!(
            file.contains("style=\"stroke:#1c6fd1;stroke:var(--s1);stroke-width:2\""),
            "{file}"
        );
        assert!(file.contains(".plot text{fill:#1d2329;fill:var(--ink)}"), "{file}");
        assert!(file.contains("style=\"fill:#ffffff;fill:var(--paper)\""), "{file}");
        // Every variable has a plain fallback, and the variables stay.
        assert_eq!(
            file.matches(":var(--").count(),
            file.matches(";stroke:var(--").count() + file.matches(";fill:var(--").count()
        );
        assert!(file.contains(STYLE.split("svg.plot").next().unwrap()));
    }
}
