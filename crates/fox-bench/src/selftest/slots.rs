//! Decoding in slots: matmuls against the oracle, logits against a forward pass, and batch invariance.

use anyhow::{Context, Result};
use fox_cache::{SequenceState, SlotSequence, Slots};
use fox_model::{ForwardOptions, Model, ModelConfig, PagePolicy};
use fox_tensor::cases::Rng;
use fox_tensor::{DType, Device, DeviceKind, FinishedStep, RowToken, Segments, Tape, TokenDraw};
use serde_json::json;

use super::decoding::{VOCAB, model_of, with_sinks};
use super::log::Log;
use super::{Args, TOLERANCE, distance, to_bf16};

/// Slots of the checks.
const SLOTS: usize = 80;
/// Tokens that a sequence is fed, more than a page has.
const STEPS: usize = 70;
/// Rows of the matmuls, around the sizes at which the kernels change.
const ROWS: [usize; 14] = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256];

/// Outputs and columns of the matmuls.
pub(super) const PRODUCTS: [(usize, usize); 5] =
    [(24, 64), (200, 96), (1000, 1536), (130, 4096), (77, 2080)];

/// Matmuls of decode steps: errors against f64, and batch invariance.
pub(super) fn check_products(
    device: &Device,
    products: &[(usize, usize)],
    log: &mut Log,
) -> Result<bool> {
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
    let figures = json!({
        "name": "row products", "cases": count, "worst_error": worst, "tolerance": TOLERANCE,
        "failures": failures,
    });
    log.check(failures.is_empty(), &(text + &failures), figures)
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
        Self { name, config, prompt, steps: STEPS, others: [6, 63], gpu_only: false }
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
        // More pages per head than attention in one launch is for.
        case("slots/transformer-pro/700-tokens", ModelConfig::transformer_pro(128, 2, 2), 700)
            .on_a_gpu(),
        case("slots/grouped-heads-in-a-window", grouped(2, 300), 700),
        case("slots/fox-pro-with-closed-gates", pro(320, 2, 5), 480),
        case("slots/sinks", with_sinks(llama(128, 2, 2)), 130),
        // More pages than KV splits of four pages.
        case("slots/17000-tokens", pro(128, 2, 2), 17_000).on_a_gpu(),
        case("slots/wide-heads", pro(512, 2, 2), 300).on_a_gpu(),
        case("slots/8-bit/fox-pro", pro(320, 2, 5), 200).on_a_gpu(),
        // Widths that the wgmma kernels support.
        case("slots/8-bit/fox-llama", llama(512, 2, 8), 130).on_a_gpu(),
        // The widths of FoX (Pro) 760M, with all kernels of up to 64 rows.
        SlotCase { others: [12, 63], ..case("slots/760m", pro(1536, 1, 24), 200).on_a_gpu() },
        case("slots/brief/grouped-heads-in-a-window", grouped(1, 100), 190).brief(),
        case("slots/brief/8-bit", pro(320, 1, 5), 62).brief(),
    ]
}

/// Decode steps of all models.
pub(super) fn check_steps(args: &Args, device: &Device, log: &mut Log) -> Result<bool> {
    let gpu = device.backend().kind() == DeviceKind::Cuda;
    let mut passed = true;
    for case in cases() {
        if !args.wants(case.name) || (case.gpu_only && !gpu) {
            continue;
        }
        let model = model_of(case.name, case.config.clone(), device)?;
        let Some(checked) = check_model(&model, &case)? else { continue };
        let figures = json!({
            "name": case.name, "error": checked.error,
            "tolerance": Checked::tolerance(device),
            "steps": case.steps, "steps_that_depend_on_the_batch": checked.differences,
            "wrong_tokens": checked.wrong_tokens, "steps_that_differ_when_begun_ahead": checked.ahead,
        });
        let text = checked.describe(&case, device);
        passed &= log.check(checked.passed(device), &text, figures)?;
    }
    Ok(passed)
}

