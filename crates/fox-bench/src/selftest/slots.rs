//! Decoding in slots: matmuls against the oracle, logits against a forward pass, and batch invariance.

use anyhow::Result;
use fox_cache::SlotSequence;
use fox_model::{ForwardOptions, Model, ModelConfig, PagePolicy};
use fox_tensor::cases::Rng;
use fox_tensor::{DType, DecodeRow, Device, DeviceKind, Segments, SlotDecoder, Tape, TokenDraw};

use super::decoding::{VOCAB, model_of};
use super::{Args, TOLERANCE, distance, to_bf16};
use crate::output;

/// Slots of the checks.
const SLOTS: usize = 80;
/// Rows of the matmuls, around the sizes at which the kernels change.
const ROWS: [usize; 14] = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256];

/// Outputs and columns of the matmuls.
pub(super) const PRODUCTS: [(usize, usize); 5] =
    [(24, 64), (200, 96), (1000, 1536), (130, 4096), (77, 2080)];

/// Matmuls of decode steps: errors against f64, and batch invariance.
pub(super) fn check_products(device: &Device, products: &[(usize, usize)]) -> Result<bool> {
    let Some(ops) = device.backend().caps().slots else { return Ok(true) };
    let (mut worst, mut count, mut failures) = (0.0f64, 0, String::new());
    for &(results, width) in products {
        let mut rng = Rng::new(width as u64);
        let mut normals =
            |len: usize| -> Vec<f64> { (0..len).map(|_| to_bf16(rng.normal())).collect() };
        let most = ROWS[ROWS.len() - 1];
        let (x, w) = (normals(most * width), normals(results * width));
        let weights = device.from_f64(&w, [results, width])?;
        let multiply = |first: usize, rows: usize| -> Result<Option<Vec<f64>>> {
            let own = &x[first * width..][..rows * width];
            let out =
                ops.batch_invariant_linear(&device.from_f64(own, [rows, width])?, &weights)?;
            Ok(out.map(|out| out.to_f64()).transpose()?)
        };
        let want: Vec<f64> = x
            .chunks(width)
            .flat_map(|x| w.chunks(width).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()))
            .collect();
        // A row alone, independent of its position.
        let alone = |row: usize| multiply(row, 1);
        for rows in ROWS {
            let Some(got) = multiply(0, rows)? else { return Ok(true) };
            let error = distance(&got, &want[..rows * results]);
            worst = worst.max(error);
            count += 1;
            let name = format!("matmul of {rows} rows of {width} to {results}");
            if error.is_nan() || error > TOLERANCE {
                failures += &format!("  FAIL {name} is off by {error:.1e}\n");
            }
            for row in [0, rows / 2, rows - 1] {
                if alone(row)?.as_deref() != Some(&got[row * results..][..results]) {
                    failures += &format!("  FAIL {name}: row {row} has other bits alone\n");
                }
            }
        }
    }
    let text = format!("  {count} decode matmuls, worst error {worst:.1e}, batch-invariant\n");
    output::print(&(text + &failures))?;
    Ok(failures.is_empty())
}

/// A model to check.
pub(super) struct SlotCase {
    pub(super) name: &'static str,
    config: ModelConfig,
    /// Tokens before the first step.
    prompt: usize,
    /// Tokens fed to each sequence in its slot.
    steps: usize,
    /// Numbers of other sequences beside the one whose bits must not change.
    others: [usize; 2],
    /// Takes too long on other devices.
    gpu_only: bool,
}

impl SlotCase {
    fn new(name: &'static str, config: ModelConfig, prompt: usize) -> Self {
        // More tokens than a page has.
        Self { name, config, prompt, steps: 70, others: [6, 63], gpu_only: false }
    }

    fn on_a_gpu(self) -> Self {
        Self { gpu_only: true, ..self }
    }

    /// Few launches, for compute-sanitizer; a page ends among the steps.
    fn brief(self) -> Self {
        Self { steps: 4, others: [1, 8], ..self.on_a_gpu() }
    }
}

