//! A language model and its engine.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use fox_cuda::{Gpu, Precision};
use fox_infer::{Engine, EngineOptions, Event, FinishReason, Request, Sampling, Ticket};
use fox_model::{AttentionView, ForwardOptions, Observer, Pruning};
use fox_tensor::{Segments, Tape, Tensor};
use pyo3::exceptions::{PyFileNotFoundError, PyRuntimeError};
use pyo3::prelude::*;

use crate::array::{Array, Raw};
use crate::errors::{exception, value_error};
use crate::runtime::Home;

/// A model read from a folder, with an engine that generates.
#[pyclass(frozen, module = "foxlm._core")]
pub struct Model(Home<Engine>);

/// The process in which a first model was loaded; 0 before. Models share one pool of threads, which lives there.
static HOME: AtomicU32 = AtomicU32::new(0);

fn model_error(error: fox_model::Error) -> PyErr {
    value_error(error.to_string())
}

/// Keeps queries, keys, log gates and scale of one layer, or the log gates of all.
struct Watch {
    layer: Option<usize>,
    seen: Mutex<Vec<Seen>>,
}

struct Seen {
    layer: usize,
    gates: Option<Tensor>,
    qk: Option<(Tensor, Tensor)>,
    spec: (usize, usize, usize, f32, Option<usize>),
    stick: bool,
}

impl Observer for Watch {
    fn attention(&self, view: &AttentionView<'_>) -> fox_tensor::Result<()> {
        let spec = view.spec;
        let wanted = self.layer == Some(view.layer);
        if let Ok(mut seen) = self.seen.lock() {
            seen.push(Seen {
                layer: view.layer,
                gates: view.log_gates.cloned(),
                qk: wanted.then(|| (view.q.clone(), view.k.clone())),
                spec: (spec.heads, spec.kv_heads, spec.head_dim, spec.scale, spec.window),
                stick: view.weights != fox_tensor::AttentionWeights::Softmax,
            });
        }
        Ok(())
    }
}

impl Model {
    fn model(&self) -> PyResult<&fox_model::Model> {
        Ok(self.0.get()?.model())
    }

    fn ids(&self, ids: &[i64]) -> PyResult<Vec<i32>> {
        let vocab = self.model()?.config().vocab_size;
        let check = |(n, &id): (usize, &i64)| match usize::try_from(id) {
            Ok(small) if small < vocab => Ok(id as i32),
            _ => {
                Err(value_error(format!("id {id} at position {n} is not from 0 to {}", vocab - 1)))
            }
        };
        ids.iter().enumerate().map(check).collect()
    }

    fn watch(&self, ids: &[i64], layer: Option<usize>) -> PyResult<Vec<Seen>> {
        let (model, ids) = (self.model()?, self.ids(ids)?);
        let watch = Watch { layer, seen: Mutex::default() };
        let tokens = model.device().from_i32(&ids, [ids.len()]).map_err(exception)?;
        let options = ForwardOptions { pruning: Pruning::Off, ..ForwardOptions::default() };
        let segments = Segments::uniform(1, ids.len());
        model.observe(&tokens, &segments, &options, &watch).map_err(model_error)?;
        watch.seen.into_inner().map_err(|_| PyRuntimeError::new_err("a layer failed"))
    }
}

