//! A custom mixer, in one file and outside of the crates it plugs into: a gated exponential moving
//! average. It is registered, trained on the embedded corpus by the real trainer, exported, read again, and
//! decoded token by token.
//!
//! ```text
//! v = x Wv^T     g = silu(x Wg^T)     f = sigmoid(theta)            one learned decay per channel
//! h_t = f h_{t-1} + (1 - f) v_t       out = (h * g) Wo^T
//! ```
//!
//! ```text
//! cargo run --release -p fox-train --example own_mixer
//! ```

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use fox_model::mixers::{
    Architecture, FileFormat, Format, LayerParams, MixerContext, MixerFamily, MixerOutput,
    RecurrentStateSpec, SavedActivations, ScanShape, StateSpec, register, saved_states, scan,
};
use fox_model::{
    Cache, CheckpointLayout, CheckpointReader, DecayTime, Fields, ForwardOptions, Init, LayerState,
    Mixer, MixerConfig, Model, ModelConfig, Validator,
};
use fox_tensor::{ParamId, ScanVars, Segments, Tape, Var};
use fox_train::{Event, RunSpec, recipe, train};
use serde_json::{Map, Value, json};

/// The options: how long the channels remember before they are trained, in tokens.
#[derive(Clone, Debug, PartialEq)]
struct AverageConfig {
    memory: DecayTime,
}

impl MixerConfig for AverageConfig {
    fn name(&self) -> &'static str {
        "moving average"
    }

    /// Every channel is a head.
    fn heads(&self, model: &ModelConfig) -> (usize, usize) {
        (model.hidden_size, 1)
    }

    fn options(&self, _: &ModelConfig) -> Vec<String> {
        vec![format!("averages over {} to {} tokens", self.memory.min, self.memory.max)]
    }

    fn validate(&self, _: &ModelConfig, validator: &Validator<'_>) -> fox_model::Result<()> {
        validator.positive("memory_min", self.memory.min, 1e9)?;
        validator.positive("memory_max", self.memory.max, 1e9)?;
        validator.require(self.memory.min <= self.memory.max, "memory_min", || {
            format!("is {}, above `memory_max` {}", self.memory.min, self.memory.max)
        })
    }

    fn declare(&self, model: &ModelConfig, layer: &mut LayerParams<'_>) -> Box<dyn Mixer> {
        let (width, std) = (model.hidden_size, model.initializer_range);
        let mut matrix = |name: &str| layer.matrix(name, (width, width), std);
        let (v_proj, g_proj, o_proj) = (matrix("v_proj"), matrix("g_proj"), matrix("o_proj"));
        let start = Init::Given(self.memory.gate_biases(width));
        let theta = layer.push("theta", &[width, 1], false, start);
        Box::new(AverageLayer { width, v_proj, g_proj, theta, o_proj })
    }

    /// One number per channel.
    fn state(&self, model: &ModelConfig) -> StateSpec {
        StateSpec::Recurrent(RecurrentStateSpec { convs: Vec::new(), scan: model.hidden_size })
    }

    fn train_flops(&self, model: &ModelConfig, seq: usize) -> f64 {
        averages(model.hidden_size).train_flops(seq)
    }
}

/// Every channel is a head with a state of one number.
fn averages(heads: usize) -> ScanShape {
    ScanShape { heads, key_heads: heads, key_dim: 1, value_dim: 1, delta: false }
}

/// Where the parameters of a layer are.
#[derive(Debug)]
struct AverageLayer {
    width: usize,
    v_proj: ParamId,
    g_proj: ParamId,
    theta: ParamId,
    o_proj: ParamId,
}

impl Mixer for AverageLayer {
    fn forward(
        &self,
        tape: &mut Tape<'_>,
        x: &Var,
        context: &MixerContext<'_>,
        state: Option<&mut LayerState>,
    ) -> fox_tensor::Result<MixerOutput> {
        let var = |id: ParamId| context.params.var(id);
        let v = tape.linear(x, &var(self.v_proj), None)?;
        let g = tape.linear(x, &var(self.g_proj), None)?;
        // The same logits in every row.
        let ones = Var::constant(tape.device().full([x.value().rows(), 1], 1.0)?);
        let logits = tape.linear(&ones, &var(self.theta), None)?;
        let (g, rest, log_f) = tape.hgrn_gates(&g, &logits, None)?;
        let spec = averages(self.width).spec(1.0, context.segments);
        let vars =
            ScanVars { q: &g, k: &rest, v: &v, log_decay: Some(&log_f), write: None, skip: None };
        let h = scan(tape, &vars, &spec, state.and_then(LayerState::recurrent))?;
        Ok(tape.linear(&h, &var(self.o_proj), None)?.into())
    }

    /// Values, raw and finished gates, logits, `1 - f`, `ln f` and the gated average.
    fn saved_activations(&self) -> SavedActivations {
        SavedActivations {
            per_token: 7 * self.width + saved_states(self.width),
            cheap_per_token: 0,
        }
    }
}