pub(super) fn cases() -> Vec<SlotCase> {
    let grouped = |layers: usize, window: usize| {
        let mut config = ModelConfig::fox_pro(512, layers, 4);
        if let Some(mixer) = config.mixer.forgetting_mut() {
            (mixer.kv_heads, mixer.window) = (2, Some(window));
        }
        config
    };
    let (case, pro, llama) = (SlotCase::new, ModelConfig::fox_pro, ModelConfig::fox_llama);
    vec![
        case("slots/fox-pro", pro(128, 2, 2), 30),
        case("slots/fox-llama", llama(128, 2, 2), 130),
        case("slots/transformer-pro", ModelConfig::transformer_pro(128, 2, 2), 64),
        case("slots/grouped-heads-in-a-window", grouped(2, 300), 700),
        case("slots/fox-pro-with-closed-gates", pro(320, 2, 5), 480),
        // More pages than KV splits of four pages.
        case("slots/17000-tokens", pro(128, 2, 2), 17_000).on_a_gpu(),
        case("slots/wide-heads", pro(512, 2, 2), 300).on_a_gpu(),
        case("slots/8-bit/fox-pro", pro(320, 2, 5), 200).on_a_gpu(),
        // Widths that the wgmma kernels support.
        case("slots/8-bit/fox-llama", llama(512, 2, 8), 130).on_a_gpu(),
        case("slots/brief/grouped-heads-in-a-window", grouped(1, 100), 190).brief(),
        case("slots/brief/8-bit", pro(320, 1, 5), 62).brief(),
    ]
}

/// Decode steps of models.
pub(super) fn check_steps(args: &Args, device: &Device) -> Result<bool> {
    let gpu = device.backend().kind() == DeviceKind::Cuda;
    let (mut passed, mut text) = (true, String::new());
    for case in cases() {
        if !args.wants(case.name) || (case.gpu_only && !gpu) {
            continue;
        }
        let model = model_of(case.name, case.config.clone(), device)?;
        let Some(checked) = check_model(&model, &case)? else { continue };
        passed &= checked.passed(device);
        text += &checked.describe(&case, device);
    }
    output::print(&text)?;
    Ok(passed)
}

/// The outcome for a model.
struct Checked {
    /// Relative error of the logits against a forward pass.
    error: f64,
    /// Steps whose bits depend on the batch.
    differences: usize,
    /// Steps whose token differs from the oracle's for the same logits.
    wrong_tokens: usize,
}

impl Checked {
    fn tolerance(device: &Device) -> f64 {
        match device.backend().caps().activation_type {
            DType::Bf16 => 0.03,
            _ => TOLERANCE,
        }
    }

    fn passed(&self, device: &Device) -> bool {
        self.error <= Self::tolerance(device) && self.differences + self.wrong_tokens == 0
    }

    fn describe(&self, case: &SlotCase, device: &Device) -> String {
        let verdict = if self.passed(device) { "" } else { "FAIL " };
        format!(
            "  {verdict}{}: error {:.1e} against a forward pass; of {} steps, {} depend on the batch and {} sample a \
             wrong token\n",
            case.name, self.error, case.steps, self.differences, self.wrong_tokens
        )
    }
}

/// A model with slots.
struct Checker<'m> {
    model: &'m Model,
    policy: PagePolicy,
    decoder: SlotDecoder,
    steps: usize,
}

/// `None` if the device has no slots for the model.
fn check_model(model: &Model, case: &SlotCase) -> Result<Option<Checked>> {
    let (prompt, steps) = (case.prompt, case.steps);
    // Evicted keys have at most e^-20 of any softmax.
    let max_context = prompt + steps + 1;
    let policy = model.page_policy(Some(-20.0), max_context)?;
    let Some(decoder) = model.open_slots(SLOTS, max_context, &policy)? else { return Ok(None) };
    let mut checker = Checker { model, policy, decoder, steps };
    let ids = ids(0, prompt + steps);
    let want = checker.forward(&ids)?;
    let (got, wrong_tokens) = checker.decode(&ids, prompt, 0, 3)?;
    let error = distance(&got, &want[prompt * VOCAB..][..steps * VOCAB]);
    let mut differences = 0;
    for (others, slot) in case.others.into_iter().zip([5, 70]) {
        let (other, _) = checker.decode(&ids, prompt, others, slot)?;
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let steps = got.chunks(VOCAB).zip(other.chunks(VOCAB));
        differences += steps.filter(|(a, b)| bits(a) != bits(b)).count();
    }
    Ok(Some(Checked { error, differences, wrong_tokens }))
}

