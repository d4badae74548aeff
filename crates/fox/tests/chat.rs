//! Conversations end to end: tune on messages, export, serve, and `fox chat` through pipes.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{recipe, run, small_model, stderr, succeeded};
use serde_json::{Value, json};

fn fox(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.args(arguments).env_remove("FOX_API_KEY");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `fox chat` with these lines as its input.
fn chat(arguments: &[&str], lines: &str) -> Output {
    let mut child = fox(&[&["chat"], arguments].concat()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// The only sentence of a command that fails.
fn refused(output: &Output) -> String {
    assert!(!output.status.success(), "it should have failed");
    let text = stderr(output);
    text.lines().last().unwrap_or_default().to_string()
}

/// An untrained model without a chat template.
fn base_model(folder: &Path) -> String {
    let path = folder.join("base");
    small_model(&path, |_| {});
    path.to_str().unwrap().to_string()
}

/// A run that has learnt to answer `ping` with `pong`.
fn tuned(dir: &Path) -> PathBuf {
    let line = json!({ "messages": [
        { "role": "user", "content": "ping" }, { "role": "assistant", "content": "pong" },
        { "role": "user", "content": "ping" }, { "role": "assistant", "content": "pong" },
    ] });
    let chats = dir.join("chats.jsonl");
    fs::write(&chats, format!("{line}\n").repeat(8)).unwrap();
    let out = dir.join("run");
    tune(&recipe(dir), &chats, &out, &["--set", "training.tokens=61440"]);
    out
}

fn tune(recipe: &Path, chats: &Path, out: &Path, more: &[&str]) {
    let path = format!("data.messages.path={chats:?}");
    let mut set = vec!["--set", &path, "--set", "data.tokenizer=\"bytes\"", "--quiet"];
    set.extend(["--set", "data.sequence_length=96", "--set", "data.layout=\"windows\""]);
    set.extend(more);
    succeeded(&run(recipe, out, &set));
}

fn post(address: &str, body: &Value) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap()
}

#[test]
fn tuned_model_chats_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let out = tuned(dir.path());
    let (name, export) = (out.to_str().unwrap(), out.join("export"));
    let template = fs::read_to_string(export.join("chat_template.jinja")).unwrap();
    assert!(template.contains("{{ eos_token }}"), "{template}");
    let generation = export.join("generation_config.json");
    let written: Value = serde_json::from_slice(&fs::read(&generation).unwrap()).unwrap();
    assert_eq!(written, json!({ "bos_token_id": 255, "eos_token_id": [255] }));
    // A second end id, and greedy sampling by default.
    let settings = json!({ "eos_token_id": [255, 7], "do_sample": false });
    fs::write(&generation, settings.to_string()).unwrap();

    let mut server = fox(&["serve", name, "--port", "0"]).spawn().unwrap();
    let mut words = BufReader::new(server.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("http://") {
        line.clear();
        assert!(words.read_line(&mut line).unwrap() > 0, "it ended before it listened");
    }
    let address = line.split("http://").nth(1).unwrap().split(' ').next().unwrap();
    let messages = json!([{ "role": "user", "content": "ping" }]);
    for _ in 0..2 {
        let answer = post(address, &json!({ "messages": messages, "max_tokens": 40 }));
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], "pong", "{answer}");
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
    }
    for (id, reason) in [("255", "stop"), ("7", "stop"), ("8", "length")] {
        let bias = json!({ id: 100 });
        let body = json!({ "messages": messages, "max_tokens": 4, "logit_bias": bias });
        assert_eq!(post(address, &body)["choices"][0]["finish_reason"], reason, "{id}");
    }
    server.kill().unwrap();
    server.wait().unwrap();

    // The same in the terminal: history, reset, and a file that can be trained on.
    let (first, second) = (dir.path().join("a.jsonl"), dir.path().join("b.jsonl"));
    let lines = format!(
        "ping\n\nping\n/save {}\n/reset\nping\n/save {}\n/quit\nping\n",
        first.display(),
        second.display()
    );
    assert_eq!(succeeded(&chat(&[name], &lines)), "pong\npong\npong\n");
    let pair = [
        json!({ "role": "user", "content": "ping" }),
        json!({ "role": "assistant", "content": "pong" }),
    ];
    let saved =
        |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    assert_eq!(saved(&first), json!({ "messages": [pair[0], pair[1], pair[0], pair[1]] }));
    assert_eq!(saved(&second), json!({ "messages": pair }));
    let again = format!("ping\n/save {}\n", first.display());
    assert!(refused(&chat(&[name], &again)).ends_with("a.jsonl exists; choose another name"));

    // A model that starts from it keeps template and generation settings.
    let next = dir.path().join("next");
    let short = ["--init", name, "--set", "training.tokens=3840"];
    tune(&recipe(dir.path()), &dir.path().join("chats.jsonl"), &next, &short);
    for file in ["chat_template.jinja", "generation_config.json", "tokenizer.json"] {
        let of = |run: &Path| fs::read(run.join("export").join(file)).unwrap();
        assert_eq!(of(&next), of(&out), "{file}");
    }
}

