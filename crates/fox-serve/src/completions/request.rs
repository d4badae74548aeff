//! A completion request, checked.

use fox_infer::Sampling;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Prompt;
use crate::app::{App, random};
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::models;

/// Tokens that are generated when the request does not say.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Strings that may end an answer.
const MAX_STOPS: usize = 64;

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct CompletionRequest {
    pub prompts: Vec<Prompt>,
    /// Answers per prompt.
    pub n: usize,
    pub max_tokens: usize,
    /// Of the first answer to a prompt; the next ones have the next seeds.
    pub sampling: Sampling,
    pub stops: Vec<String>,
    /// Whether to go on after the marker that ends a document.
    pub ignore_end: bool,
    pub echo: bool,
    /// Alternatives per token, when log-probabilities are wanted.
    pub logprobs: Option<usize>,
    pub stream: bool,
    pub include_usage: bool,
}

/// `stop` is one string or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

impl CompletionRequest {
    pub fn parse(app: &App, body: &[u8]) -> ApiResult<Self> {
        let mut fields = Fields::parse(body)?;
        if let Some(model) = fields.take::<String>("model")? {
            models::check_name(app, &model)?;
        }
        refuse_unsupported(&mut fields)?;
        let mark = fields.take("add_special_tokens")?.unwrap_or(true);
        let prompt = fields.take::<Value>("prompt")?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let request = CompletionRequest {
            n: fields.take::<u32>("n")?.unwrap_or(1) as usize,
            max_tokens: fields
                .take::<u32>("max_tokens")?
                .map_or(DEFAULT_MAX_TOKENS, |count| count as usize),
            sampling: sampling(&mut fields)?,
            stops: stops(&mut fields)?,
            ignore_end: fields.take("ignore_eos")?.unwrap_or(false),
            echo: fields.take("echo")?.unwrap_or(false),
            logprobs: fields.take::<u32>("logprobs")?.map(|count| count as usize),
            include_usage: include_usage(&mut fields, stream)?,
            stream,
            prompts: match prompt {
                Some(value) => Prompt::parse(&app.tokenizer, &value, mark)?,
                None => return Err(ApiError::invalid("prompt", "prompt is missing")),
            },
        };
        fields.finish()?;
        request.check(app)?;
        Ok(request)
    }

    fn check(&self, app: &App) -> ApiResult<()> {
        let most = app.options.max_choices.min(app.engine.options().max_queue);
        if self.n == 0 {
            return Err(ApiError::invalid("n", "n must be at least 1"));
        }
        if self.prompts.len().saturating_mul(self.n) > most {
            let message = format!(
                "{} prompts times n = {} are more than {most} answers",
                self.prompts.len(),
                self.n
            );
            return Err(ApiError::invalid("n", message));
        }
        let most = app.options.max_logprobs;
        if self.logprobs.is_some_and(|count| count > most) {
            return Err(ApiError::invalid("logprobs", format!("logprobs must be at most {most}")));
        }
        Ok(())
    }
}

fn sampling(fields: &mut Fields) -> ApiResult<Sampling> {
    let usual = Sampling::default();
    Ok(Sampling {
        temperature: fields.take("temperature")?.unwrap_or(usual.temperature),
        top_k: top_k(fields)?,
        top_p: fields.take("top_p")?.unwrap_or(usual.top_p),
        min_p: fields.take("min_p")?.unwrap_or(usual.min_p),
        repetition_penalty: fields.take("repetition_penalty")?.unwrap_or(usual.repetition_penalty),
        // Any whole number is a seed, also a negative one.
        seed: fields.take::<i64>("seed")?.map_or_else(random, |seed| seed as u64),
    })
}

/// Some clients say -1 where others say 0: all tokens.
fn top_k(fields: &mut Fields) -> ApiResult<usize> {
    match fields.take::<i64>("top_k")?.unwrap_or(0) {
        -1 => Ok(0),
        count => usize::try_from(count).map_err(|_| {
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

fn include_usage(fields: &mut Fields, stream: bool) -> ApiResult<bool> {
    let mut options = fields.inner("stream_options")?;
    let include = options.take("include_usage")?;
    options.finish()?;
    if include.is_some() && !stream {
        return Err(ApiError::invalid("stream_options", "stream_options needs stream = true"));
    }
    Ok(include.unwrap_or(false))
}

/// Fields of OpenAI's that would change the answer if they were not ignored.
fn refuse_unsupported(fields: &mut Fields) -> ApiResult<()> {
    fields.ignore("suffix", &[json!("")], "the model only continues what stands before")?;
    fields.ignore("best_of", &[json!(1)], "ask for n answers and choose by log-probability")?;
    fields.ignore("frequency_penalty", &[json!(0)], "use repetition_penalty")?;
    fields.ignore("presence_penalty", &[json!(0)], "use repetition_penalty")?;
    fields.ignore("logit_bias", &[json!({})], "there is no way to favour tokens")?;
    // Who asks is no concern of ours.
    fields.take::<Value>("user").map(drop)
}