/// Sampling parameters of a step: greedy, each filter alone, and all together.
fn draw(step: usize) -> Option<TokenDraw> {
    let all = TokenDraw {
        temperature: 0.8,
        top_k: 20,
        top_p: 0.9,
        min_p: 0.05,
        uniform: (step as f64 * 0.618).fract(),
    };
    match step % 6 {
        0 | 1 => None,
        2 => Some(TokenDraw { top_k: 0, top_p: 1.0, min_p: 0.0, ..all }),
        3 => Some(TokenDraw { top_p: 1.0, min_p: 0.0, ..all }),
        4 => Some(TokenDraw { top_k: 0, min_p: 0.0, ..all }),
        _ => Some(all),
    }
}

fn ids(seed: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| ((i * i * 7 + i + 13 * seed) % VOCAB) as i32).collect()
}

impl Checker<'_> {
    /// Logits after every token, from one forward pass.
    fn forward(&self, ids: &[i32]) -> Result<Vec<f64>> {
        let device = self.model.device();
        let mut tape = Tape::inference(device);
        let tokens = device.from_i32(ids, [ids.len()])?;
        let segments = Segments::uniform(1, ids.len());
        let options = ForwardOptions::default();
        let hidden = self.model.forward(&mut tape, &tokens, &segments, None, &options)?;
        Ok(self.model.logits(&mut tape, &hidden.states)?.value().to_f64()?)
    }

    /// Prefills a prompt and enters a slot.
    fn enter(&mut self, prompt: &[i32], slot: usize) -> Result<SlotSequence> {
        let mut cache = self.model.new_paged_cache(&self.policy)?;
        self.model.decode(&[prompt], &mut cache, &ForwardOptions::default())?;
        let mut sequence = SlotSequence::new(cache)?;
        self.decoder.enter(slot, prompt.len(), &mut sequence.past())?;
        Ok(sequence)
    }

    /// Logits of `steps` tokens after the prompt in a slot, beside `others` sequences of other lengths, and the number
    /// of steps with a wrong token. The row changes from step to step.
    fn decode(
        &mut self,
        ids_of: &[i32],
        prompt: usize,
        others: usize,
        slot: usize,
    ) -> Result<(Vec<f64>, usize)> {
        let mut sequences = vec![(slot, ids_of.to_vec(), self.enter(&ids_of[..prompt], slot)?)];
        for other in 0..others {
            let (own, len) = ((slot + 1 + other) % SLOTS, 1 + 11 * other % 150);
            let text = ids(1 + other, len.min(prompt) + self.steps);
            let sequence = self.enter(&text[..len.min(prompt)], own)?;
            sequences.push((own, text, sequence));
        }
        let (mut logits, mut wrong_tokens) = (Vec::new(), 0);
        for step in 0..self.steps {
            let count = sequences.len();
            sequences.rotate_left(step % count);
            let mut rows = Vec::with_capacity(count);
            for (slot, ids, sequence) in &mut sequences {
                let position = sequence.len();
                if sequence.is_full() {
                    sequence.reserve_page()?;
                    self.decoder.update_pages(*slot, &mut sequence.pages_mut())?;
                }
                rows.push(DecodeRow {
                    slot: *slot,
                    token: ids[position],
                    position,
                    draw: draw(step),
                });
            }
            self.decoder.begin(&rows)?;
            let tokens = self.decoder.finish()?;
            for (row, (own, _, sequence)) in sequences.iter_mut().enumerate() {
                if sequence.advance() {
                    sequence.seal_page(&self.decoder.gate_sums(*own)?);
                }
                if *own == slot {
                    let values = self.decoder.logits(row)?;
                    let values: Vec<f64> = values.into_iter().map(f64::from).collect();
                    let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let best = match draw(step) {
                        Some(draw) => Some(draw.choose(&values)),
                        None => values.iter().position(|x| *x == top),
                    };
                    let best = best.map(|id| id as i32);
                    wrong_tokens += usize::from(best.is_none() || best != tokens[row].id);
                    logits.extend(values);
                }
            }
        }
        Ok((logits, wrong_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_passes() {
        let device = Device::naive();
        assert!(check_products(&device, &PRODUCTS[..1]).unwrap());
        let case = SlotCase::new("slots/fox-pro", ModelConfig::fox_pro(32, 1, 2), 100);
        let model = model_of(case.name, case.config.clone(), &device).unwrap();
        let checked = check_model(&model, &case).unwrap().expect("the oracle has slots");
        assert!(checked.passed(&device), "{}", checked.describe(&case, &device));
    }
}
