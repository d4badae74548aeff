//! The reference values of a dump folder, read and checked.

use std::path::{Path, PathBuf};

use fox_tensor::Segments;

use crate::checkpoint::SafetensorsFile;
use crate::{Error, Result};

/// Number of prompt tokens at the start of `greedy`.
pub(super) const PROMPT: usize = 9;

/// Values of the reference. `B` sequences of `T` tokens, row-major.
pub(super) struct Dump {
    pub file: PathBuf,
    pub batch: usize,
    pub time: usize,
    /// Left pads of every sequence.
    pub pads: Vec<usize>,
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
        let pads = match file.dims("attention_mask") {
            None => vec![0; batch],
            Some(dims) if dims == [batch, time] => {
                left_pads(&file.read_i32("attention_mask")?, time).map_err(wrong)?
            }
            Some(dims) => {
                return Err(wrong(format!(
                    "`attention_mask` must be [{batch}, {time}], found {dims:?}"
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
            weights: mean_weights(&pads, time),
            pads,
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
        Ok(Segments::left_padded(self.time, &self.pads)?)
    }

    /// The real tokens of sequence `b`.
    pub fn sequence(&self, b: usize) -> &[i32] {
        &self.input_ids[b * self.time + self.pads[b]..(b + 1) * self.time]
    }
}

fn left_pads(mask: &[i32], time: usize) -> std::result::Result<Vec<usize>, String> {
    let pads_of = |(b, row): (usize, &[i32])| {
        let pads = row.iter().take_while(|&&m| m == 0).count();
        if pads == time || row[pads..].iter().any(|&m| m != 1) {
            return Err(format!(
                "row {b} of `attention_mask` is not zeros (pads) followed by ones (tokens)"
            ));
        }
        Ok(pads)
    };
    mask.chunks(time).enumerate().map(pads_of).collect()
}

fn mean_weights(pads: &[usize], time: usize) -> Vec<f32> {
    let real: usize = pads.iter().map(|pad| time - pad).sum();
    let weight = 1.0 / real as f32;
    let row = |pad: &usize| {
        let pad = *pad;
        (0..time).map(move |t| if t < pad { 0.0 } else { weight })
    };
    pads.iter().flat_map(row).collect()
}
