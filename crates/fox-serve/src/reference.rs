//! The HTTP API as data: the fields of requests and the errors. Together with the routes they are the guide's page
//! `reference-http.md`.
//!
//! Debug builds look every field up that is taken and every code of an error, so a test fails that uses one which is
//! missing here; `tests/reference.rs` sends every field of the page.

/// A field of a request.
#[cfg_attr(not(test), allow(dead_code))] // the page is written by a test
pub(crate) struct Field {
    pub name: &'static str,
    /// Type and default.
    pub form: &'static str,
    pub meaning: &'static str,
}

const fn field(name: &'static str, form: &'static str, meaning: &'static str) -> Field {
    Field { name, form, meaning }
}

/// Tables of the fields that a parser may take.
pub(crate) type KnownFields = &'static [&'static [Field]];

#[rustfmt::skip] // a row per line
pub(crate) const TEXT: &[Field] = &[
    field("prompt", "text, ids, or a list of either", "what is continued; every element of a list is a prompt"),
    field("logprobs", "count, none", "log-probabilities of tokens, each with this number of alternatives"),
    field("suffix", "text", "refused unless it is empty"),
];

#[rustfmt::skip] // a row per line
pub(crate) const CHAT: &[Field] = &[
    field("messages", "list", "the conversation: `role`, `content`, and what the chat template reads besides"),
    field("add_generation_prompt", "boolean, true", "end the prompt where the template begins an answer"),
    field("logprobs", "boolean, false", "log-probabilities of tokens"),
    field("top_logprobs", "count, 0", "alternatives per token; needs `logprobs`"),
    field("tools", "list, none", "functions that the model may call, passed to the chat template"),
    field("tool_choice", "text or object, `auto`", "`none`, `auto`, `required`, or the name of a tool"),
    field("parallel_tool_calls", "boolean, true", "whether an answer that must call a tool may call several"),
    field("functions", "list", "refused unless it is empty: use `tools`"),
    field("function_call", "text", "refused unless it is `none` or `auto`: use `tool_choice`"),
    field("audio", "object", "refused"),
];

/// Fields of completions and of chats.
#[rustfmt::skip] // a row per line
pub(crate) const COMMON: &[Field] = &[
    field("model", "text, none", "name or alias of the served model; another one is 404"),
    field("max_tokens", "count, 16; chats 1,024", "longest answer in tokens"),
    field("max_completion_tokens", "count", "the same under OpenAI's newer name; it counts when both are given"),
    field("min_tokens", "count, 0", "end tokens are not sampled before"),
    field("temperature", "number, `generation_config.json` or 1", "0 is greedy"),
    field("top_k", "count, as above or 0", "sample from the likeliest tokens only; 0 and -1 are all of them"),
    field("top_p", "number, as above or 1", "sample from the likeliest tokens with this total probability"),
    field("min_p", "number, as above or 0", "drop tokens below this fraction of the largest probability"),
    field("repetition_penalty", "number, as above or 1", "divides the logits of tokens that occurred"),
    field("presence_penalty", "-2 to 2, 0", "subtracted from the logits of tokens that were generated"),
    field("frequency_penalty", "-2 to 2, 0", "the same, times the number of occurrences"),
    field("logit_bias", "object of id and -100 to 100", "added to the logits of these tokens"),
    field("seed", "integer, random", "the same seed gives the same answer, whatever else is in the batch"),
    field("n", "count, 1", "answers per prompt"),
    field("best_of", "count, `n`", "answers that are generated; the `n` likeliest per token are returned"),
    field("stop", "text or list, none", "texts that end an answer; they are not returned"),
    field("stop_token_ids", "list of ids, none", "ids that end an answer"),
    field("ignore_eos", "boolean, false", "continue after end tokens"),
    field("echo", "boolean, false", "return the prompt in front of the answer, with its log-probabilities"),
    field("prompt_logprobs", "count, none", "log-probabilities of the prompt in vLLM's form"),
    field("stream", "boolean, false", "answer as server-sent events"),
    field("stream_options", "object", "`include_usage`: a last event with the number of tokens"),
    field("add_special_tokens", "boolean, true; chats as the template needs", "put the start token in front"),
    field("response_format", "object, text", "`json_object`, or a `json_schema` that the answer matches"),
    field("guided_json", "JSON schema", "the same in vLLM's form"),
    field("guided_regex", "text", "a regular expression that the answer matches"),
    field("guided_choice", "list of texts", "the answer is one of them"),
    field("guided_grammar", "text", "a Lark grammar that the answer matches"),
    field("structured_outputs", "object", "`json`, `regex`, `choice`, `grammar` or `json_object`: vLLM's newer form"),
];

