//! What heads forget at boundaries of a text: new files, chapters, ends of functions.
//!
//! A boundary is a match of a pattern. Log gates are averaged by their distance in tokens from the first token of a match,
//! and compared with stretches of the same length without a boundary.

use fox_data::{Dataset, Tokenizer};
use fox_model::Pruning;
use fox_plot::MatrixImage;
use regex::{Regex, RegexBuilder};
use serde::Serialize;

use super::observe::{self, LayerGates};
use crate::subject::Subject;
use crate::{Error, Result};

/// Windows that a document is divided into, at most, so that many documents contribute.
pub const WINDOWS_PER_DOCUMENT: usize = 8;
/// Documents that are searched for each window, at most: generated data have no last document.
const DOCUMENTS_PER_WINDOW: usize = 8;
/// Rows and columns of the forget matrix, at most.
const PIXELS: usize = 384;

/// A regular expression in which `^` and `$` match at every line.
///
/// # Errors
/// Text that is not a regular expression.
pub fn boundary_pattern(text: &str) -> Result<Regex> {
    RegexBuilder::new(text).multi_line(true).build().map_err(|error| {
        // The last line says what is wrong, those before it where.
        let said = error.to_string();
        let detail = said.lines().last().unwrap_or_default().trim_start_matches("error: ");
        Error::Argument(format!("the boundary {text:?} is not a regular expression: {detail}"))
    })
}

/// A window of a text and its boundaries.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Token ids, the start marker first.
    pub tokens: Vec<u32>,
    /// Positions of the first tokens of matches.
    pub boundaries: Vec<usize>,
}

/// Tokens around a boundary that are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// Tokens before the first one of the match.
    pub before: usize,
    /// Tokens from the first one of the match on.
    pub after: usize,
}

impl Span {
    /// Tokens in all.
    pub fn len(self) -> usize {
        self.before + self.after
    }

    /// Whether it has no tokens.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Up to `count` windows of `length` tokens with at least one boundary that has the span around it.
///
/// The text is encoded from one match to the next, so a match begins with a token whatever the tokenizer.
///
/// # Errors
/// A span that does not fit the length, and data without a boundary.
pub fn boundary_windows(
    data: &dyn Dataset,
    tokenizer: &Tokenizer,
    pattern: &Regex,
    span: Span,
    length: usize,
    count: usize,
) -> Result<Vec<Window>> {
    if span.is_empty() || span.len() >= length {
        return Err(Error::Argument(format!(
            "{} tokens around a boundary do not fit a window of {length}",
            span.len()
        )));
    }
    let mut windows = Vec::new();
    let most = (WINDOWS_PER_DOCUMENT * (length - 1)) as u64;
    let last = (DOCUMENTS_PER_WINDOW * count.max(8)) as u64;
    let mut document = 0;
    while let Some(len) =
        data.lengths().len_of(document).filter(|_| windows.len() < count && document < last)
    {
        let mut ids = vec![0; len.min(most) as usize];
        data.read(document, 0, &mut ids)?;
        let text = tokenizer.decode(&ids)?;
        windows.extend(windows_of(&text, tokenizer, pattern, span, length)?);
        document += 1;
    }
    windows.truncate(count);
    match windows.is_empty() {
        true => Err(Error::Argument(format!(
            "the pattern {:?} has no match in {document} documents with {} tokens before and {} after it",
            pattern.as_str(),
            span.before,
            span.after
        ))),
        false => Ok(windows),
    }
}

fn windows_of(
    text: &str,
    tokenizer: &Tokenizer,
    pattern: &Regex,
    span: Span,
    length: usize,
) -> Result<Vec<Window>> {
    let starts = pattern.find_iter(text).map(|found| found.start());
    let (mut ids, mut matches, mut done) = (Vec::new(), Vec::new(), 0);
    for start in starts {
        ids.extend(tokenizer.encode(&text[done..start])?);
        matches.push(ids.len());
        done = start;
    }
    ids.extend(tokenizer.encode(&text[done..])?);
    let window = |(i, part): (usize, &[u32])| {
        // One token is the start marker.
        let first = i * (length - 1);
        let positions = matches.iter().filter_map(|at| Some(at.checked_sub(first)? + 1));
        let boundaries = positions
            .filter(|at| *at > span.before && at + span.after <= part.len() + 1)
            .collect::<Vec<_>>();
        let tokens = [&[tokenizer.bos()], part].concat();
        (!boundaries.is_empty()).then_some(Window { tokens, boundaries })
    };
    Ok(ids.chunks(length - 1).enumerate().filter_map(window).collect())
}

/// A head at boundaries.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadBoundary {
    /// Its layer, from 0.
    pub layer: usize,
    /// Its number in the layer, from 0.
    pub head: usize,
    /// Mean log gate by distance, from the span's first token on.
    pub log_gates: Vec<f64>,
    /// Mean log gate away from boundaries.
    pub elsewhere: f64,
    /// Mean decay over the span of a boundary: the weight that earlier keys keep.
    pub kept: f64,
    /// Mean decay over as many tokens elsewhere.
    pub kept_elsewhere: f64,
    /// Nats of decay over the span of a boundary, less those elsewhere.
    pub extra: f64,
    /// Standard error of the decay at boundaries, in nats.
    pub extra_error: f64,
}