fn gpu(ordinal: usize, precision: Precision) -> PyResult<fox_tensor::Device> {
    fox_cuda::device(ordinal, precision).map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

/// Writes host values to an array of f32.
fn fill(array: &Array, values: &[f32]) -> PyResult<()> {
    let width = array.shape()[3];
    let device = fox_cpu::device();
    let rows = values.len() / width.max(1);
    let tensor = device.from_f32(values, [rows, width]).map_err(exception)?;
    // SAFETY: the package holds the array during the call and made it for this.
    unsafe { array.write(&tensor, width) }
}

#[pymethods]
impl Model {
    /// Reads a checkpoint folder; `device` is "cpu", "cuda" or "cuda:N", `precision` "f32" or "bf16" (on a GPU).
    #[staticmethod]
    fn load(
        py: Python<'_>,
        folder: PathBuf,
        device: &str,
        precision: &str,
        cache_bytes: usize,
    ) -> PyResult<Self> {
        if !folder.is_dir() {
            let words = format!("{} is not a folder", folder.display());
            return Err(PyFileNotFoundError::new_err(words));
        }
        let precision = match precision {
            "f32" => Precision::F32,
            "bf16" => Precision::Bf16,
            other => return Err(value_error(format!("precision {other}; use f32 or bf16"))),
        };
        let device = match (device, device.strip_prefix("cuda:").map(str::parse)) {
            ("cpu", _) if precision == Precision::Bf16 => {
                return Err(value_error("precision bf16 needs a GPU; the CPU computes in f32"));
            }
            ("cpu", _) => fox_cpu::device(),
            ("cuda", _) => gpu(0, precision)?,
            (_, Some(Ok(ordinal))) => gpu(ordinal, precision)?,
            _ => return Err(value_error(format!("device {device}; use cpu, cuda or cuda:N"))),
        };
        let process = std::process::id();
        let first = HOME.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_err_and(|first| first != process) {
            let words = "a model was loaded before this process was forked, and the threads of models stayed there; \
                         load models after forks only, or start processes with spawn";
            return Err(PyRuntimeError::new_err(words));
        }
        py.detach(|| {
            let model = fox_model::Model::from_checkpoint(&folder, &device).map_err(model_error)?;
            let options = EngineOptions { cache_bytes, ..EngineOptions::default() };
            let engine = Engine::start(model, options).map_err(|e| value_error(e.to_string()))?;
            Ok(Model(Home::new(engine)))
        })
    }

    /// Whether there is a driver for GPUs.
    #[staticmethod]
    fn has_gpu() -> bool {
        Gpu::driver_is_present()
    }

    /// Vocabulary, width, layers, parameters.
    fn sizes(&self) -> PyResult<(usize, usize, usize, usize)> {
        let model = self.model()?;
        let config = model.config();
        let parameters = model.params().iter().map(|(_, spec, _)| spec.count()).sum();
        Ok((config.vocab_size, config.hidden_size, config.num_layers, parameters))
    }

    /// Log-probabilities of `labels` `[B * T]` (-100 for none, which gives 0) after each of `ids` `[B * T]`, of
    /// sequences of `time` tokens.
    fn logprobs(
        &self,
        py: Python<'_>,
        ids: Vec<i64>,
        labels: Vec<i64>,
        time: usize,
    ) -> PyResult<Vec<f32>> {
        let (model, rows) = (self.model()?, ids.len());
        if time == 0 || rows == 0 || rows % time != 0 || labels.len() != rows {
            return Err(value_error(format!("{rows} ids are no sequences of {time}")));
        }
        let ids = self.ids(&ids)?;
        let known = |id: &i64| if *id == -100 { 0 } else { *id };
        let shifted = self.ids(&labels.iter().map(known).collect::<Vec<_>>())?;
        let shifted: Vec<i32> =
            labels.iter().zip(shifted).map(|(l, id)| if *l == -100 { -100 } else { id }).collect();
        py.detach(|| {
            let device = model.device();
            let tokens = device.from_i32(&ids, [rows]).map_err(exception)?;
            let labels = device.from_i32(&shifted, [rows]).map_err(exception)?;
            let weights = device.full([rows], 1.0).map_err(exception)?;
            let segments = Segments::uniform(rows / time, time);
            let mut tape = Tape::inference(device);
            let options = ForwardOptions::default();
            let loss = model
                .loss(&mut tape, &tokens, &labels, &weights, &segments, &options)
                .map_err(model_error)?;
            let values = loss.per_token.to_f32().map_err(exception)?;
            Ok(values.into_iter().map(|x| 0.0 - x).collect())
        })
    }

    /// Writes logits `[1, T, V]` of one sequence.
    fn logits(&self, py: Python<'_>, ids: Vec<i64>, out: Raw) -> PyResult<()> {
        let (model, ids) = (self.model()?, self.ids(&ids)?);
        let out = Array::new("logits", out)?;
        out.expect("logits", [1, ids.len(), 1, model.config().vocab_size])?;
        py.detach(|| {
            let tokens = model.device().from_i32(&ids, [ids.len()]).map_err(exception)?;
            let segments = Segments::uniform(1, ids.len());
            let mut tape = Tape::inference(model.device());
            let options = ForwardOptions::default();
            let hidden = model
                .forward(&mut tape, &tokens, &segments, None, &options)
                .map_err(model_error)?;
            let logits = model.logits(&mut tape, &hidden.states).map_err(exception)?;
            fill(&out, &logits.value().to_f32().map_err(exception)?)
        })
    }

    /// Log forget gates of every layer: heads and values `[T * H]`, None where there are none.
    fn log_gates(&self, py: Python<'_>, ids: Vec<i64>) -> PyResult<Vec<Option<(usize, Vec<f32>)>>> {
        py.detach(|| {
            let mut layers = vec![None; self.model()?.config().num_layers];
            for seen in self.watch(&ids, None)? {
                if let Some(gates) = &seen.gates {
                    layers[seen.layer] = Some((seen.spec.0, gates.to_f32().map_err(exception)?));
                }
            }
            Ok(layers)
        })
    }

    /// What a layer's attention works on: queries `[T, H * d]`, keys `[T, Hk * d]`, log gates `[T, H]` or None; heads,
    /// key heads, head dim, scale, window.
    fn attention_operands(
        &self,
        py: Python<'_>,
        ids: Vec<i64>,
        layer: usize,
    ) -> PyResult<(Vec<f32>, Vec<f32>, Option<Vec<f32>>, (usize, usize, usize, f32, Option<usize>))>
    {
        py.detach(|| {
            let layers = self.model()?.config().num_layers;
            if layer >= layers {
                return Err(value_error(format!("layer {layer}; the model has {layers} layers")));
            }
            let seen = self.watch(&ids, Some(layer))?;
            let Some(Seen { gates, qk: Some((q, k)), spec, stick, .. }) =
                seen.into_iter().find(|seen| seen.qk.is_some())
            else {
                return Err(value_error(format!("layer {layer} has no attention")));
            };
            if stick {
                return Err(value_error(format!("layer {layer} is stick-breaking, not softmax")));
            }
            let host = |x: &Tensor| x.to_f32().map_err(exception);
            Ok((host(&q)?, host(&k)?, gates.as_ref().map(host).transpose()?, spec))
        })
    }

    /// Starts a continuation.
    fn generate(
        &self,
        prompt: Vec<i64>,
        max_tokens: usize,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        seed: u64,
        stop_ids: Vec<i32>,
    ) -> PyResult<Tokens> {
        let prompt = self.ids(&prompt)?;
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            seed,
            ..Sampling::default()
        };
        let request = Request { sampling, stop_ids, ..Request::greedy(prompt, max_tokens) };
        let engine = self.0.get()?.clone();
        let completion = engine.submit(request).map_err(|e| value_error(e.to_string()))?;
        let (events, ticket) = completion.split();
        Ok(Tokens(Home::new(Mutex::new(Some((events, ticket, engine))))))
    }
}

