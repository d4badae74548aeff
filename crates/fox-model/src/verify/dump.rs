//! The reference values of a dump folder, read and checked.

use std::ops::Range;
use std::path::{Path, PathBuf};

use fox_tensor::{Segment, Segments};

use crate::checkpoint::SafetensorsFile;
use crate::{Error, Result};

/// Number of prompt tokens at the start of `greedy`.
pub(super) const PROMPT: usize = 9;

/// Values of the reference. `B` sequences of `T` tokens, row-major.
pub(super) struct Dump {
    pub file: PathBuf,
    pub batch: usize,
    pub time: usize,
    /// Rows of every sequence among `B * T`: what follows the left pads, or the packed sequences of one row.
    pub sequences: Vec<Range<usize>>,
    /// `[B * T]`.
    pub input_ids: Vec<i32>,
    /// `[B * T]`, already shifted.
    pub labels: Vec<i32>,
    /// `[B * T]`, weights of the mean: equal at real positions, 0 at pads.
    pub weights: Vec<f32>,
    /// `[B * T, V]`.
    pub logits: Vec<f32>,
    /// `[B * T]`.
    pub loss: Vec<f32>,
    pub mean_loss: f32,
    /// By the name of the weight in the file.
    pub gradients: Vec<(String, Vec<f32>)>,
    /// `[B * greedy_len]`: prompt and continuation.
    pub greedy: Vec<i32>,
    pub greedy_len: usize,
}

impl Dump {
    pub fn open(path: &Path, vocab: usize) -> Result<Self> {
        let mut file = SafetensorsFile::open(path)?;
        let wrong = |detail: String| Error::Dump { file: path.to_path_buf(), detail };
        let (batch, time) = match file.dims("input_ids") {
            Some(&[batch, time]) if batch > 0 && time >= PROMPT => (batch, time),
            other => {
                return Err(wrong(format!("`input_ids` must be [B, T >= 9], found {other:?}")));
            }
        };
        let greedy_len = match file.dims("greedy") {
            Some(&[n, len]) if n == batch && len > PROMPT => len,
            other => {
                return Err(wrong(format!("`greedy` must be [{batch}, > 9], found {other:?}")));
            }
        };
        for (name, dims) in [
            ("labels", vec![batch, time]),
            ("logits", vec![batch, time, vocab]),
            ("loss", vec![batch, time]),
            ("mean_loss", vec![1]),
        ] {
            if file.dims(name) != Some(&dims[..]) {
                let found = file.dims(name);
                return Err(wrong(format!("`{name}` must be {dims:?}, found {found:?}")));
            }
        }
        let sequences = match (file.dims("attention_mask"), file.dims("cu_seqlens")) {
            (None, None) => (0..batch).map(|b| b * time..(b + 1) * time).collect(),
            (Some(dims), None) if dims == [batch, time] => {
                padded(&file.read_i32("attention_mask")?, time).map_err(wrong)?
            }
            (None, Some(&[_])) if batch == 1 => {
                packed(&file.read_i32("cu_seqlens")?, time).map_err(wrong)?
            }
            (mask, ends) => {
                return Err(wrong(format!(
                    "either `attention_mask` [{batch}, {time}] or, with one row, `cu_seqlens` [N + 1] may be there, \
                     found {mask:?} and {ends:?}"
                )));
            }
        };
        let names: Vec<String> = file.names().map(str::to_string).collect();
        let mut gradients = Vec::new();
        for name in names.iter().filter_map(|name| name.strip_prefix("grad.")) {
            gradients.push((name.to_string(), file.read_f32(&format!("grad.{name}"))?));
        }
        Ok(Dump {
            file: path.to_path_buf(),
            batch,
            time,
            weights: mean_weights(&sequences, batch * time),
            sequences,
            input_ids: file.read_i32("input_ids")?,
            labels: file.read_i32("labels")?,
            logits: file.read_f32("logits")?,
            loss: file.read_f32("loss")?,
            mean_loss: file.read_f32("mean_loss")?[0],
            gradients,
            greedy: file.read_i32("greedy")?,
            greedy_len,
        })
    }

    pub fn rows(&self) -> usize {
        self.batch * self.time
    }

    pub fn segments(&self) -> Result<Segments> {
        let segment = |rows: &Range<usize>| {
            let (start, len) = (rows.start, rows.len());
            Segment { q_start: start, q_len: len, k_start: start, k_len: len }
        };
        Ok(Segments::new(self.sequences.iter().map(segment).collect())?)
    }

    /// The real tokens of sequence `n`.
    pub fn sequence(&self, n: usize) -> &[i32] {
        &self.input_ids[self.sequences[n].clone()]
    }
}

/// Rows of left-padded sequences.
fn padded(mask: &[i32], time: usize) -> std::result::Result<Vec<Range<usize>>, String> {
    let rows = |(b, row): (usize, &[i32])| {
        let pads = row.iter().take_while(|&&m| m == 0).count();
        if pads == time || row[pads..].iter().any(|&m| m != 1) {
            return Err(format!(
                "row {b} of `attention_mask` is not zeros (pads) followed by ones (tokens)"
            ));
        }
        Ok(b * time + pads..(b + 1) * time)
    };
    mask.chunks(time).enumerate().map(rows).collect()
}

/// Rows of packed sequences.
fn packed(cu_seqlens: &[i32], time: usize) -> std::result::Result<Vec<Range<usize>>, String> {
    let ends: Vec<usize> = cu_seqlens.iter().filter_map(|&end| usize::try_from(end).ok()).collect();
    let rising = ends.windows(2).all(|pair| pair[0] < pair[1]);
    if ends.len() != cu_seqlens.len()
        || !rising
        || ends.first() != Some(&0)
        || ends.last() != Some(&time)
    {
        return Err(format!("`cu_seqlens` must rise from 0 to {time}, found {cu_seqlens:?}"));
    }
    Ok(ends.windows(2).map(|pair| pair[0]..pair[1]).collect())
}

/// Equal weights of all rows of sequences.
fn mean_weights(sequences: &[Range<usize>], rows: usize) -> Vec<f32> {
    let real: usize = sequences.iter().map(Range::len).sum();
    let mut weights = vec![0.0; rows];
    for rows in sequences {
        weights[rows.clone()].fill(1.0 / real as f32);
    }
    weights
}