impl HeadBoundary {
    /// `L1 H3`.
    pub fn name(&self) -> String {
        format!("L{} H{}", self.layer, self.head)
    }

    /// How much less is kept over a boundary than elsewhere, 0 to 1.
    pub fn drop(&self) -> f64 {
        self.kept_elsewhere - self.kept
    }

    /// The distance at which most is forgotten.
    pub fn strongest(&self, span: Span) -> i64 {
        let least = (0..self.log_gates.len())
            .min_by(|a, b| self.log_gates[*a].total_cmp(&self.log_gates[*b]));
        least.unwrap_or(0) as i64 - span.before as i64
    }
}

/// The forget matrix of a head in one window.
#[derive(Clone, Debug)]
pub struct MarkedMatrix {
    /// Layer and head.
    pub place: (usize, usize),
    /// F, averaged over blocks.
    pub forget: MatrixImage,
    /// Tokens of the window.
    pub tokens: usize,
    /// Positions of its boundaries.
    pub boundaries: Vec<usize>,
}

/// All heads of a model at the boundaries of a pattern.
#[derive(Clone, Debug)]
pub struct Boundaries {
    /// Name of the model.
    pub model: String,
    /// The pattern.
    pub pattern: String,
    /// Tokens around a boundary.
    pub span: Span,
    /// Windows that were read.
    pub windows: usize,
    /// Boundaries in them.
    pub count: usize,
    /// Every gated head; first those that keep the least over a boundary, compared with elsewhere.
    pub heads: Vec<HeadBoundary>,
    /// The first heads in the window with the most boundaries.
    pub pictures: Vec<MarkedMatrix>,
}

/// Sums of one head over boundaries and over stretches without one.
#[derive(Clone, Default)]
struct Sums {
    by_distance: Vec<f64>,
    decay: f64,
    decay_squares: f64,
    kept: f64,
    stretches: f64,
    decay_elsewhere: f64,
    kept_elsewhere: f64,
}

/// Reads the windows and averages the gates of every head; the first `pictures` heads get a forget matrix. `progress`
/// receives the number of finished windows.
///
/// # Errors
/// A model without forget gates, ids that it does not know, and gates that are not finite numbers.
pub fn boundaries(
    subject: &Subject<'_>,
    windows: &[Window],
    pattern: &str,
    span: Span,
    pictures: usize,
    mut progress: impl FnMut(u64),
) -> Result<Boundaries> {
    let mut sums: Vec<((usize, usize), Sums)> = Vec::new();
    let mut richest: Option<(&Window, Vec<LayerGates>)> = None;
    for (w, window) in windows.iter().enumerate() {
        let largest = window.tokens.iter().copied().max().unwrap_or(0) as usize;
        subject.check_vocabulary("text", largest + 1)?;
        let layers = observe::gates(subject, &window.tokens, Pruning::Off)?;
        if sums.is_empty() {
            let gated = layers.iter().enumerate().filter(|(_, layer)| layer.is_gated());
            let places = gated.flat_map(|(l, layer)| (0..layer.heads).map(move |h| (l, h)));
            sums = places.map(|place| (place, Sums::default())).collect();
        }
        if sums.is_empty() {
            let detail = format!("the model {} has no forget gates to look at", subject.name);
            return Err(Error::Argument(detail));
        }
        let quiet = stretches(window, span);
        for ((layer, head), sums) in &mut sums {
            let gates: Vec<f64> = layers[*layer].log_gates(*head).map(f64::from).collect();
            sums.add(&gates, window, &quiet, span);
        }
        if richest.as_ref().is_none_or(|(r, _)| r.boundaries.len() < window.boundaries.len()) {
            richest = Some((window, layers));
        }
        progress(w as u64 + 1);
    }
    let count = windows.iter().map(|window| window.boundaries.len()).sum();
    let mut heads: Vec<HeadBoundary> =
        sums.iter().map(|(place, sums)| sums.head(*place, count, span)).collect();
    heads.sort_by(|a, b| b.drop().total_cmp(&a.drop()));
    let picture = |head: &HeadBoundary, window: &Window, layers: &[LayerGates]| MarkedMatrix {
        place: (head.layer, head.head),
        forget: layers[head.layer].forget_matrix(head.head, usize::MAX, PIXELS),
        tokens: window.tokens.len(),
        boundaries: window.boundaries.clone(),
    };
    let pictures = match &richest {
        Some((w, layers)) => heads.iter().take(pictures).map(|h| picture(h, w, layers)).collect(),
        None => Vec::new(),
    };
    Ok(Boundaries {
        model: subject.name.to_string(),
        pattern: pattern.to_string(),
        span,
        windows: windows.len(),
        count,
        heads,
        pictures,
    })
}

