//! Layout of texts: their widths, titles and legends that wrap, labels that neither overlap nor leave the chart.

use super::axis::Axis;
use super::{Anchor, WIDTH, segment, text};

/// Height of a row of a legend or of labels.
pub(super) const ROW: f64 = 18.0;
/// Size of a title relative to other texts, with its bold letters.
const TITLE_SCALE: f64 = 1.25;
/// Space between two labels of an axis.
const GAP: f64 = 8.0;

/// The width of a text in user units, from the advances of a wide font (DejaVu Sans), so that narrower ones fit too.
pub(super) fn text_width(content: &str) -> f64 {
    const SIZE: f64 = 12.5;
    let advance = |c: char| match c {
        'i' | 'j' | 'l' | 'I' | 'J' | '|' | '\'' => 0.3,
        ' ' | '.' | ',' | ':' | ';' | '!' | '/' | 'f' | '-' | 't' | 'r' | '(' | ')' | '[' | ']' => {
            0.4
        }
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 0.98,
        '+' | '=' | '<' | '>' | '~' => 0.84,
        'A'..='Z' => 0.75,
        c if c.is_ascii() => 0.635,
        _ => 1.0,
    };
    SIZE * content.chars().map(advance).sum::<f64>()
}

/// A text of at most this width: the middle of a longer one is left out, since names differ at both ends.
pub(super) fn shortened(content: &str, width: f64) -> String {
    if text_width(content) <= width {
        return content.to_string();
    }
    let chars: Vec<char> = content.chars().collect();
    let with = |kept: usize| -> String {
        let (head, tail) = (kept.div_ceil(2), kept / 2);
        let tail = &chars[chars.len() - tail..];
        chars[..head].iter().chain(&['\u{2026}']).chain(tail).collect()
    };
    (0..chars.len()).rev().map(with).find(|text| text_width(text) <= width).unwrap_or_default()
}

/// The lines of a title; each fits between `left` and the right edge of the chart.
pub(super) fn title_lines(title: &str, left: f64) -> Vec<String> {
    let width = (WIDTH - 8.0 - left) / TITLE_SCALE;
    let mut lines: Vec<String> = Vec::new();
    for word in title.split_whitespace() {
        let word = shortened(word, width);
        match lines.last_mut() {
            Some(line) if text_width(&format!("{line} {word}")) <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

/// Draws a title and returns the height of its lines after the first.
pub(super) fn title(svg: &mut String, left: f64, lines: &[String]) -> f64 {
    for (i, line) in lines.iter().enumerate() {
        text(svg, (left, 17.0 + ROW * i as f64), Anchor::Start, "title", line);
    }
    title_extra(lines)
}

/// Height of the lines of a title after the first.
pub(super) fn title_extra(lines: &[String]) -> f64 {
    ROW * lines.len().saturating_sub(1) as f64
}

/// Wraps entries of the given widths into rows that fit; each row has indices of entries.
pub(super) fn rows_of(widths: &[f64], width: f64) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut used = f64::INFINITY;
    for (i, needed) in widths.iter().enumerate() {
        match rows.last_mut() {
            Some(row) if used + needed <= width => row.push(i),
            _ => {
                used = 0.0;
                rows.push(vec![i]);
            }
        }
        used += needed;
    }
    rows
}

/// Labels of marks above a frame: for each its center and its row from below, so that none overlap or leave the chart.
pub(super) fn mark_labels(marks: &[(f64, &str)], left: f64, right: f64) -> Vec<(f64, usize)> {
    let mut placed: Vec<(f64, f64, usize)> = Vec::new();
    marks
        .iter()
        .map(|(at, label)| {
            let half = text_width(label) / 2.0;
            let center = at.min(right - half).max(left + half);
            let (from, to) = (center - half, center + half);
            let taken = |row: usize| {
                placed.iter().any(|p| p.2 == row && from < p.1 + GAP && to + GAP > p.0)
            };
            let row = (0..).find(|row| !taken(*row)).unwrap_or(0);
            placed.push((from, to, row));
            (center, row)
        })
        .collect()
}

/// Grid lines and labels of an x axis between `top` and `bottom`. Labels that would overlap are left out, the ends last.
pub(super) fn x_ticks(svg: &mut String, x: &Axis, (top, bottom): (f64, f64)) {
    let ticks: Vec<(f64, String)> = x
        .ticks(6)
        .into_iter()
        .filter_map(|(value, label)| Some((x.place(value)?, label)))
        .collect();
    let span = |(at, label): &(f64, String)| {
        let half = text_width(label) / 2.0;
        let center = at.min(WIDTH - 2.0 - half).max(2.0 + half);
        (center - half, center + half, center)
    };
    let last = ticks.last().map(span);
    let mut end = f64::NEG_INFINITY;
    for (i, tick) in ticks.iter().enumerate() {
        segment(svg, "grid", (tick.0, top), (tick.0, bottom));
        let (from, to, center) = span(tick);
        let before_last = i + 1 == ticks.len() || last.is_none_or(|last| to + GAP <= last.0);
        if from >= end + GAP && before_last {
            text(svg, (center, bottom + 16.0), Anchor::Middle, "dim", &tick.1);
            end = to;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_wrapped_or_shortened() {
        let lines = title_lines(&"word ".repeat(30), 56.0);
        assert!(lines.len() > 1);
        assert!(lines.iter().all(|line| 56.0 + TITLE_SCALE * text_width(line) <= WIDTH));
        let name = "a-very-long-run-name-with-seed-0-and-a-learning-rate-of-0.001";
        let short = shortened(name, 120.0);
        assert!(text_width(&short) <= 120.0 && short.contains('\u{2026}'), "{short}");
        assert!(short.starts_with("a-very") && short.ends_with(".001"), "{short}");
        assert_eq!(shortened("short", 120.0), "short");
    }

    #[test]
    fn legends_and_marks_do_not_touch() {
        assert_eq!(rows_of(&[100.0, 100.0, 250.0], 240.0), [vec![0, 1], vec![2]]);
        let labels = mark_labels(&[(100.0, "training length"), (110.0, "twice")], 56.0, 448.0);
        assert_eq!((labels[0].1, labels[1].1), (0, 1));
        let at_end = mark_labels(&[(448.0, "training length")], 56.0, 448.0);
        assert!(at_end[0].0 + text_width("training length") / 2.0 <= 448.0);
    }
}
