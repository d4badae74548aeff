//! A client of a few lines: a request per connection, answers to the end or event by event.

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| Value::String(self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }
}

/// An answer whose body is still to be read.
pub struct Open {
    pub head: Reply,
    pub reader: BufReader<TcpStream>,
}

impl Open {
    /// The next server-sent event; `None` at the end.
    pub fn event(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        while self.reader.read_line(&mut line)? > 0 {
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return Ok(Some(data.to_string()));
            }
            line.clear();
        }
        Ok(None)
    }

    /// Everything that is left.
    pub fn finish(mut self) -> Result<Reply> {
        self.reader.read_to_end(&mut self.head.body)?;
        Ok(self.head)
    }
}

/// Sends a request and reads the head of the answer. HTTP/1.0, so that the body is all that follows.
pub fn open(
    address: SocketAddr,
    (method, path): (&str, &str),
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Open> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    let mut head = format!("{method} {path} HTTP/1.0\r\nhost: {address}\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    stream.write_all(head.as_bytes())?;
    // A server that has seen enough may answer and close before it has read all.
    drop(stream.write_all(body));
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let mut head = Reply { status, headers: Vec::new(), body: Vec::new() };
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => head.headers.push((name.to_lowercase(), value.to_string())),
            None => return Ok(Open { head, reader }),
        }
    }
}

/// Sends JSON.
pub fn open_json(address: SocketAddr, path: &str, body: &Value) -> Result<Open> {
    let kind = [("content-type", "application/json")];
    open(address, ("POST", path), &kind, body.to_string().as_bytes())
}

/// Sends JSON and reads the whole answer.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Result<Reply> {
    open_json(address, path, body)?.finish()
}

/// Reads what is at a path.
pub fn get(address: SocketAddr, path: &str) -> Result<Reply> {
    open(address, ("GET", path), &[], b"")?.finish()
}
