//! `fox serve` as a process: it prints its address, answers, and stops on a signal.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use common::small_model;

fn fox(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.args(arguments).env_remove("FOX_API_KEY").stderr(Stdio::piped());
    command
}

fn fixture() -> String {
    format!("tiny={}/../../fixtures/models/fox_pro", env!("CARGO_MANIFEST_DIR"))
}

/// A checkpoint of the embedded corpus's vocabulary, with its tokenizer.
fn checkpoint(folder: &std::path::Path) -> String {
    let path = folder.join("small");
    small_model(&path, |config| config.mlp.intermediate_size = None);
    path.to_str().unwrap().to_string()
}

/// Starts a server; its process, its words, and where it is.
fn start(command: &mut Command) -> (Child, BufReader<ChildStderr>, String) {
    let mut child = command.spawn().unwrap();
    let mut words = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("http://") {
        line.clear();
        assert!(words.read_line(&mut line).unwrap() > 0, "it ended before it listened");
    }
    let address = line.split("http://").nth(1).unwrap().split(' ').next().unwrap().to_string();
    (child, words, address)
}

fn post(address: &str, headers: &str, body: &str) -> String {
    post_to(address, "/v1/completions", headers, body)
}

fn post_to(address: &str, path: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn serves_and_stops_on_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let model = format!("storm={}", checkpoint(folder.path()));
    let mut command = fox(&["serve", &model, "--port", "0"]);
    let (mut child, mut words, address) = start(command.env("FOX_API_KEY", "secret"));
    let body = r#"{"prompt": "Ann sings. Ben cooks. Ann", "max_tokens": 5, "model": "storm"}"#;
    assert!(post(&address, "", body).starts_with("HTTP/1.0 401"));
    let answer = post(&address, "authorization: Bearer secret\r\n", body);
    assert!(
        answer.starts_with("HTTP/1.0 200") && answer.contains("\"text_completion\""),
        "{answer}"
    );
    let asked = Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(asked.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    words.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("running requests may finish"), "{rest}");
}

#[test]
fn names_chat_template_and_access_log() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path());
    let config = std::path::Path::new(&model).join("tokenizer_config.json");
    let mut values: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    values["chat_template"] =
        "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}".into();
    std::fs::write(&config, values.to_string()).unwrap();
    let flags = ["--host", "localhost", "--alias", "gpt-4o", "--strict", "--access-log", "json"];
    let mut command = fox(&["serve", &model, "--port", "0"]);
    let (mut child, mut words, address) = start(command.args(flags));
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let body = r#"{"model": "gpt-4o", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 3}"#;
    let id = "x-request-id: mine\r\n";
    let answer = post_to(&address, "/v1/chat/completions", id, body);
    assert!(
        answer.starts_with("HTTP/1.0 200") && answer.contains("\"chat.completion\""),
        "{answer}"
    );
    assert!(answer.contains("\"prompt_tokens\":3"), "the marker and two words: {answer}");
    let refused = post(&address, "", r#"{"prompt": "the", "max_token": 3}"#);
    assert!(refused.starts_with("HTTP/1.0 400") && refused.contains("unknown field"), "{refused}");
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    child.wait().unwrap();
    let mut rest = String::new();
    words.read_to_string(&mut rest).unwrap();
    let line =
        rest.lines().find(|line| line.contains("\"mine\"")).unwrap_or_else(|| panic!("{rest}"));
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!((&line["path"], &line["status"]), (&"/v1/chat/completions".into(), &200.into()));
    assert!(line["bytes"].as_u64().unwrap() > 100 && line["ms"].as_f64().unwrap() > 0.0, "{line}");
}

#[test]
fn serve_rejects_invalid_options() {
    let words = |arguments: &[&str]| {
        let output = fox(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let output = words(&["serve", &fixture()]);
    assert!(output.contains("--tokenizer"), "{output}");
    let output = words(&["serve", &fixture(), "--tokenizer", "bytes"]);
    assert!(output.contains("256 ids, but the model tiny has 64"), "{output}");
    let output = words(&["serve", &fixture(), "--tokenizer", "bytes", "--api-key", ""]);
    assert!(output.contains("API key is empty"), "{output}");
    let output = words(&["serve", &fixture(), "--host", "no host"]);
    assert!(
        output.contains("cannot find the host no host") && output.contains("--host"),
        "{output}"
    );
    let output = words(&["serve", &fixture(), "--allow-origin", "app.example"]);
    assert!(output.contains("https://app.example"), "{output}");
    for wrong in ["*", "127.0.0.1:8081", "http://a; script-src *"] {
        let output = words(&["serve", &fixture(), "--compare", wrong]);
        assert!(output.contains("the address of a server, e.g. http://127.0.0.1:8081"), "{output}");
    }
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path());
    std::fs::write(format!("{model}/chat_template.jinja"), "{% for").unwrap();
    let output = words(&["serve", &model, "--port", "0"]);
    assert!(output.contains("chat template has a syntax error"), "{output}");
    let output = words(&["serve", &model, "--cache", "0"]);
    assert!(output.contains("--cache"), "{output}");
}