#[test]
fn base_model_continues_plain_text() {
    let dir = tempfile::tempdir().unwrap();
    let model = base_model(dir.path());
    let saved = dir.path().join("story.txt");
    let lines = format!("Ann sings.\nBen cooks.\n/save {}\n", saved.display());
    let output = chat(&[&model, "--max-tokens", "5"], &lines);
    let answers = succeeded(&output);
    let notice = "base has no chat template: it continues what you type as plain text\n";
    assert!(stderr(&output).starts_with(notice), "{}", stderr(&output));
    let (first, second) = answers.trim_end().split_once('\n').unwrap();
    let text = fs::read_to_string(&saved).unwrap();
    assert_eq!(text, format!("Ann sings.{first}\nBen cooks.{second}\n"));
    // The same command gives the same text, another seed another one.
    assert_eq!(
        succeeded(&chat(&[&model, "--max-tokens", "5"], &lines.replace("story", "b"))),
        answers
    );
    let other = chat(&[&model, "--max-tokens", "5", "--seed", "9"], "Ann sings.\nBen cooks.\n");
    assert_ne!(succeeded(&other), answers);
}

#[test]
fn chat_rejects_wrong_input() {
    let dir = tempfile::tempdir().unwrap();
    let model = base_model(dir.path());
    let words = |arguments: &[&str], lines: &str| refused(&chat(arguments, lines));
    assert_eq!(
        words(&[&model], "/what\n"),
        "error: unknown command /what; /help lists the commands"
    );
    assert_eq!(words(&[&model], "/save\n"), "error: /save needs a file, e.g. /save chat.jsonl");
    assert!(words(&[&model, "--system", "x"], "").contains("leave --system out"));
    assert!(words(&[&model, "-t", "-1"], "Ann\n").contains("--temperature must be 0 or more"));
    let long = words(&[&model, "--max-context", "3"], "Ann sings. Ben cooks.\n");
    assert!(long.ends_with("--max-context is 3; /reset starts a new one"), "{long}");
    let mut child = fox(&["chat", &model]).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"\xff\xfe\n").unwrap();
    assert!(refused(&child.wait_with_output().unwrap()).contains("not UTF-8"));
    fs::write(format!("{model}/chat_template.jinja"), "{% for").unwrap();
    assert!(words(&[&model], "x\n").contains("chat template has a syntax error"));
    fs::write(format!("{model}/chat_template.jinja"), "{{ raise_exception('no') }}").unwrap();
    assert!(words(&[&model], "x\n").contains("refuses these messages: no"));
}

#[cfg(unix)]
#[test]
fn interrupt_stops_the_answer_only() {
    let dir = tempfile::tempdir().unwrap();
    let model = base_model(dir.path());
    let arguments = ["chat", &model, "--max-tokens", "60000", "-t", "0"];
    let mut child = fox(&arguments).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut words = BufReader::new(child.stderr.take().unwrap());
    input.write_all(b"Ann sings.\n").unwrap();
    let mut some = [0; 64];
    output.read_exact(&mut some).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut line = String::new();
    while !line.contains("(stopped)") {
        line.clear();
        assert!(words.read_line(&mut line).unwrap() > 0, "it ended");
    }
    input.write_all(b"/help\n/quit\n").unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("/save FILE"), "{rest}");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