/// Name of [`check_greedy`] for `--only`.
pub(super) const GREEDY: &str = "greedy";

/// Greedy decoding as evaluation does it, in slots, against steps op by op that are fed the same tokens: logits must be
/// close, and the most likely token the same unless two logits are closer than their errors.
pub(super) fn check_greedy(device: &Device, log: &mut Log) -> Result<bool> {
    let llama = || ModelConfig::fox_llama(128, 2, 2);
    let models = [
        ("fox-pro", ModelConfig::fox_pro(128, 2, 2)),
        ("fox-llama", llama()),
        ("sinks", with_sinks(llama())),
        ("mamba2", ModelConfig::mamba2(128, 2, 4)),
    ];
    let mut passed = true;
    for (name, config) in models {
        let model = model_of(name, config, device)?;
        let Greedy { error, tokens, same, tied } = greedy_error(&model)?;
        let right = error <= Checked::tolerance(device) && same + tied == tokens;
        let text = format!(
            "  {}greedy/{name}: error {error:.1e} against steps op by op; of {tokens} tokens, {same} are the same and \
             {tied} differ where two logits are closer than the tolerance\n",
            if right { "" } else { "FAIL " }
        );
        let figures = json!({
            "name": format!("greedy/{name}"), "error": error,
            "tolerance": Checked::tolerance(device), "tokens": tokens, "same": same, "tied": tied,
        });
        passed &= log.check(right, &text, figures)?;
    }
    Ok(passed)
}

/// Greedy decoding in slots against steps op by op.
struct Greedy {
    /// Relative error of the logits.
    error: f64,
    /// Tokens compared.
    tokens: usize,
    /// Tokens that are the same.
    same: usize,
    /// Other tokens whose logit, op by op, is within the tolerance of the largest.
    tied: usize,
}

fn greedy_error(model: &Model) -> Result<Greedy> {
    let options = ForwardOptions::default();
    let mut decoder = model.token_decoder(options);
    let width = decoder.reserve(200 + STEPS)?;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    let mut found = Greedy { error: 0.0, tokens: 0, same: 0, tied: 0 };
    let prompts: Vec<Vec<i32>> = [3, 63, 200].map(|len| ids(len, len)).into();
    for group in prompts.chunks(width) {
        let (mut states, mut caches, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for prompt in group {
            let mut cache = decoder.new_cache(prompt.len() + STEPS)?;
            decoder.prefill(prompt, &mut cache)?;
            states.push(SequenceState::from(cache));
            caches.push(model.new_cache(1, prompt.len() + STEPS)?);
            let logits =
                model.decode(&[prompt], caches.last_mut().context("a cache")?, &options)?;
            next.push(best(&logits.to_f32()?) as i32);
        }
        for _ in 0..STEPS {
            let mut own: Vec<&mut SequenceState> = states.iter_mut().collect();
            let steps = decoder.step(&mut own, &next)?;
            for ((logits, cache), next) in steps.into_iter().zip(&mut caches).zip(&mut next) {
                let by_ops = model.decode(&[&[*next]], cache, &options)?.to_f32()?;
                let (token, wanted) = (best(&logits), best(&by_ops));
                let scale = by_ops.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let gap =
                    f64::from((by_ops[wanted] - by_ops[token]) / scale.max(f32::MIN_POSITIVE));
                let is_tied = gap <= 2.0 * Checked::tolerance(model.device());
                found.tokens += 1;
                found.same += usize::from(token == wanted);
                found.tied += usize::from(token != wanted && is_tied);
                got.extend(logits.into_iter().map(f64::from));
                want.extend(by_ops.into_iter().map(f64::from));
                *next = wanted as i32;
            }
        }
    }
    Ok(Greedy { error: distance(&got, &want), ..found })
}

/// The first of the largest logits.
fn best(logits: &[f32]) -> usize {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|x| *x == top).unwrap_or(0)
}