/// Tokens as they are generated: an iterator over `(id, log-probability)`. Dropping it ends the generation.
///
/// It keeps the engine alive. A dropped engine finishes its requests first, so the ticket is dropped before it, which
/// cancels the request.
#[pyclass(frozen, module = "foxlm._core")]
pub struct Tokens(Home<Mutex<Option<(Receiver<Event>, Ticket, Engine)>>>);

/// How often a wait for a token looks for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(100);

#[pymethods]
impl Tokens {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<(i32, f32)>> {
        let running = self.0.get()?;
        loop {
            let event = py.detach(|| {
                let Ok(guard) = running.lock() else { return Some(None) };
                let Some((events, ..)) = guard.as_ref() else { return Some(None) };
                match events.recv_timeout(PATIENCE) {
                    Ok(event) => Some(Some(event)),
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => None,
                    Err(_) => Some(None),
                }
            });
            match event {
                None => py.check_signals()?,
                Some(Some(Event::Token(scored))) => return Ok(Some((scored.id, scored.logprob))),
                Some(Some(Event::Finished(finished))) => {
                    if let Ok(mut guard) = running.lock() {
                        *guard = None;
                    }
                    return match finished.reason {
                        FinishReason::Failed(words) => Err(PyRuntimeError::new_err(words)),
                        _ => Ok(None),
                    };
                }
                Some(Some(_)) => {}
                Some(None) => return Ok(None),
            }
        }
    }
}
