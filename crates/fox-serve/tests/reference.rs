//! The fields of the guide's page `reference-http.md` are fields of the server.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::client::post;
use common::serve_with;
use fox_infer::EngineOptions;
use fox_serve::ServeOptions;
use serde_json::{Value, json};

/// Section of the page, path, and a body that the path accepts.
fn sections() -> Vec<(&'static str, &'static str, Value)> {
    let text = json!({ "prompt": "a", "max_tokens": 1 });
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 1 });
    vec![
        ("Fields of /v1/completions", "/v1/completions", text.clone()),
        ("Fields of both", "/v1/completions", text),
        ("Fields of /v1/chat/completions", "/v1/chat/completions", chat.clone()),
        ("Fields of both", "/v1/chat/completions", chat.clone()),
        (
            "Fields of /v1/responses",
            "/v1/responses",
            json!({ "input": "a", "max_output_tokens": 1 }),
        ),
        ("Fields of /v1/messages", "/v1/messages", chat),
        ("Fields of /tokenize", "/tokenize", json!({ "prompt": "a" })),
        ("Fields of /detokenize", "/detokenize", json!({ "tokens": [1] })),
        ("Fields of /inspect", "/inspect", json!({ "prompt": "a" })),
    ]
}

/// The names in a section: the first column of its table, and the names of its lists.
fn names(page: &str, section: &str) -> Vec<String> {
    let start = page.find(&format!("## {section}\n")).expect(section);
    let body = page[start + 3..].split("\n## ").next().unwrap();
    let mut names = Vec::new();
    for line in body.lines().skip(1) {
        match line.strip_prefix("| `") {
            Some(row) => names.push(row.split('`').next().unwrap().to_string()),
            None if !line.starts_with('|') => {
                names.extend(line.split('`').skip(1).step_by(2).map(str::to_string));
            }
            None => {}
        }
    }
    names
}

#[test]
fn reference_fields_are_known() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/src/reference-http.md");
    let page = std::fs::read_to_string(page).unwrap();
    let options = ServeOptions { strict: true, ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let mut sent = 0;
    for (section, path, body) in sections() {
        for name in names(&page, section) {
            let mut body = body.clone();
            let fields = body.as_object_mut().unwrap();
            fields.entry(&name).or_insert(Value::Null);
            let reply = post(server.address, path, &body).unwrap();
            assert_eq!(reply.status, 200, "{path}, {name}: {}", reply.text());
            sent += 1;
        }
        let mut body = body;
        body["not_a_field"] = Value::Null;
        assert_eq!(post(server.address, path, &body).unwrap().status, 400, "{path}");
    }
    assert!(sent > 100, "only {sent} fields were found");
}
