//! `fox serve` from the outside: it says where it is, answers, and ends well when told to.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use fox_data::{SyntheticTokenizer, Tokenizer};
use fox_model::{Model, ModelConfig, WriteOptions};

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
    let mut config = ModelConfig::fox_pro(32, 2, 2);
    config.vocab_size = SyntheticTokenizer::VOCAB_SIZE;
    let model = Model::init(&config, 1, &fox_cpu::device()).unwrap();
    let path = folder.join("small");
    model.save(&path, &WriteOptions::for_model(&config)).unwrap();
    Tokenizer::from_name("synthetic").unwrap().save(&path).unwrap();
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
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_server_answers_and_ends_when_told_to() {
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
    assert!(rest.contains("running requests may end"), "{rest}");
}

#[test]
fn what_cannot_be_served_is_said() {
    let words = |arguments: &[&str]| {
        let output = fox(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let told = words(&["serve", &fixture()]);
    assert!(told.contains("--tokenizer"), "{told}");
    let told = words(&["serve", &fixture(), "--tokenizer", "bytes"]);
    assert!(told.contains("256 ids, but the model tiny has 64"), "{told}");
    let told = words(&["serve", &fixture(), "--tokenizer", "bytes", "--api-key", ""]);
    assert!(told.contains("API key is empty"), "{told}");
}
