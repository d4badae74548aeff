//! Tool calls, `/v1/responses` and `/v1/messages`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::client::{open, open_json, post};
use common::{Running, serve, serve_with};
use fox_infer::EngineOptions;
use fox_serve::{ChatTemplate, ServeOptions};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn ask(server: &Running, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body).unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

/// The data of all events.
fn stream(server: &Running, path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut open = open_json(server.address, path, &body).unwrap();
    assert_eq!(open.head.status, 200);
    let mut events = Vec::new();
    while let Some(event) = open.event().unwrap() {
        if event != "[DONE]" {
            events.push(serde_json::from_str(&event).unwrap());
        }
    }
    events
}

fn tool() -> Value {
    let parameters = json!({ "type": "object", "required": ["city"], "additionalProperties": false,
        "properties": { "city": { "enum": ["Rome", "Oslo"] } } });
    json!({ "name": "weather", "description": "of a city", "parameters": parameters })
}

fn assert_city(arguments: &Value) {
    assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
}

fn parsed(text: &Value) -> Value {
    serde_json::from_str(text.as_str().unwrap()).unwrap()
}

#[test]
fn forced_tool_calls_are_valid() {
    let server = serve();
    let tools = json!([{ "type": "function", "function": tool() }]);
    let named = json!({ "type": "function", "function": { "name": "weather" } });
    for choice in [named, json!("required")] {
        let body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "tools": tools,
            "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 300, "n": 4, "seed": 3 });
        let answer = ask(&server, CHAT, &body);
        for choice in answer["choices"].as_array().unwrap() {
            let message = &choice["message"];
            assert!(message["content"].is_null(), "{message}");
            assert_eq!(choice["finish_reason"], "tool_calls");
            let call = &message["tool_calls"][0];
            assert_eq!(
                (&call["type"], &call["function"]["name"]),
                (&json!("function"), &json!("weather"))
            );
            assert_city(&parsed(&call["function"]["arguments"]));
        }
        let chunks = stream(&server, CHAT, &body);
        let calls =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"].get("tool_calls"));
        let calls: Vec<&Value> = calls.collect();
        assert_eq!(calls.len(), 4);
        assert_eq!(calls[0][0]["index"], 0);
        assert_city(&parsed(&calls[0][0]["function"]["arguments"]));
    }
}