/// The outcome for a model.
struct Checked {
    /// Relative error of the logits against a forward pass.
    error: f64,
    /// Steps whose bits depend on the batch.
    differences: usize,
    /// Steps whose token differs from the oracle's for the same logits.
    wrong_tokens: usize,
    /// Steps with other results when they begin before the one before is finished.
    ahead: usize,
}

impl Checked {
    fn tolerance(device: &Device) -> f64 {
        match device.backend().caps().activation_type {
            DType::Bf16 => 0.03,
            _ => TOLERANCE,
        }
    }

    fn passed(&self, device: &Device) -> bool {
        self.error <= Self::tolerance(device)
            && self.differences + self.wrong_tokens + self.ahead == 0
    }

    fn describe(&self, case: &SlotCase, device: &Device) -> String {
        let verdict = if self.passed(device) { "" } else { "FAIL " };
        format!(
            "  {verdict}{}: error {:.1e} against a forward pass; of {} steps, {} depend on the batch, {} sample a wrong \
             token and {} differ when begun ahead\n",
            case.name, self.error, case.steps, self.differences, self.wrong_tokens, self.ahead
        )
    }
}

/// A model with slots.
struct Checker<'m> {
    model: &'m Model,
    policy: PagePolicy,
    slots: Slots,
    steps: usize,
}

