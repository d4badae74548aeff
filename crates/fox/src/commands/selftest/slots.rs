//! Decode steps in slots: products against the oracle, logits against a forward pass, and the bits of a row alone and
//! in company.

use anyhow::Result;
use fox_model::{Cache, ForwardOptions, Model, ModelConfig, PagePolicy};
use fox_tensor::cases::Rng;
use fox_tensor::{DType, Device, PAGE, Segments, TokenDraw, DecodeRow, SlotDecoder, Tape};

use super::decoding::{VOCAB, model_of};
use super::{Args, TOLERANCE, distance, to_bf16};
use crate::output;

/// Slots of the checks, and rows of a step.
const SLOTS: usize = 80;
/// Rows of the products, around the sizes at which the kernels change.
const ROWS: [usize; 14] = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256];

/// Results and widths of the products.
pub(super) const PRODUCTS: [(usize, usize); 5] =
    [(24, 64), (200, 96), (1000, 1536), (130, 4096), (77, 2080)];

/// Products of rows: errors against f64, and every row alone.
pub(super) fn check_products(device: &Device, products: &[(usize, usize)]) -> Result<bool> {
    let Some(ops) = device.backend().caps().streams else { return Ok(true) };
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
            let out = ops.batch_invariant_linear(&device.from_f64(own, [rows, width])?, &weights)?;
            Ok(out.map(|out| out.to_f64()).transpose()?)
        };
        let want: Vec<f64> = x
            .chunks(width)
            .flat_map(|x| w.chunks(width).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()))
            .collect();
        // A row alone, whatever its place was.
        let alone = |row: usize| multiply(row, 1);
        for rows in ROWS {
            let Some(got) = multiply(0, rows)? else { return Ok(true) };
            let error = distance(&got, &want[..rows * results]);
            worst = worst.max(error);
            count += 1;
            let name = format!("product of {rows} rows of {width} to {results}");
            if error.is_nan() || error > TOLERANCE {
                failures += &format!("  FAIL {name} is off by {error:.1e}\n");
            }
            for row in [0, rows / 2, rows - 1] {
                if alone(row)?.as_deref() != Some(&got[row * results..][..results]) {
                    failures += &format!("  FAIL {name}: row {row} alone has other bits\n");
                }
            }
        }
    }
    let text =
        format!("  {count} products of rows, worst error {worst:.1e}, rows alone and in company\n");
    output::print(&(text + &failures))?;
    Ok(failures.is_empty())
}

/// A model whose steps are checked.
pub(super) struct SlotCase {
    pub(super) name: &'static str,
    config: ModelConfig,
    /// Tokens before the first step.
    prompt: usize,
    /// Tokens that each sequence is fed in its slot.
    steps: usize,
    /// Other sequences beside one whose bits must not change.
    company: [usize; 2],
    /// Other devices would take too long.
    gpu_only: bool,
}

impl SlotCase {
    fn new(name: &'static str, config: ModelConfig, prompt: usize) -> Self {
        // Beyond the end of a page.
        Self { name, config, prompt, steps: 70, company: [6, 63], gpu_only: false }
    }

    fn on_a_gpu(self) -> Self {
        Self { gpu_only: true, ..self }
    }

    /// Few launches, for tools that make each a thousand times slower; a page ends among the steps.
    fn brief(self) -> Self {
        Self { steps: 4, company: [1, 8], ..self.on_a_gpu() }
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
        case("streams/fox-pro", pro(128, 2, 2), 30),
        case("streams/fox-llama", llama(128, 2, 2), 130),
        case("streams/transformer-pro", ModelConfig::transformer_pro(128, 2, 2), 64),
        case("streams/grouped-heads-in-a-window", grouped(2, 300), 700),
        case("streams/fox-pro-with-closed-gates", pro(320, 2, 5), 480),
        // More pages than runs of four.
        case("streams/17000-tokens", pro(128, 2, 2), 17_000).on_a_gpu(),
        case("streams/wide-heads", pro(512, 2, 2), 300).on_a_gpu(),
        case("streams/8-bit/fox-pro", pro(320, 2, 5), 200).on_a_gpu(),
        // Of widths that Hopper's products take.
        case("streams/8-bit/fox-llama", llama(512, 2, 8), 130).on_a_gpu(),
        case("streams/brief/grouped-heads-in-a-window", grouped(1, 100), 190).brief(),
        case("streams/brief/8-bit", pro(320, 1, 5), 62).brief(),
    ]
}

/// Steps of whole models.
pub(super) fn check_steps(args: &Args, device: &Device) -> Result<bool> {
    let gpu = device.backend().name().starts_with("cuda");
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

/// What was found of a model.
struct Checked {
    /// Of the logits from those of a forward pass.
    error: f64,
    /// Steps whose bits were others in company.
    differences: usize,
    /// Steps whose choice was not the oracle's from the same logits.
    wrong_choices: usize,
}

impl Checked {
    fn tolerance(device: &Device) -> f64 {
        match device.backend().caps().activation_type {
            DType::Bf16 => 0.03,
            _ => TOLERANCE,
        }
    }

    fn passed(&self, device: &Device) -> bool {
        self.error <= Self::tolerance(device) && self.differences + self.wrong_choices == 0
    }

    fn describe(&self, case: &SlotCase, device: &Device) -> String {
        let verdict = if self.passed(device) { "" } else { "FAIL " };
        format!(
            "  {verdict}{}: steps in slots are off by {:.1e} from a forward pass; of {} steps {} have other bits in \
             company and {} choose another token\n",
            case.name, self.error, case.steps, self.differences, self.wrong_choices
        )
    }
}

/// A model that decodes in slots what it has also read in one go.
struct Checker<'m> {
    model: &'m Model,
    policy: PagePolicy,
    streams: SlotDecoder,
    steps: usize,
}

