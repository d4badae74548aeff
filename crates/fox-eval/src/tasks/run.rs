//! A task from its rows to its figures.

use fox_base::Setting;
use fox_data::{Record, Tokenizer};
use fox_model::{ForwardOptions, Pruning, TokenDecoder};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::encode::{Encoder, Truncation};
use super::generate::{Ending, greedy};
use super::items::{Item, item};
use super::likelihood::{Likelihood, Request, log_likelihoods};
use super::metrics::{
    Figure, Metric, Values, best, classification, code_similarity, f1, first_line, rouge_l,
};
use super::spec::{Ask, Generate, TaskSpec};
use crate::subject::Subject;
use crate::{Error, Result};

/// How tasks are run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TaskOptions {
    /// Tokens a model is given at most; its training length, or 2048, without it.
    pub max_length: Option<usize>,
    /// Puts the start marker in front of every context, also where the task does not ask for it.
    pub bos: bool,
    /// What long prompts lose.
    pub truncation: Truncation,
    /// Which attention blocks may be skipped.
    pub pruning: Pruning,
}

/// The result of one task and model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    /// Name of the task.
    pub task: String,
    /// Name of the model.
    pub model: String,
    /// One figure per metric.
    pub figures: Vec<Figure>,
}

impl TaskResult {
    /// The figure of a metric.
    pub fn figure(&self, metric: Metric) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.metric == metric)
    }
}

/// Asks a model about all rows. Besides the result there is one sample per row: what was found, in JSON.
/// `progress` receives the finished fraction, 0 to 1.
///
/// # Errors
/// Rows without the columns of the task, a model with a smaller vocabulary than the tokenizer, and whatever
/// computing can fail with.
pub fn run_task(
    subject: &Subject<'_>,
    tokenizer: &Tokenizer,
    spec: &TaskSpec,
    rows: &[Record],
    options: &TaskOptions,
    mut progress: impl FnMut(f64),
) -> Result<(TaskResult, Vec<Value>)> {
    subject.check_vocabulary("tokenizer", tokenizer.vocab_size())?;
    if rows.is_empty() {
        return Err(Error::Empty { what: format!("the data of task {}", spec.name) });
    }
    let max_length = options.max_length.or(subject.training_length).unwrap_or(2048);
    if max_length == 0 {
        let detail = "a model that is given no tokens cannot be asked; allow a length above 0";
        return Err(Error::of_setting(Setting::MaxLength, detail));
    }
    let encoder = Encoder { tokenizer, bos: spec.bos || options.bos, max_length };
    let items: Vec<Item> =
        rows.iter().enumerate().map(|(i, row)| item(spec, row, i + 1)).collect::<Result<_>>()?;
    let forward = ForwardOptions { pruning: options.pruning, ..ForwardOptions::default() };
    let outcomes = match &spec.ask {
        Ask::Generate(ask) => {
            let mut decoder = subject.model.token_decoder(forward);
            let together = decoder.reserve(max_length)?;
            let mut outcomes = Vec::with_capacity(items.len());
            for group in items.chunks(together) {
                let texts = said(subject, &mut decoder, &encoder, ask, group, options.truncation)?;
                let response = |(item, text)| Outcome { item, response: Response::Text(text) };
                outcomes.extend(group.iter().zip(texts).map(response));
                progress(outcomes.len() as f64 / items.len() as f64);
            }
            outcomes
        }
        _ => likelihoods(subject, spec, &encoder, &items, &forward, progress)?,
    };
    let figure = |metric: &Metric| values(*metric, &outcomes).figure(*metric);
    let result = TaskResult {
        task: spec.name.clone(),
        model: subject.name.to_string(),
        figures: spec.metrics.iter().map(figure).collect(),
    };
    Ok((result, outcomes.iter().map(Outcome::sample).collect()))
}

/// An item and the response of the model.
struct Outcome<'a> {
    item: &'a Item,
    response: Response,
}

enum Response {
    /// Likelihood of every continuation, or of every window.
    Likelihoods(Vec<Likelihood>),
    /// Generated answer, truncated at the stop texts of the task.
    Text(String),
}

/// Judges the continuations of all items together, so that they can be batched by length.
fn likelihoods<'a>(
    subject: &Subject<'_>,
    spec: &TaskSpec,
    encoder: &Encoder<'_>,
    items: &'a [Item],
    forward: &ForwardOptions,
    mut progress: impl FnMut(f64),
) -> Result<Vec<Outcome<'a>>> {
    let mut requests: Vec<Request> = Vec::new();
    let mut ends = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        let encoded = match item {
            Item::Choice { pairs, .. } => {
                pairs.iter().map(|(a, b)| encoder.pair(a, b)).collect::<Result<Vec<_>>>()
            }
            Item::Pair(context, continuation) => {
                encoder.pair(context, continuation).map(|r| vec![r])
            }
            Item::Whole { text, .. } => encoder.rolling(text),
            Item::Prompt { .. } => Ok(Vec::new()),
        };
        requests.extend(encoded.map_err(|error| Error::Item {
            task: spec.name.clone(),
            row: i + 1,
            detail: error.to_string(),
        })?);
        ends.push(requests.len());
    }
    let total = requests.len() as f64;
    let found = log_likelihoods(subject, &requests, forward, |done| progress(done as f64 / total))?;
    let mut start = 0;
    let outcome = |(item, end): (&'a Item, usize)| {
        let part = found[start..end].to_vec();
        start = end;
        Outcome { item, response: Response::Likelihoods(part) }
    };
    Ok(items.iter().zip(ends).map(outcome).collect())
}