pub(crate) const STREAM_OPTIONS: &[Field] = &[field("include_usage", "boolean, false", "")];

pub(crate) const STRUCTURED_OUTPUTS: &[Field] = &[
    field("json", "JSON schema", ""),
    field("json_object", "boolean", ""),
    field("regex", "text", ""),
    field("choice", "list of texts", ""),
    field("grammar", "text", ""),
];

#[rustfmt::skip] // a row per line
pub(crate) const RESPONSES: &[Field] = &[
    field("input", "text or list", "a text of the user, or messages, function calls and their outputs"),
    field("instructions", "text, none", "a system message in front"),
    field("max_output_tokens", "count, 1,024", "longest answer in tokens"),
    field("tools", "list, none", "functions in the flat form of this API"),
    field("tool_choice", "text or object, `auto`", "as in chats, with `name` at the top"),
    field("text", "object", "`format`: `json_object`, or `json_schema` with its schema"),
    field("previous_response_id", "text", "refused: responses are not stored, send the whole input"),
    field("conversation", "object", "refused, for the same reason"),
    field("background", "boolean", "refused unless it is false"),
];

pub(crate) const MESSAGES: &[Field] = &[
    field("messages", "list", "texts, or blocks of type `text`, `tool_use` and `tool_result`"),
    field("max_tokens", "count", "longest answer in tokens; required by this API"),
    field("system", "text or blocks, none", "a system message in front"),
    field("stop_sequences", "list, none", "texts that end an answer"),
    field("tools", "list, none", "`name`, `description`, `input_schema`"),
    field("tool_choice", "object, `auto`", "`auto`, `any`, `none`, or `tool` with its `name`"),
];

#[rustfmt::skip] // a row per line
pub(crate) const TOKENIZE: &[Field] = &[
    field("model", "text, none", "name or alias of the served model"),
    field("prompt", "text", "this, or `messages`, is required"),
    field("messages", "list", "a conversation, formatted by the chat template"),
    field("add_generation_prompt", "boolean, true", "end the prompt where the template begins an answer"),
    field("add_special_tokens", "boolean, true", "put the start token in front"),
    field("return_token_strs", "boolean, false", "return the text of every token, too"),
];

pub(crate) const DETOKENIZE: &[Field] = &[
    field("model", "text, none", "name or alias of the served model"),
    field("tokens", "list of ids", "required"),
];

pub(crate) const INSPECT: &[Field] = &[
    field("prompt", "text or ids", "the text; at most 4,096 tokens"),
    field("head", "[layer, head]", "one head; without it, heads are selected by half-life"),
    field("position", "count", "only the attention of `head` at this token"),
];

/// Status, code and cause of an error; a code of `-` is null in the body.
#[rustfmt::skip] // a row per line
pub(crate) static ERRORS: &[(u16, &str, &str)] = &[
    (400, "-", "the body is not a JSON object, or `param` names an invalid field"),
    (400, "context_length_exceeded", "prompt and `max_tokens` exceed `--max-context`"),
    (400, "cache_size_exceeded", "the sequence alone does not fit into `--cache`"),
    (400, "unsupported_parameter", "a field of OpenAI's API that would change the answer and is not supported"),
    (401, "invalid_api_key", "the key is missing or wrong: `Authorization: Bearer KEY`, or `x-api-key: KEY`"),
    (403, "host_not_allowed", "a server on loopback was addressed by another name; `--allow-origin` permits it"),
    (404, "-", "the path is unknown"),
    (404, "model_not_found", "`model` is neither the served model nor an alias"),
    (405, "-", "the path has another method, which `Allow` names"),
    (408, "-", "the body did not arrive in time"),
    (413, "-", "the body is too large (16 MiB)"),
    (413, "memory_limit_exceeded", "the answer alone exceeds `--answer-memory`"),
    (415, "-", "the header `Content-Type: application/json` is missing"),
    (429, "queue_full", "more than `--max-queue` requests wait; `Retry-After` says when to try again"),
    (429, "memory_in_use", "`--answer-memory` is in use at the moment; try again"),
    (500, "-", "an error of the server"),
    (501, "unsupported_endpoint", "a route of OpenAI's API that is not supported"),
    (503, "crowded", "too many connections; `/health` and `/metrics` still answer"),
    (503, "shutting_down", "the server drains"),
    (504, "-", "the answer took longer than `--timeout`"),
];

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::Path;

    use super::*;
    use crate::completions::{IGNORED, IGNORED_MESSAGES, IGNORED_RESPONSES};
    use crate::completions::{SAME_MESSAGES, SAME_RESPONSES};
    use crate::routes::ROUTES;

    const HEAD: &str = "\
# The HTTP API

