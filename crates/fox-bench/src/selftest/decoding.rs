//! Decoding op by op against forward passes, for every kind of model.

use anyhow::Result;
use fox_model::{Cache, ForwardOptions, Model, ModelConfig};
use fox_tensor::{DType, Device, Segments, Tape, WeightFormat};
use serde_json::json;

use super::log::Log;
use super::{Args, TOLERANCE, distance};

/// Name, model, tokens of the prompt, sequences. The long ones begin with a prompt, so that their keys are more than one
/// thread block takes.
pub(super) fn cases() -> Vec<(&'static str, ModelConfig, usize, usize)> {
    let mut grouped = ModelConfig::fox_pro(512, 2, 4);
    if let Some(mixer) = grouped.mixer.forgetting_mut() {
        (mixer.kv_heads, mixer.window) = (2, Some(300));
    }
    vec![
        ("decoding/fox-pro", ModelConfig::fox_pro(128, 2, 2), 0, 2),
        ("decoding/fox-llama", ModelConfig::fox_llama(128, 2, 2), 0, 3),
        ("decoding/transformer-pro", ModelConfig::transformer_pro(128, 2, 2), 0, 1),
        ("decoding/fox-pro-after-a-prompt", ModelConfig::fox_pro(320, 2, 5), 480, 8),
        ("decoding/grouped-heads-in-a-window", grouped, 480, 5),
        ("decoding/fox-pro-with-closed-gates", ModelConfig::fox_pro(320, 2, 5), 480, 3),
        ("decoding/fox-pro-8-bit", ModelConfig::fox_pro(320, 2, 5), 100, 8),
        ("decoding/mamba2-8-bit", ModelConfig::mamba2(128, 2, 4), 0, 2),
        ("decoding/mamba2", ModelConfig::mamba2(128, 2, 4), 0, 2),
        ("decoding/hgrn2", ModelConfig::hgrn2(128, 2, 2), 0, 2),
        ("decoding/delta-net", ModelConfig::delta_net(128, 2, 2), 0, 2),
        ("decoding/gated-delta-net", ModelConfig::gated_delta_net(128, 2, 2), 0, 2),
        ("decoding/fox-window", ModelConfig::fox_window(128, 2, 2), 0, 2),
        ("decoding/fox-gated-delta-net", ModelConfig::fox_gated_delta_net(128, 4, 2), 0, 2),
        ("decoding/mamba2-window", ModelConfig::mamba2_window(128, 2, 2), 0, 2),
        ("decoding/samba", ModelConfig::samba(128, 2, 2), 0, 2),
        ("decoding/sinks", with_sinks(ModelConfig::fox_llama(128, 2, 2)), 0, 2),
    ]
}

/// The same model with an attention sink per head.
pub(super) fn with_sinks(mut config: ModelConfig) -> ModelConfig {
    if let Some(mixer) = config.mixer.forgetting_mut() {
        mixer.sink = true;
    }
    config
}

/// Token by token through the decode state against one forward pass.
pub(super) fn check(args: &Args, device: &Device, log: &mut Log) -> Result<bool> {
    let narrow = device.backend().caps().activation_type == DType::Bf16;
    let mut passed = true;
    let packs = device.backend().caps().packing.is_some();
    let wanted = |name: &str| args.wants(name) && (packs || !name.contains(EIGHT_BIT));
    for (name, config, prompt, batch) in cases().into_iter().filter(|(name, ..)| wanted(name)) {
        let model = model_of(name, config, device)?;
        let tolerance = match (narrow, name.contains(EIGHT_BIT)) {
            (true, _) => 0.03,
            // Activations may be rounded to 8 bits too: where two values differ by a rounding error, some fall on either
            // side of a boundary.
            (false, true) => EIGHT_BIT_TOLERANCE,
            (false, false) => TOLERANCE,
        };
        // Evicted keys have at most e^-20 of any softmax.
        let policy = model.page_policy(Some(-20.0), 4096)?;
        let paged: Result<Vec<Cache>, _> =
            (0..batch).map(|_| model.new_paged_cache(&policy)).collect();
        let caches = [model.new_cache(batch, 8)?, Cache::join(paged?)?];
        let [rows, pages] = caches.map(|cache| decode_error(&model, prompt, cache));
        let (rows, pages) = (rows?, pages?);
        let right = rows <= tolerance && pages <= tolerance;
        passed &= right;
        let verdict = if right { "" } else { "FAIL " };
        let text = format!(
            "  {verdict}{name} is off by {rows:.1e}, in pages by {pages:.1e} from a forward pass\n"
        );
        let figures =
            json!({ "name": name, "error": rows, "error_in_pages": pages, "tolerance": tolerance });
        log.check(right, &text, figures)?;
    }
    Ok(passed)
}

