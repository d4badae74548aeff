//! `/tokenize`, `/detokenize`, `/tokenizer_info`.

use fox_data::{Gpt2Tokenizer, START_WORD, Tokenizer};
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::body::{Body, json_response};
use crate::chat;
use crate::completions::{Prompt, id_list};
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::models;
use crate::reference::{DETOKENIZE, TOKENIZE};

#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: usize,
    tokens: &'a [i32],
    token_strs: Option<Vec<&'a str>>,
}

/// `{"prompt": TEXT, "add_special_tokens": true, "return_token_strs": false}` to ids, or `messages` in place of the
/// prompt.
pub(crate) fn tokenize(app: &App, body: &[u8]) -> ApiResult<Response<Body>> {
    let mut fields = Fields::parse(body, &[TOKENIZE])?;
    if let Some(model) = fields.take::<String>("model")? {
        models::check_name(app, &model)?;
    }
    let text: Option<String> = fields.take("prompt")?;
    let messages: Option<Value> = fields.take("messages")?;
    let add = fields.take("add_generation_prompt")?.unwrap_or(true);
    let mark: Option<bool> = fields.take("add_special_tokens")?;
    let names = fields.take("return_token_strs")?.unwrap_or(false);
    let unknown = fields.finish(app.options.strict)?;
    let ids = match (text, messages) {
        (None, Some(messages)) => {
            let text = app.chat.prompt(&chat::messages(Some(messages))?, &[], add)?;
            Prompt::rendered(app, &text, mark.unwrap_or(app.chat.needs_mark()))?.ids
        }
        (Some(text), None) if text == marker(&app.tokenizer) => {
            vec![app.tokenizer.bos() as i32; 1 + usize::from(mark.unwrap_or(true))]
        }
        (Some(text), None) => Prompt::text(app, &text, mark.unwrap_or(true))?.ids,
        _ => return Err(ApiError::invalid("prompt", "prompt is missing; give it or messages")),
    };
    let names = names.then(|| ids.iter().map(|&id| app.names.get(id).as_str()).collect());
    let max_model_len = app.engine.options().max_context;
    let answer = Tokenized { count: ids.len(), max_model_len, tokens: &ids, token_strs: names };
    Ok(unknown.report(json_response(StatusCode::OK, &answer)))
}

/// `{"tokens": [ID, ...]}` to text.
pub(crate) fn detokenize(app: &App, body: &[u8]) -> ApiResult<Response<Body>> {
    let mut fields = Fields::parse(body, &[DETOKENIZE])?;
    if let Some(model) = fields.take::<String>("model")? {
        models::check_name(app, &model)?;
    }
    let ids = fields.take_raw("tokens").map(|raw| id_list(raw, "tokens")).transpose()?;
    let unknown = fields.finish(app.options.strict)?;
    let ids = ids.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
    let text = app.tokenizer.decode(&ids);
    let text = text.map_err(|error| ApiError::invalid("tokens", error.to_string()))?;
    Ok(unknown.report(json_response(StatusCode::OK, &json!({ "prompt": text }))))
}

/// Identity and markers of the tokenizer.
pub(crate) fn info(app: &App) -> Value {
    let marker = marker(&app.tokenizer);
    json!({
        "tokenizer_class": app.tokenizer.identity().name,
        "identity": app.tokenizer.identity().to_string(),
        "vocab_size": app.tokenizer.vocab_size(),
        "bos_token": marker,
        "eos_token": marker,
        "bos_token_id": app.tokenizer.bos(),
        "eos_token_id": app.tokenizer.bos(),
        "end_token_ids": app.end_ids,
        "model_max_length": app.engine.options().max_context,
        "chat_template": app.options.chat.source,
    })
}

/// The text of the marker: one that becomes it when it is tokenized. Bytes have none, so there `/tokenize` takes a
/// stand-in for it when that is the whole text: clients such as lm-evaluation-harness know markers by their text.
fn marker(tokenizer: &Tokenizer) -> String {
    let bos = tokenizer.bos();
    let own = tokenizer.decode(&[bos]).unwrap_or_default();
    let known = [own.as_str(), Gpt2Tokenizer::END_OF_TEXT_TEXT, START_WORD];
    let is_marker = |text: &&str| tokenizer.encode(text).is_ok_and(|ids| ids == [bos]);
    known.into_iter().find(is_marker).unwrap_or(Gpt2Tokenizer::END_OF_TEXT_TEXT).to_string()
}