All routes, request fields and errors of `fox serve`. This page is written from the server's own tables:
`FOX_UPDATE_SNAPSHOTS=1 cargo test -p fox-serve reference` updates it, and the same test fails when it is out of date.
[Serve it](serving.md) shows how to use them.

Request bodies are JSON objects with `Content-Type: application/json`. A field that is null counts as absent. Unknown
fields are named in the header `x-fox-warning`, or refused with `--strict`.
";

    /// Names in backquotes, wrapped.
    fn list(text: &mut String, start: &str, names: &[&str]) {
        let mut line = start.to_string();
        for (i, name) in names.iter().enumerate() {
            let end = if i + 1 == names.len() { "." } else { "," };
            let word = format!(" `{name}`{end}");
            if line.len() + word.len() > 120 {
                let _ = writeln!(text, "{line}");
                line = word.trim_start().to_string();
            } else {
                line += &word;
            }
        }
        let _ = writeln!(text, "{line}\n");
    }

    fn table(text: &mut String, heading: &str, fields: &[Field]) {
        let _ =
            writeln!(text, "## {heading}\n\n| field | meaning | type, default |\n|---|---|---|");
        for Field { name, form, meaning } in fields {
            let _ = writeln!(text, "| `{name}` | {meaning} | {form} |");
        }
        text.push('\n');
    }

    fn page() -> String {
        let mut text = format!(
            "{HEAD}\n## Routes\n\n| path | what it is | method | key |\n|---|---|---|---|\n"
        );
        for (path, route, meaning) in ROUTES {
            let key = if route.needs_key() { "yes" } else { "no" };
            let _ = writeln!(text, "| `{path}` | {meaning} | {} | {key} |", route.method());
        }
        text +=
            "\nWith `FOX_API_KEY` or `--api-key`, the routes with a \"yes\" require the key.\n\n";
        table(&mut text, "Fields of /v1/completions", TEXT);
        table(&mut text, "Fields of /v1/chat/completions", CHAT);
        table(&mut text, "Fields of both", COMMON);
        list(&mut text, "Accepted without effect:", IGNORED);
        table(&mut text, "Fields of /v1/responses", RESPONSES);
        list(&mut text, "As in chats:", SAME_RESPONSES);
        list(&mut text, "Accepted without effect:", IGNORED_RESPONSES);
        table(&mut text, "Fields of /v1/messages", MESSAGES);
        list(&mut text, "As in chats:", SAME_MESSAGES);
        list(&mut text, "Accepted without effect:", IGNORED_MESSAGES);
        table(&mut text, "Fields of /tokenize", TOKENIZE);
        table(&mut text, "Fields of /detokenize", DETOKENIZE);
        table(&mut text, "Fields of /inspect", INSPECT);
        text += "## Errors\n\nThe body of an error is OpenAI's: `{\"error\": {\"message\", \"type\", \"param\", \"code\"}}`. \
                 The message is one\nsentence; `param` is the invalid field.\n\n| status | code | cause |\n|---|---|---|\n";
        for (status, code, cause) in ERRORS {
            let code = if *code == "-" { String::new() } else { format!("`{code}`") };
            let _ = writeln!(text, "| {status} | {code} | {cause} |");
        }
        text
    }

    #[test]
    fn reference_page_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = path.join("../../docs/guide/src/reference-http.md");
        if std::env::var_os("FOX_UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let command = "FOX_UPDATE_SNAPSHOTS=1 cargo test -p fox-serve reference";
        assert!(std::fs::read_to_string(&path).unwrap() == page(), "out of date; run {command}");
    }

    #[test]
    fn routes_are_found_by_their_paths() {
        for (path, route, _) in ROUTES {
            assert!(crate::routes::Route::find(path) == Some(*route), "{path}");
        }
    }
}
