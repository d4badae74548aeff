//! Parsing and validation of completion requests.

use std::collections::BTreeMap;

use fox_infer::Sampling;
use serde::Deserialize;
use serde_json::json;

use super::Prompt;
use super::constraint::Constraint;
use super::tools::Tools;
use super::{messages, responses};
use crate::app::{App, random};
use crate::chat;
use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, UnknownFields};
use crate::models;
use crate::reference::{CHAT, COMMON, KnownFields, STREAM_OPTIONS, TEXT};

/// Default of `max_tokens`: OpenAI's for completions, and a larger one for chats.
const DEFAULT_MAX_TOKENS: usize = 16;
const DEFAULT_CHAT_TOKENS: usize = 1024;
/// Largest number of stop strings, and of stop ids.
const MAX_STOPS: usize = 64;
/// Largest number of ids with a logit bias.
const MAX_BIASES: usize = 1024;

/// Fields that do not change the answer.
#[rustfmt::skip]
pub(crate) const IGNORED: &[&str] = &[
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity", "modalities", "guided_decoding_backend",
];

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `/v1/completions`.
    Text,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`, parsed as a chat.
    Responses,
    /// `/v1/messages`, parsed as a chat.
    Messages,
}

/// A valid request.
#[derive(Clone, Debug)]
pub(crate) struct CompletionRequest {
    pub kind: Kind,
    pub prompts: Vec<Prompt>,
    /// Choices per prompt.
    pub n: usize,
    /// Choices per prompt that are generated; the `n` with the largest mean log-probability are returned.
    pub best_of: usize,
    pub max_tokens: usize,
    pub min_tokens: usize,
    /// With the seed of the first choice of the first prompt; the next choices have the next seeds.
    pub sampling: Sampling,
    pub logit_bias: Vec<(i32, f32)>,
    pub stops: Vec<String>,
    /// Ids that end a choice besides the end marker.
    pub stop_ids: Vec<i32>,
    /// Whether to continue after the end marker.
    pub ignore_end: bool,
    pub echo: bool,
    /// Alternatives per token, when log-probabilities are wanted.
    pub logprobs: Option<usize>,
    /// Alternatives per prompt token, in vLLM's form.
    pub prompt_logprobs: Option<usize>,
    pub stream: bool,
    pub include_usage: bool,
    /// What every choice must match.
    pub constraint: Option<Constraint>,
    /// Tools that a chat may call.
    pub tools: Option<Tools>,
    pub unknown: UnknownFields,
}

/// `stop` is one string or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

impl CompletionRequest {
    pub fn parse(app: &App, kind: Kind, body: &[u8]) -> ApiResult<Self> {
        let translate = match kind {
            Kind::Text | Kind::Chat => return Self::parse_as(app, kind, body),
            Kind::Responses => responses::translate,
            Kind::Messages => messages::translate,
        };
        let (body, unknown) = translate(body, app.options.strict)?;
        let mut request = Self::parse_as(app, Kind::Chat, &body)?;
        request.unknown = request.unknown.and(unknown);
        Ok(request)
    }

    fn parse_as(app: &App, kind: Kind, body: &[u8]) -> ApiResult<Self> {
        let known: KnownFields = match kind {
            Kind::Text => &[TEXT, COMMON],
            _ => &[CHAT, COMMON],
        };
        let mut fields = Fields::parse(body, known)?;
        if let Some(model) = fields.take::<String>("model")? {
            models::check_name(app, &model)?;
        }
        refuse_unsupported(&mut fields, kind)?;
        fields.drop(IGNORED);
        let stream = fields.take("stream")?.unwrap_or(false);
        let (include_usage, unknown) = include_usage(&mut fields, app.options.strict)?;
        let n = count(&mut fields, "n")?.unwrap_or(1);
        let mut request = CompletionRequest {
            kind,
            n,
            best_of: count(&mut fields, "best_of")?.unwrap_or(n),
            max_tokens: max_tokens(&mut fields, kind)?,
            min_tokens: count(&mut fields, "min_tokens")?.unwrap_or(0),
            sampling: sampling(&mut fields, &app.options.sampling)?,
            logit_bias: logit_bias(&mut fields)?,
            stops: stops(&mut fields)?,
            stop_ids: fields.take("stop_token_ids")?.unwrap_or_default(),
            ignore_end: fields.take("ignore_eos")?.unwrap_or(false),
            echo: fields.take("echo")?.unwrap_or(false),
            logprobs: logprobs(&mut fields, kind)?,
            prompt_logprobs: count(&mut fields, "prompt_logprobs")?,
            include_usage: include_usage && stream,
            constraint: Constraint::parse(&mut fields)?,
            tools: None,
            stream,
            prompts: Vec::new(),
            unknown,
        };
        if kind == Kind::Chat {
            request.tools = Tools::parse(&mut fields)?;
            let forced = request.tools.as_ref().and_then(Tools::constraint);
            if forced.is_some() && request.constraint.is_some() {
                let message = "a choice that must call a tool has no other format";
                return Err(ApiError::invalid("tool_choice", message));
            }
            request.constraint = request.constraint.or(forced);
        }
        request.prompts = match kind {
            Kind::Text => text_prompts(app, &mut fields)?,
            _ => vec![chat_prompt(app, &mut fields, request.tools.as_ref())?],
        };
        if kind == Kind::Chat {
            request.stops.extend(app.chat.stops().iter().map(|stop| stop.to_string()));
        }
        let unknown = fields.finish(app.options.strict)?;
        request.unknown = request.unknown.and(unknown);
        request.check(app)?;
        Ok(request)
    }

    fn check(&self, app: &App) -> ApiResult<()> {
        let most = app.options.max_choices;
        if self.n == 0 {
            return Err(ApiError::invalid("n", "n must be at least 1"));
        }
        if self.best_of < self.n {
            let message = format!("best_of = {} is less than n = {}", self.best_of, self.n);
            return Err(ApiError::invalid("best_of", message));
        }
        if self.best_of > self.n && (self.stream || self.echo) {
            let message = "best_of needs stream = false and echo = false";
            return Err(ApiError::invalid("best_of", message));
        }
        if self.prompts.len().saturating_mul(self.best_of) > most {
            let message = format!(
                "{} prompts times n = {} are more than {most} answers",
                self.prompts.len(),
                self.best_of
            );
            return Err(ApiError::invalid("n", message));
        }
        if self.prompt_logprobs.is_some() && self.stream {
            let message = "prompt_logprobs needs stream = false";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        if self.min_tokens > self.max_tokens {
            let (min, max) = (self.min_tokens, self.max_tokens);
            let message = format!("min_tokens = {min} is more than max_tokens = {max}");
            return Err(ApiError::invalid("min_tokens", message));
        }
        if self.stop_ids.len() > MAX_STOPS {
            let message = format!("stop_token_ids has more than {MAX_STOPS} ids");
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        let most = app.options.max_logprobs;
        let name = if self.kind == Kind::Chat { "top_logprobs" } else { "logprobs" };
        for (name, asked) in [(name, self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if asked.is_some_and(|count| count > most) {
                return Err(ApiError::invalid(name, format!("{name} must be at most {most}")));
            }
        }
        Ok(())
    }
}

fn count(fields: &mut Fields, name: &'static str) -> ApiResult<Option<usize>> {
    Ok(fields.take::<u32>(name)?.map(|count| count as usize))
}

fn text_prompts(app: &App, fields: &mut Fields) -> ApiResult<Vec<Prompt>> {
    let mark = fields.take("add_special_tokens")?.unwrap_or(true);
    match fields.take_raw("prompt") {
        Some(raw) => Prompt::parse(app, raw, mark),
        None => Err(ApiError::invalid("prompt", "prompt is missing")),
    }
}

fn chat_prompt(app: &App, fields: &mut Fields, tools: Option<&Tools>) -> ApiResult<Prompt> {
    let messages = chat::messages(fields.take("messages")?)?;
    let add = fields.take("add_generation_prompt")?.unwrap_or(true);
    let mark = fields.take("add_special_tokens")?.unwrap_or(app.chat.needs_mark());
    let tools = tools.map_or(&[][..], |tools| &tools.list);
    let text = app.chat.prompt(&messages, tools, add)?;
    Prompt::rendered(app, &text, mark).map_err(|error| error.with_param(Some("messages".into())))
}

fn max_tokens(fields: &mut Fields, kind: Kind) -> ApiResult<usize> {
    let (old, new) = (count(fields, "max_tokens")?, count(fields, "max_completion_tokens")?);
    Ok(new.or(old).unwrap_or(match kind {
        Kind::Text => DEFAULT_MAX_TOKENS,
        _ => DEFAULT_CHAT_TOKENS,
    }))
}

/// A number in completions; a flag and a number in chats.
fn logprobs(fields: &mut Fields, kind: Kind) -> ApiResult<Option<usize>> {
    if kind == Kind::Text {
        return count(fields, "logprobs");
    }
    let (wanted, most) =
        (fields.take("logprobs")?.unwrap_or(false), count(fields, "top_logprobs")?);
    if most.is_some_and(|count| count > 0) && !wanted {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs = true"));
    }
    Ok(wanted.then(|| most.unwrap_or(0)))
}

fn sampling(fields: &mut Fields, usual: &Sampling) -> ApiResult<Sampling> {
    Ok(Sampling {
        temperature: fields.take("temperature")?.unwrap_or(usual.temperature),
        top_k: top_k(fields)?.unwrap_or(usual.top_k),
        top_p: fields.take("top_p")?.unwrap_or(usual.top_p),
        min_p: fields.take("min_p")?.unwrap_or(usual.min_p),
        repetition_penalty: fields.take("repetition_penalty")?.unwrap_or(usual.repetition_penalty),
        presence_penalty: penalty(fields, "presence_penalty")?,
        frequency_penalty: penalty(fields, "frequency_penalty")?,
        // Negative seeds are valid.
        seed: fields.take::<i64>("seed")?.map_or_else(random, |seed| seed as u64),
    })
}

fn penalty(fields: &mut Fields, name: &'static str) -> ApiResult<f32> {
    let value = fields.take(name)?.unwrap_or(0.0);
    if (-2.0..=2.0).contains(&value) {
        return Ok(value);
    }
    Err(ApiError::invalid(name, format!("{name} must be from -2 to 2, not {value}")))
}

/// `{"ID": BIAS}`, from -100 to 100.
fn logit_bias(fields: &mut Fields) -> ApiResult<Vec<(i32, f32)>> {
    let map: BTreeMap<String, f32> = fields.take("logit_bias")?.unwrap_or_default();
    if map.len() > MAX_BIASES {
        let message = format!("logit_bias has more than {MAX_BIASES} ids");
        return Err(ApiError::invalid("logit_bias", message));
    }
    let entry = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) if (-100.0..=100.0).contains(&bias) => Ok((id, bias)),
        _ => {
            let form = "must give token ids numbers from -100 to 100";
            Err(ApiError::invalid("logit_bias", format!("logit_bias {form}, not {bias} for {id}")))
        }
    };
    map.into_iter().map(entry).collect()
}

/// -1 and 0 keep all tokens.
fn top_k(fields: &mut Fields) -> ApiResult<Option<usize>> {
    match fields.take::<i64>("top_k")? {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(count) => usize::try_from(count).map(Some).map_err(|_| {
            ApiError::invalid("top_k", format!("top_k must be 0 or more, not {count}"))
        }),
    }
}

fn stops(fields: &mut Fields) -> ApiResult<Vec<String>> {
    let stops = match fields.take("stop")? {
        None => Vec::new(),
        Some(Stop::One(stop)) => vec![stop],
        Some(Stop::Many(stops)) => stops,
    };
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid("stop", format!("stop has more than {MAX_STOPS} texts")));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "a text in stop is empty"));
    }
    Ok(stops)
}

/// `stream_options`; without effect unless the response is streamed.
fn include_usage(fields: &mut Fields, strict: bool) -> ApiResult<(bool, UnknownFields)> {
    let mut options = fields.inner("stream_options", &[STREAM_OPTIONS])?;
    let include = options.take("include_usage")?.unwrap_or(false);
    options.drop(&["include_obfuscation", "continuous_usage_stats"]);
    Ok((include, options.finish(strict)?))
}

/// Refuses fields of OpenAI's API that would change the answer.
fn refuse_unsupported(fields: &mut Fields, kind: Kind) -> ApiResult<()> {
    if kind == Kind::Text {
        let why = "the model only continues what stands before";
        return fields.ignore("suffix", &[json!("")], why);
    }
    let none = [json!([]), json!("none"), json!("auto")];
    for name in ["functions", "function_call"] {
        fields.ignore(name, &none, "use tools and tool_choice")?;
    }
    fields.ignore("audio", &[], "the model writes plain text only")
}