#[test]
fn templates_see_tools_and_calls() {
    let source = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for m in messages %}{{ m.content }}\
        {% for c in m.tool_calls %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}";
    let chat = ChatTemplate { source: Some(source.into()), ..ChatTemplate::default() };
    let server =
        serve_with(EngineOptions::default(), ServeOptions { chat, ..ServeOptions::default() });
    let function = json!({ "name": "weather", "arguments": "{\"city\": \"Rome\"}" });
    let messages = json!([
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": null,
          "tool_calls": [{ "id": "call_1", "type": "function", "function": function }] },
        { "role": "tool", "tool_call_id": "call_1", "content": "12" },
    ]);
    let tools = json!([{ "type": "function", "function": tool() }]);
    let count = |extra: Value| {
        let mut body = json!({ "messages": messages, "max_tokens": 1 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ask(&server, CHAT, &body)["usage"]["prompt_tokens"].as_u64().unwrap() as usize
    };
    assert_eq!(count(json!({})), "a(Rome)12".len());
    assert_eq!(count(json!({ "tools": tools })), "[weather]a(Rome)12".len());
    assert_eq!(count(json!({ "tools": tools, "tool_choice": "none" })), "a(Rome)12".len());
}

#[test]
fn responses_equal_chats() {
    let server = serve();
    let options = json!({ "temperature": 0, "ignore_eos": true });
    let with = |extra: Value| {
        let mut body = options.clone();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let messages =
        json!([{ "role": "system", "content": "Short." }, { "role": "user", "content": "Hi" }]);
    let chat = ask(&server, CHAT, &with(json!({ "messages": messages, "max_tokens": 12 })));
    let text = &chat["choices"][0]["message"]["content"];
    let parts = json!([{ "type": "input_text", "text": "Hi" }]);
    for input in [json!("Hi"), json!([{ "role": "user", "content": parts }])] {
        let body =
            with(json!({ "instructions": "Short.", "input": input, "max_output_tokens": 12 }));
        let response = ask(&server, "/v1/responses", &body);
        assert_eq!(
            (&response["object"], &response["status"]),
            (&json!("response"), &json!("incomplete"))
        );
        assert_eq!(response["output"][0]["content"][0]["text"], *text);
        assert_eq!(response["usage"]["output_tokens"], 12);
        assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
        let events = stream(&server, "/v1/responses", &body);
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
        assert_eq!(*kinds.last().unwrap(), "response.incomplete");
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let streamed: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!(streamed, *text);
        let numbers = events.iter().map(|event| event["sequence_number"].as_u64().unwrap());
        assert!(numbers.eq(0..events.len() as u64));
        let last = &events.last().unwrap()["response"]["output"][0];
        assert_eq!(last["content"], response["output"][0]["content"]);
    }
    // Structured output and tools in the form of this API.
    let mut function = tool();
    function["type"] = json!("function");
    let format = json!({ "type": "json_schema", "name": "w", "schema": tool()["parameters"] });
    let body = json!({ "input": "x", "max_output_tokens": 200, "text": { "format": format } });
    let response = ask(&server, "/v1/responses", &body);
    assert_city(&parsed(&response["output"][0]["content"][0]["text"]));
    let body = json!({ "input": "x", "max_output_tokens": 200, "tools": [function],
        "tool_choice": { "type": "function", "name": "weather" } });
    let response = ask(&server, "/v1/responses", &body);
    assert_eq!(response["output"][0]["type"], "function_call");
    assert_city(&parsed(&response["output"][0]["arguments"]));
    let events = stream(&server, "/v1/responses", &body);
    let done = events.iter().find(|e| e["type"] == "response.function_call_arguments.done");
    assert_city(&parsed(&done.unwrap()["arguments"]));

    for (body, param) in [
        (json!({}), "input"),
        (json!({ "input": [{ "type": "image" }] }), "input"),
        (json!({ "input": "x", "previous_response_id": "resp_1" }), "previous_response_id"),
    ] {
        let reply = post(server.address, "/v1/responses", &body).unwrap();
        assert_eq!((reply.status, reply.json()["error"]["param"].as_str()), (400, Some(param)));
    }
}

#[test]
fn messages_equal_chats() {
    let server = serve();
    let messages =
        json!([{ "role": "system", "content": "Short." }, { "role": "user", "content": "Hi" }]);
    let options = json!({ "temperature": 0, "ignore_eos": true, "max_tokens": 12 });
    let mut body = options.clone();
    body["messages"] = messages;
    let chat = ask(&server, CHAT, &body);
    let text = &chat["choices"][0]["message"]["content"];
    let mut body = options;
    body["system"] = json!([{ "type": "text", "text": "Short." }]);
    body["messages"] = json!([{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }]);
    let message = ask(&server, "/v1/messages", &body);
    assert_eq!(message["content"], json!([{ "type": "text", "text": text }]));
    assert_eq!(
        (&message["type"], &message["stop_reason"]),
        (&json!("message"), &json!("max_tokens"))
    );
    assert_eq!(message["usage"]["output_tokens"], 12);
    let events = stream(&server, "/v1/messages", &body);
    let deltas = events.iter().filter(|event| event["type"] == "content_block_delta");
    let streamed: String = deltas.map(|event| event["delta"]["text"].as_str().unwrap()).collect();
    assert_eq!(streamed, *text);
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");

    let tool = json!({ "name": "weather", "input_schema": tool()["parameters"] });
    let result = json!({ "type": "tool_result", "tool_use_id": "toolu_1", "content": "12" });
    let body = json!({ "max_tokens": 200, "tools": [tool], "tool_choice": { "type": "any", "disable_parallel_tool_use": true }, "messages": [
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "toolu_1", "name": "weather", "input": {} }] },
        { "role": "user", "content": [result] },
    ] });
    let message = ask(&server, "/v1/messages", &body);
    assert_eq!(message["stop_reason"], "tool_use");
    assert_city(&message["content"][0]["input"]);
    let events = stream(&server, "/v1/messages", &body);
    assert!(events.iter().any(|event| event["content_block"]["type"] == "tool_use"));
    let body = json!({ "messages": [{ "role": "user", "content": "x" }] });
    let reply = post(server.address, "/v1/messages", &body).unwrap();
    assert_eq!((reply.status, reply.json()["error"]["param"].as_str()), (400, Some("max_tokens")));
}

#[test]
fn key_may_come_in_anthropics_header() {
    let options = ServeOptions { api_key: Some("secret".into()), ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let status = |key: &str| {
        let headers = [("content-type", "application/json"), ("x-api-key", key)];
        let body = br#"{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}"#;
        open(server.address, ("POST", "/v1/messages"), &headers, body).unwrap().head.status
    };
    assert_eq!((status("secret"), status("other")), (200, 401));
}
