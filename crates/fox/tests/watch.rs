//! `fox watch` and `fox train --baseline`.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use common::succeeded;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn fox(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    command.current_dir(dir).args(line.split_whitespace()).stdin(Stdio::null());
    command
}

/// A child that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn request(address: &str, line: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "{line}\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn baseline_is_trained_and_run_is_watched() {
    let dir = tempfile::tempdir().unwrap();
    let line = "train tiny-fox-pro --device cpu -o run --baseline --tokens 4096 --set \
                data.sequence_length=128 --set metrics.details_every=2";
    let output = fox(dir.path(), line).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains("Transformer") && printed.contains("nats per token"), "{printed}");
    let config = fs::read_to_string(dir.path().join("run-transformer/config.toml")).unwrap();
    assert!(config.contains("fgate_type = \"none\"") && config.contains("use_rope = true"));

    let child = fox(dir.path(), "watch run --port 0").stdout(Stdio::piped()).spawn().unwrap();
    let mut child = Running(child);
    let mut first = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut first).unwrap();
    let address = first.trim().strip_prefix("run: http://").unwrap().trim_end_matches('/');
    // A client that sends nothing delays the next one, but does not block it.
    let silent = TcpStream::connect(address).unwrap();
    drop(silent);
    let page = request(address, "GET / HTTP/1.1");
    assert!(page.starts_with("HTTP/1.1 200 OK") && page.contains("Refresh: 5"), "{page}");
    for part in ["held-out loss", "Learning rate", "Half-lives of the forget gates", "finished"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(request(address, "GET /other HTTP/1.1").starts_with("HTTP/1.1 404"));
    assert!(request(address, "POST / HTTP/1.1").starts_with("HTTP/1.1 405"));
    drop(child);

    // A Transformer has no gates; the page has no such part.
    succeeded(&fox(dir.path(), "watch run-transformer --out page.html").output().unwrap());
    let page = fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(page.contains("Learning rate") && !page.contains("Half-lives"));
}