/// `None` where the device has no slots for the model.
fn check_model(model: &Model, case: &SlotCase) -> Result<Option<Checked>> {
    let (prompt, steps) = (case.prompt, case.steps);
    // What is dropped has a share of at most e^-20.
    let max_context = prompt + steps + 1;
    let policy = model.page_policy(Some(-20.0), max_context)?;
    let Some(streams) = model.open_slots(SLOTS, max_context, &policy)? else { return Ok(None) };
    let mut checker = Checker { model, policy, streams, steps };
    let ids = ids(0, prompt + steps);
    let want = checker.forward(&ids)?;
    let (got, wrong_choices) = checker.decode(&ids, prompt, 0, 3)?;
    let error = distance(&got, &want[prompt * VOCAB..][..steps * VOCAB]);
    let mut differences = 0;
    for (company, slot) in case.company.into_iter().zip([5, 70]) {
        let (other, _) = checker.decode(&ids, prompt, company, slot)?;
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let steps = got.chunks(VOCAB).zip(other.chunks(VOCAB));
        differences += steps.filter(|(a, b)| bits(a) != bits(b)).count();
    }
    Ok(Some(Checked { error, differences, wrong_choices }))
}

/// How the token of a step is chosen: each filter alone and all together, and none.
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
    /// Logits after every token, by one forward pass.
    fn forward(&self, ids: &[i32]) -> Result<Vec<f64>> {
        let device = self.model.device();
        let mut tape = Tape::inference(device);
        let tokens = device.from_i32(ids, [ids.len()])?;
        let segments = Segments::uniform(1, ids.len());
        let options = ForwardOptions::default();
        let hidden = self.model.forward(&mut tape, &tokens, &segments, None, &options)?;
        Ok(self.model.logits(&mut tape, &hidden.states)?.value().to_f64()?)
    }

    /// Reads a prompt and takes a slot.
    fn enter(&mut self, prompt: &[i32], slot: usize) -> Result<Cache> {
        let mut cache = self.model.new_paged_cache(&self.policy)?;
        self.model.decode(&[prompt], &mut cache, &ForwardOptions::default())?;
        self.streams.enter(slot, prompt.len(), &mut cache.stream_past()?)?;
        Ok(cache)
    }

    /// Logits of `steps` tokens after the prompt, in a slot, beside `company` other sequences of other lengths; and
    /// the steps whose choice was wrong. The row moves from step to step.
    fn decode(
        &mut self,
        ids_of: &[i32],
        prompt: usize,
        company: usize,
        slot: usize,
    ) -> Result<(Vec<f64>, usize)> {
        let mut sequences = vec![(slot, ids_of.to_vec(), self.enter(&ids_of[..prompt], slot)?)];
        for other in 0..company {
            let (own, len) = ((slot + 1 + other) % SLOTS, 1 + 11 * other % 150);
            let text = ids(1 + other, len.min(prompt) + self.steps);
            let cache = self.enter(&text[..len.min(prompt)], own)?;
            sequences.push((own, text, cache));
        }
        let (mut logits, mut wrong_choices) = (Vec::new(), 0);
        for step in 0..self.steps {
            let count = sequences.len();
            sequences.rotate_left(step % count);
            let mut rows = Vec::with_capacity(count);
            for (slot, ids, cache) in &mut sequences {
                let position = cache.lens()[0];
                if step > 0 && position.is_multiple_of(PAGE) {
                    cache.reserve_one()?;
                    self.streams.extend(*slot, &mut cache.stream_keys())?;
                }
                rows.push(DecodeRow {
                    slot: *slot,
                    token: ids[position],
                    position,
                    draw: draw(step),
                });
            }
            self.streams.begin(&rows)?;
            let choices = self.streams.finish()?;
            for (row, (own, _, cache)) in sequences.iter_mut().enumerate() {
                if cache.advance() {
                    cache.seal_page(&self.streams.sums(*own)?);
                }
                if *own == slot {
                    let values = self.streams.logits(row)?;
                    let values: Vec<f64> = values.into_iter().map(f64::from).collect();
                    let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let best = match draw(step) {
                        Some(draw) => Some(draw.choose(&values)),
                        None => values.iter().position(|x| *x == top),
                    };
                    let best = best.map(|id| id as i32);
                    wrong_choices += usize::from(best.is_none() || best != choices[row].id);
                    logits.extend(values);
                }
            }
        }
        Ok((logits, wrong_choices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_passes() {
        let device = Device::naive();
        assert!(check_products(&device, &PRODUCTS[..1]).unwrap());
        let case = SlotCase::new("streams/fox-pro", ModelConfig::fox_pro(32, 1, 2), 100);
        let model = model_of(case.name, case.config.clone(), &device).unwrap();
        let checked = check_model(&model, &case).unwrap().expect("the oracle has slots");
        assert!(checked.passed(&device), "{}", checked.describe(&case, &device));
    }
}