/// Starts of stretches of a span's length that no boundary's span touches. The first gate has no effect and is left out.
fn stretches(window: &Window, span: Span) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut at = 1;
    while at + span.len() <= window.tokens.len() {
        let touched = |b: &&usize| at + span.len() + span.before > **b && at < **b + span.after;
        match window.boundaries.iter().rfind(touched) {
            Some(boundary) => at = boundary + span.after,
            None => {
                starts.push(at);
                at += span.len();
            }
        }
    }
    starts
}

impl Sums {
    /// Adds a window with log gates `[T]` of the head.
    fn add(&mut self, gates: &[f64], window: &Window, quiet: &[usize], span: Span) {
        self.by_distance.resize(span.len(), 0.0);
        for boundary in &window.boundaries {
            let around = &gates[boundary - span.before..boundary + span.after];
            self.by_distance.iter_mut().zip(around).for_each(|(sum, gate)| *sum += gate);
            let decay: f64 = around.iter().sum();
            self.decay += decay;
            self.decay_squares += decay * decay;
            self.kept += decay.exp();
        }
        for start in quiet {
            let decay: f64 = gates[*start..start + span.len()].iter().sum();
            self.decay_elsewhere += decay;
            self.kept_elsewhere += decay.exp();
        }
        self.stretches += quiet.len() as f64;
    }

    fn head(&self, (layer, head): (usize, usize), count: usize, span: Span) -> HeadBoundary {
        let n = count.max(1) as f64;
        let stretches = self.stretches.max(1.0);
        let mean = self.decay / n;
        let variance = (self.decay_squares / n - mean * mean).max(0.0);
        let decay_elsewhere = self.decay_elsewhere / stretches;
        HeadBoundary {
            layer,
            head,
            log_gates: self.by_distance.iter().map(|sum| sum / n).collect(),
            elsewhere: decay_elsewhere / span.len() as f64,
            kept: self.kept / n,
            kept_elsewhere: self.kept_elsewhere / stretches,
            extra: decay_elsewhere - mean,
            extra_error: (variance / (n - 1.0).max(1.0)).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_data::MemoryDataset;

    const SPAN: Span = Span { before: 2, after: 4 };

    #[test]
    fn windows_know_their_boundaries() {
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        let text = "fn a\n// b.rs\nfn b\n// c.rs\nfn c, long enough";
        let ids = tokenizer.encode(text).unwrap();
        let identity = tokenizer.identity().to_string();
        let data = MemoryDataset::new(vec![ids.clone(), ids], 256, 255, identity);
        let pattern = boundary_pattern("^// ").unwrap();
        let find = |pattern, length, count| {
            boundary_windows(&data, &tokenizer, pattern, SPAN, length, count)
        };
        let windows = find(&pattern, 100, 9).unwrap();
        assert_eq!(windows.len(), 2);
        assert_eq!((windows[0].tokens[0], &windows[0].boundaries[..]), (255, &[6, 19][..]));
        // A window of 20 tokens holds 19 of the text; the second boundary has no room in the first window.
        let windows = find(&pattern, 20, 1).unwrap();
        assert_eq!((windows.len(), &windows[0].boundaries[..]), (1, &[6][..]));
        let nothing = boundary_pattern("nothing").unwrap();
        let said = find(&nothing, 20, 1).unwrap_err().to_string();
        assert!(said.contains("\"nothing\" has no match in 2 documents"), "{said}");
        let said = boundary_pattern("a(").unwrap_err().to_string();
        assert_eq!(said, "the boundary \"a(\" is not a regular expression: unclosed group");
        assert!(find(&pattern, 6, 1).unwrap_err().to_string().contains("do not fit"));
    }

    #[test]
    fn head_statistics_by_hand() {
        // Gates of -0.1, and of -3 at the boundary and behind it.
        let mut gates = vec![-0.1; 40];
        (gates[20], gates[21]) = (-3.0, -3.0);
        let window = Window { tokens: vec![0; 40], boundaries: vec![20] };
        let quiet = stretches(&window, SPAN);
        assert_eq!(quiet, [1, 7, 24, 30]);
        let mut sums = Sums::default();
        sums.add(&gates, &window, &quiet, SPAN);
        let head = sums.head((1, 2), 1, SPAN);
        assert_eq!(head.log_gates, [-0.1, -0.1, -3.0, -3.0, -0.1, -0.1]);
        assert!((head.elsewhere + 0.1).abs() < 1e-12);
        assert!((head.extra - 5.8).abs() < 1e-12, "{}", head.extra);
        assert!((head.kept - (-6.4f64).exp()).abs() < 1e-12);
        assert!((head.kept_elsewhere - (-0.6f64).exp()).abs() < 1e-12);
        assert_eq!((head.strongest(SPAN), head.name()), (0, "L1 H2".to_string()));
    }
}