pub(super) const VOCAB: usize = 97;
/// In the names of models whose first heads forget everything, and of those with 8-bit weights.
const CLOSED: &str = "with-closed-gates";
const EIGHT_BIT: &str = "8-bit";

/// Steps of the rounding are 1/127 of the largest value of a block; a CPU with VNNI is off by 2.6e-3.
const EIGHT_BIT_TOLERANCE: f64 = 1e-2;

/// A model of a case, with what its name says.
pub(super) fn model_of(name: &str, config: ModelConfig, device: &Device) -> Result<Model> {
    let mut model = Model::init(&ModelConfig { vocab_size: VOCAB, ..config }, 3, device)?;
    if name.contains(CLOSED) {
        close_first_heads(&mut model)?;
    }
    if name.contains(EIGHT_BIT) {
        model.pack_weights(WeightFormat::Int8)?;
    }
    Ok(model)
}

/// Gives the first head of every layer gates of -3e38, of which two add up to infinity.
fn close_first_heads(model: &mut Model) -> Result<()> {
    let device = model.device().clone();
    for (_, spec, bias) in model.params_mut().iter_mut() {
        if spec.name.ends_with("fgate_proj.bias") {
            let mut values = bias.to_f32()?;
            values[0] = -3e38;
            *bias = device.from_f32(&values, bias.shape())?;
        }
    }
    Ok(())
}

/// Relative distance of the logits of the cache's sequences after every token; the first begins with `prompt`
/// tokens in one go, the others are alike.
fn decode_error(model: &Model, prompt: usize, mut cache: Cache) -> Result<f64> {
    const STEPS: usize = 70;
    // The others start later: their first tokens come in one go.
    const LEAD: usize = 5;
    let (device, options) = (model.device(), ForwardOptions::default());
    let lengths = [prompt + STEPS, STEPS];
    let ids: Vec<i32> = (0..lengths[0] + STEPS).map(|i| ((i * i * 7 + i) % VOCAB) as i32).collect();
    let mut tape = Tape::inference(device);
    let tokens = device.from_i32(&ids, [ids.len()])?;
    let segments = Segments::packed(&[0, lengths[0], lengths[0] + STEPS])?;
    let hidden = model.forward(&mut tape, &tokens, &segments, None, &options)?;
    let want = model.logits(&mut tape, &hidden.states)?.value().to_f64()?;
    let (first, second) = ids.split_at(lengths[0]);
    let (mut decoded, mut wanted) = (Vec::new(), Vec::new());
    for t in 0..STEPS {
        let first = &first[if t == 0 { 0 } else { prompt + t }..=prompt + t];
        let second = match t {
            0..LEAD => &[],
            LEAD => &second[..=LEAD],
            _ => &second[t..=t],
        };
        let mut tokens = vec![second; cache.batch()];
        tokens[0] = first;
        let logits = model.decode(&tokens, &mut cache, &options)?.to_f64()?;
        let mut places = vec![lengths[0] + t; cache.batch()];
        places[0] = prompt + t;
        let running = if t < LEAD { 1 } else { places.len() };
        for (place, got) in places.iter().zip(logits.chunks(VOCAB)).take(running) {
            decoded.extend_from_slice(got);
            wanted.extend_from_slice(&want[place * VOCAB..][..VOCAB]);
        }
    }
    Ok(distance(&decoded, &wanted))
}
