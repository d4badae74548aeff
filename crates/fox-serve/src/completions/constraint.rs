//! Fields that constrain an answer: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`.

use std::sync::Arc;
use std::time::Duration;

use fox_infer::{Grammar, GrammarCompiler, GrammarSpec};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::reference::STRUCTURED_OUTPUTS;
use crate::text_runtime::Worker;

/// Time limit for compiling a grammar.
const COMPILE_TIME: Duration = Duration::from_secs(10);
/// Bytes of a schema that is given as a text.
const MAX_SCHEMA_TEXT: usize = 64 << 10;

/// What an answer must match, and the field that says so.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Constraint {
    pub field: &'static str,
    pub spec: GrammarSpec,
}

/// A compiled grammar, and the permit that limits their number: each has a lexer of up to [`Grammar::MAX_BYTES`].
pub(crate) struct LimitedGrammar {
    pub grammar: Grammar,
    _permit: OwnedSemaphorePermit,
}

impl Constraint {
    /// The constraint of a request, if it has one.
    ///
    /// # Errors
    /// 400 for two constraints, or one of the wrong form.
    pub fn parse(fields: &mut Fields) -> ApiResult<Option<Constraint>> {
        let mut found = Vec::new();
        if let Some(format) = fields.take::<Value>("response_format")? {
            found.extend(response_format(&format)?);
        }
        found.extend(forms(
            fields,
            ["guided_json", "guided_regex", "guided_choice", "guided_grammar"],
            None,
        )?);
        let mut inner = fields.inner("structured_outputs", &[STRUCTURED_OUTPUTS])?;
        if inner.take("json_object")? == Some(true) {
            let spec = GrammarSpec::json_object();
            found.push(Constraint { field: "structured_outputs", spec });
        }
        let names = ["json", "regex", "choice", "grammar"];
        found.extend(forms(&mut inner, names, Some("structured_outputs"))?);
        inner.finish(true)?;
        match found.len() {
            0 | 1 => Ok(found.pop()),
            _ => {
                let names: Vec<&str> = found.iter().map(|constraint| constraint.field).collect();
                let message = format!("give one of {}, not several", names.join(", "));
                Err(ApiError::invalid(found[1].field, message))
            }
        }
    }

    /// Compiles the grammar on a separate thread, one at a time.
    ///
    /// # Errors
    /// 400 for a grammar that is invalid, too large or too slow to compile, 504 when others are in front for too long.
    pub async fn compile(self, app: &Arc<App>) -> ApiResult<LimitedGrammar> {
        let Constraint { field, spec } = self;
        let limit = acquire(app, &app.grammar_limit).await?;
        let permit = acquire(app, &app.compilers).await?;
        let shared = app.clone();
        let compile = Worker::blocking(move || {
            let refused =
                |error: fox_infer::GrammarError| ApiError::invalid(field, error.to_string());
            let vocab = shared.engine.model().config().vocab_size;
            let new = || GrammarCompiler::new(&shared.tokenizer, vocab);
            let compiler = shared.grammars.get_or_init(new).as_ref();
            let compiler = compiler.map_err(|error| refused(error.clone()))?;
            let grammar = compiler.compile(&spec).map_err(refused);
            // A compilation that runs into the time limit cannot be cancelled and keeps its permit.
            drop(permit);
            grammar
        });
        match tokio::time::timeout(COMPILE_TIME, compile).await {
            Ok(grammar) => Ok(LimitedGrammar { grammar: grammar??, _permit: limit }),
            Err(_) => {
                let seconds = COMPILE_TIME.as_secs();
                let message =
                    format!("{field} takes longer than {seconds} s to compile; simplify it");
                Err(ApiError::invalid(field, message))
            }
        }
    }
}

async fn acquire(app: &App, permits: &Arc<Semaphore>) -> ApiResult<OwnedSemaphorePermit> {
    let limit = app.options.request_time;
    match tokio::time::timeout(limit, permits.clone().acquire_owned()).await {
        Ok(permit) => permit.map_err(|error| ApiError::internal(error.to_string())),
        Err(_) => Err(ApiError::late(limit)),
    }
}

/// The fields for a schema, an expression, choices and a grammar, in this order.
fn forms(
    fields: &mut Fields,
    [json, regex, choice, grammar]: [&'static str; 4],
    parent: Option<&'static str>,
) -> ApiResult<Vec<Constraint>> {
    let schema = match fields.take(json)? {
        Some(Value::String(text)) => Some(parse_schema(json, &text)?),
        other => other,
    };
    let found = [
        (json, schema.map(GrammarSpec::JsonSchema)),
        (regex, fields.take(regex)?.map(GrammarSpec::Regex)),
        (choice, fields.take(choice)?.map(GrammarSpec::Choice)),
        (grammar, fields.take(grammar)?.map(GrammarSpec::Lark)),
    ];
    let constraint = |(name, spec): (_, Option<_>)| {
        spec.map(|spec| Constraint { field: parent.unwrap_or(name), spec })
    };
    Ok(found.into_iter().filter_map(constraint).collect())
}

fn parse_schema(name: &'static str, text: &str) -> ApiResult<Value> {
    if text.len() > MAX_SCHEMA_TEXT {
        let message = format!("{name} has more than {MAX_SCHEMA_TEXT} bytes");
        return Err(ApiError::invalid(name, message));
    }
    serde_json::from_str(text)
        .map_err(|error| ApiError::invalid(name, format!("{name} is not JSON: {error}")))
}

fn response_format(format: &Value) -> ApiResult<Option<Constraint>> {
    let field = "response_format";
    let spec = match format["type"].as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => GrammarSpec::json_object(),
        Some("json_schema") => match &format["json_schema"]["schema"] {
            Value::Null => {
                let message = "response_format has no json_schema.schema";
                return Err(ApiError::invalid(field, message));
            }
            schema => GrammarSpec::JsonSchema(schema.clone()),
        },
        _ => {
            let message = "response_format.type must be text, json_object or json_schema";
            return Err(ApiError::invalid(field, message));
        }
    };
    Ok(Some(Constraint { field, spec }))
}