/// `None` if the device has no slots for the model.
fn check_model(model: &Model, case: &SlotCase) -> Result<Option<Checked>> {
    let (prompt, steps) = (case.prompt, case.steps);
    // Evicted keys have at most e^-20 of any softmax.
    let max_context = prompt + steps + 1;
    let policy = model.page_policy(Some(-20.0), max_context)?;
    let Some(slots) = model.open_slots(SLOTS, max_context, &policy)? else { return Ok(None) };
    let mut checker = Checker { model, policy, slots, steps };
    let ids = ids(0, prompt + steps);
    let want = checker.forward(&ids)?;
    let (got, wrong_tokens) = checker.decode(&ids, prompt, 0)?;
    let error = distance(&got, &want[prompt * VOCAB..][..steps * VOCAB]);
    let mut differences = 0;
    for count in case.others {
        let (other, _) = checker.decode(&ids, prompt, count)?;
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let steps = got.chunks(VOCAB).zip(other.chunks(VOCAB));
        differences += steps.filter(|(a, b)| bits(a) != bits(b)).count();
    }
    let [in_turn, ahead] = [false, true].map(|ahead| checker.generate(&ids[..prompt], ahead));
    let ahead = in_turn?.iter().zip(ahead?).filter(|(a, b)| **a != *b).count();
    Ok(Some(Checked { error, differences, wrong_tokens, ahead }))
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
    fn enter(&mut self, prompt: &[i32]) -> Result<SlotSequence> {
        let mut cache = self.model.new_paged_cache(&self.policy)?;
        self.model.decode(&[prompt], &mut cache, &ForwardOptions::default())?;
        Ok(self.slots.enter(cache)?)
    }

    /// Logits of `steps` tokens after the prompt in a slot, beside `others` sequences of other lengths in the slots
    /// before, and the number of steps with a wrong token. The row changes from step to step.
    fn decode(
        &mut self,
        ids_of: &[i32],
        prompt: usize,
        others: usize,
    ) -> Result<(Vec<f64>, usize)> {
        let mut sequences = Vec::with_capacity(others + 1);
        for other in 0..others {
            let len = (1 + 11 * other % 150).min(prompt);
            let text = ids(1 + other, len + self.steps);
            let sequence = self.enter(&text[..len])?;
            sequences.push((false, text, sequence));
        }
        sequences.push((true, ids_of.to_vec(), self.enter(&ids_of[..prompt])?));
        let (mut logits, mut wrong_tokens) = (Vec::new(), 0);
        for step in 0..self.steps {
            let count = sequences.len();
            sequences.rotate_left(step % count);
            let mut rows = Vec::with_capacity(count);
            for (_, ids, sequence) in &mut sequences {
                let token = ids[sequence.len()];
                rows.push(self.slots.row(sequence, RowToken::Id(token), draw(step))?);
            }
            self.slots.begin(&rows)?;
            sequences.iter_mut().for_each(|(_, _, sequence)| sequence.advance());
            let FinishedStep { tokens, page_ends } = self.slots.finish()?;
            for (row, sums) in page_ends {
                sequences[row].2.seal_page(&sums);
            }
            for (row, (is_checked, _, _)) in sequences.iter().enumerate() {
                if *is_checked {
                    let values = self.slots.logits(row)?;
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

    /// The results of steps that feed three sequences what they have sampled, by sequence. With `ahead`, a step begins
    /// before the one before is finished. Rows change from step to step.
    fn generate(&mut self, prompt: &[i32], ahead: bool) -> Result<Vec<FinishedStep>> {
        const COUNT: usize = 3;
        let prompts = [prompt, &prompt[..prompt.len() / 2 + 1], &prompt[..1]];
        let mut sequences =
            prompts.into_iter().map(|own| self.enter(own)).collect::<Result<Vec<_>>>()?;
        let mut results: Vec<FinishedStep> = Vec::with_capacity(self.steps);
        // Row of sequence `n` in a step.
        let row_of = |n: usize, step: usize| (n + step) % COUNT;
        let finish = |slots: &mut Slots, sequences: &mut [SlotSequence], step: usize| {
            let FinishedStep { tokens, page_ends } = slots.finish()?;
            let sequence_of =
                |row: usize| (0..COUNT).find(|n| row_of(*n, step) == row).unwrap_or(0);
            let page_ends: Vec<_> =
                page_ends.into_iter().map(|(row, sums)| (sequence_of(row), sums)).collect();
            page_ends.iter().for_each(|(n, sums)| sequences[*n].seal_page(sums));
            let tokens = (0..COUNT).map(|n| tokens[row_of(n, step)]).collect();
            fox_cache::Result::Ok(FinishedStep { tokens, page_ends })
        };
        for step in 0..self.steps {
            let mut rows = vec![None; COUNT];
            for (n, sequence) in sequences.iter_mut().enumerate() {
                let token = match results.last() {
                    _ if step == 0 => RowToken::Id(n as i32),
                    _ if ahead => RowToken::Sampled(row_of(n, step - 1)),
                    last => RowToken::Id(last.and_then(|last| last.tokens[n].id).unwrap_or(0)),
                };
                rows[row_of(n, step)] = Some(self.slots.row(sequence, token, draw(step))?);
            }
            self.slots.begin(&rows.into_iter().flatten().collect::<Vec<_>>())?;
            sequences.iter_mut().for_each(SlotSequence::advance);
            if ahead && step > 0 {
                results.push(finish(&mut self.slots, &mut sequences, step - 1)?);
            }
            if !ahead || step + 1 == self.steps {
                results.push(finish(&mut self.slots, &mut sequences, step)?);
            }
        }
        Ok(results)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_passes() {
        let device = Device::naive();
        assert!(check_products(&device, &PRODUCTS[..1], &mut Log::default()).unwrap());
        let case = SlotCase::new("slots/fox-pro", ModelConfig::fox_pro(32, 1, 2), 100);
        let model = model_of(case.name, case.config.clone(), &device).unwrap();
        let checked = check_model(&model, &case).unwrap().expect("the oracle has slots");
        assert!(checked.passed(&device), "{}", checked.describe(&case, &device));
        let model = model_of("greedy", ModelConfig::fox_llama(32, 1, 2), &device).unwrap();
        let found = greedy_error(&model).unwrap();
        assert!(found.error < 1e-6, "{}", found.error);
        assert_eq!((found.same, found.tokens), (3 * STEPS, 3 * STEPS));
    }
}