/// What files say of it, and a name for models that have it.
static FAMILY: MixerFamily = MixerFamily {
    name: "moving averages",
    formats: &[&FORMAT as &dyn FileFormat],
    architectures: &[Architecture {
        name: "moving-average",
        build: |width, layers, _| {
            let memory = DecayTime { min: 1.0, max: 64.0 };
            ModelConfig::with_mixer(width, layers, AverageConfig { memory }, 4.0)
        },
        published: &[],
    }],
};

static FORMAT: Format<AverageConfig> = Format::new(
    "moving_average",
    CheckpointLayout::NATIVE,
    "MovingAverageForCausalLM",
    |fields: &Fields<'_>| {
        let (min, max) = (fields.real("memory_min", 1.0)?, fields.real("memory_max", 64.0)?);
        Ok(AverageConfig { memory: DecayTime { min, max } })
    },
    |mixer: &AverageConfig, _: &ModelConfig, map: &mut Map<String, Value>| {
        map.insert("memory_min".into(), json!(mixer.memory.min));
        map.insert("memory_max".into(), json!(mixer.memory.max));
    },
);

const RECIPE: &str = r#"
    [model]
    model_type = "moving_average"
    hidden_size = 64
    num_hidden_layers = 2
    intermediate_size = 128
    memory_max = 32.0

    [data]
    sequence_length = 128

    [training]
    tokens = 61440
    batch = 8

    [optimizer]
    peak_lr = 5e-3

    [evaluation]
    sequences = 0
"#;

/// What became of it.
pub struct Seen {
    /// Training loss of the first and of the last step.
    pub losses: (f64, f64),
    /// The largest change of a channel's `theta` in training.
    pub theta_moved: f32,
    /// The largest difference between the logits of a full forward pass and of decoding token by token, with
    /// contiguous and with paged states.
    pub decode_error: f64,
    /// The options as `fox info` would print them.
    pub options: Vec<String>,
}

/// Trains in `folder`, reads the export and decodes with it.
pub fn run(folder: &Path) -> Result<Seen, Box<dyn Error>> {
    register(&FAMILY)?;
    let spec = RunSpec {
        recipe: recipe::parse_table("moving-average", RECIPE.parse()?)?,
        out: folder.join("run"),
        device: fox_cpu::device(),
        command: Vec::new(),
    };
    let mut losses = Vec::new();
    let outcome = train(&spec, &mut |event| {
        if let Event::Step(step) = event {
            losses.extend(step.loss);
        }
        ControlFlow::Continue(())
    })?;
    let export = spec.out.join("export");
    let mut reader = CheckpointReader::open(&export)?;
    if reader.config() != outcome.model.config() {
        return Err("the configuration did not survive its config.json".into());
    }
    let model = Model::from_reader(&mut reader, &spec.device)?;
    let before = Model::init(model.config(), spec.recipe.training.seed, &spec.device)?;
    let policy = model.page_policy(Some(-10.0), 4096)?;
    let rows = decode_error(&model, model.new_cache(1, 8)?)?;
    let pages = decode_error(&model, model.new_paged_cache(&policy)?)?;
    Ok(Seen {
        losses: (losses[0], losses[losses.len() - 1]),
        theta_moved: largest_change(&before, &model, "model.layers.0.attn.theta")?,
        decode_error: rows.max(pages),
        options: model.config().options(),
    })
}

/// Logits token by token against those of one forward pass.
fn decode_error(model: &Model, mut cache: Cache) -> Result<f64, Box<dyn Error>> {
    let (device, options) = (model.device(), ForwardOptions::default());
    let vocab = model.config().vocab_size;
    let ids: Vec<i32> = (0..50).map(|t| (t * t * 7 + 3 * t) % vocab as i32).collect();
    let mut tape = Tape::inference(device);
    let tokens = device.from_i32(&ids, [ids.len()])?;
    let segments = Segments::uniform(1, ids.len());
    let hidden = model.forward(&mut tape, &tokens, &segments, None, &options)?;
    let full = model.logits(&mut tape, &hidden.states)?.value().to_f64()?;
    let mut worst = 0.0f64;
    for (id, want) in ids.iter().zip(full.chunks(vocab)) {
        let got = model.decode(&[&[*id]], &mut cache, &options)?.to_f64()?;
        worst = got.iter().zip(want).fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
    }
    Ok(worst)
}

/// The largest difference between the values that two models have for a parameter.
fn largest_change(a: &Model, b: &Model, name: &str) -> Result<f32, Box<dyn Error>> {
    let value = |model: &Model| -> Result<Vec<f32>, Box<dyn Error>> {
        let id = model.params().find(name).ok_or("there is no such parameter")?;
        Ok(model.params().value(id).to_f32()?)
    };
    let (a, b) = (value(a)?, value(b)?);
    Ok(a.iter().zip(&b).fold(0.0, |max, (a, b)| max.max((a - b).abs())))
}

/// Runs it in a folder that is gone afterwards.
#[allow(dead_code)] // the test that includes this file has its own harness
fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let seen = run(folder.path())?;
    println!("a model with {}", seen.options.join(", "));
    println!("loss {:.3} -> {:.3}", seen.losses.0, seen.losses.1);
    println!("theta moved by up to {:.3}", seen.theta_moved);
    println!("decoding differs from a forward pass by at most {:.1e}", seen.decode_error);
    Ok(())
}