/// The greedy answers to prompts.
fn said(
    subject: &Subject<'_>,
    decoder: &mut TokenDecoder<'_>,
    encoder: &Encoder<'_>,
    ask: &Generate,
    items: &[Item],
    truncation: Truncation,
) -> Result<Vec<String>> {
    let tokenizer = encoder.tokenizer;
    let prompts = items.iter().map(|item| match item {
        Item::Prompt { prompt, .. } => encoder.prompt(prompt, ask.max_tokens, truncation),
        _ => Err(Error::Argument("a generated answer needs a prompt".into())),
    });
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let mut ending =
        Ending { max_tokens: ask.max_tokens, ids: vec![tokenizer.bos()], min_tokens: 0 };
    if ask.one_line {
        ending.ids.extend(tokenizer.encode("\n")?.last());
        ending.min_tokens = 1;
    }
    let enough = |answer: &[u32]| {
        if ask.stop.is_empty() {
            return Ok(false);
        }
        let text = tokenizer.decode(answer)?;
        Ok(ask.stop.iter().any(|stop| text.contains(stop.as_str())))
    };
    let answers = greedy(subject, decoder, &prompts, &ending, enough)?;
    let text = |answer: Vec<u32>| {
        let answer = tokenizer.decode(&answer)?;
        let cut = ask.stop.iter().filter_map(|stop| answer.find(stop.as_str())).min();
        let answer = &answer[..cut.unwrap_or(answer.len())];
        Ok(if ask.first_line { first_line(answer) } else { answer }.to_string())
    };
    answers.into_iter().map(text).collect()
}

impl Outcome<'_> {
    fn log_prob(&self) -> f64 {
        match &self.response {
            Response::Likelihoods(list) => list.iter().map(|l| l.log_prob).sum(),
            Response::Text(_) => f64::NAN,
        }
    }

    /// The value of a metric that is a mean over items.
    fn score(&self, metric: Metric) -> f64 {
        let yes = |right: bool| f64::from(u8::from(right));
        match (self.item, &self.response) {
            (Item::Choice { choices, right, .. }, Response::Likelihoods(list)) => {
                let over = |length: &dyn Fn(&String) -> usize| {
                    let each = list.iter().zip(choices);
                    best(&each.map(|(l, c)| l.log_prob / length(c) as f64).collect::<Vec<_>>())
                };
                match metric {
                    Metric::AccNorm => yes(over(&|choice| choice.chars().count()) == *right),
                    Metric::AccBytes => yes(over(&|choice| choice.len()) == *right),
                    Metric::ExactMatch => yes(list[*right].is_greedy),
                    _ => yes(over(&|_| 1) == *right),
                }
            }
            (_, Response::Likelihoods(list)) => yes(list.iter().all(|l| l.is_greedy)),
            (Item::Prompt { answers, classes, .. }, Response::Text(said)) => {
                let judge = |truth: &String| match metric {
                    Metric::F1 => f1(said, truth),
                    Metric::RougeL => rouge_l(said, truth),
                    Metric::Classification => classification(said, truth, classes),
                    Metric::EditSimilarity => code_similarity(said, truth),
                    _ => yes(said == truth),
                };
                answers.iter().map(judge).fold(0.0, f64::max)
            }
            (_, Response::Text(_)) => f64::NAN,
        }
    }

    fn sample(&self) -> Value {
        match (self.item, &self.response) {
            (Item::Choice { right, .. }, Response::Likelihoods(list)) => json!({
                "log_probs": list.iter().map(|l| l.log_prob).collect::<Vec<_>>(),
                "greedy": list.iter().map(|l| l.is_greedy).collect::<Vec<_>>(),
                "right": right,
            }),
            (Item::Prompt { answers, .. }, Response::Text(said)) => {
                json!({"said": said, "answers": answers})
            }
            (_, Response::Likelihoods(list)) => json!({
                "log_prob": self.log_prob(),
                "greedy": list.iter().all(|l| l.is_greedy),
            }),
            (_, Response::Text(said)) => json!({ "said": said }),
        }
    }
}

fn values(metric: Metric, outcomes: &[Outcome<'_>]) -> Values {
    let lengths = |pick: fn(usize, usize) -> usize| {
        let pair = |o: &Outcome<'_>| match o.item {
            Item::Whole { words, bytes, .. } => (o.log_prob(), pick(*words, *bytes) as f64),
            _ => (o.log_prob(), 1.0),
        };
        outcomes.iter().map(pair).collect::<Vec<_>>()
    };
    match metric {
        Metric::Perplexity => Values::Perplexity(outcomes.iter().map(Outcome::log_prob).collect()),
        Metric::WordPerplexity => Values::PerLength(lengths(|words, _| words)),
        Metric::BytePerplexity => Values::PerLength(lengths(|_, bytes| bytes)),
        Metric::BitsPerByte => Values::BitsPerLength(lengths(|_, bytes| bytes)),
        share => Values::Mean(outcomes.iter().map(|o| o.score(share)).collect()),
    }
}
