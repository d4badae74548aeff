//! A data link to one other rank: numbered messages over TCP.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Bytes before a message: its number and its length.
const HEADER: usize = 12;

/// A data link. Sending never waits for the other side: a dedicated thread writes, so that two ranks can send to
/// each other at once.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    outbox: Option<Sender<Vec<u8>>>,
    writer: Option<JoinHandle<()>>,
}

impl Link {
    pub fn new(stream: TcpStream) -> io::Result<Link> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        let mut writing = stream.try_clone()?;
        let (outbox, messages) = channel::<Vec<u8>>();
        let writer = std::thread::Builder::new().name("fox-link".into()).spawn(move || {
            for message in messages {
                // The next receive reports the closed connection.
                if writing.write_all(&message).is_err() {
                    let _ = writing.shutdown(Shutdown::Both);
                    break;
                }
            }
        })?;
        Ok(Link { stream, outbox: Some(outbox), writer: Some(writer) })
    }

    /// A handle that can close the connection from another thread.
    pub fn closer(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    pub fn send(&self, number: u32, payload: &[u8]) {
        let mut message = Vec::with_capacity(HEADER + payload.len());
        message.extend(number.to_le_bytes());
        message.extend((payload.len() as u64).to_le_bytes());
        message.extend(payload);
        if let Some(outbox) = &self.outbox {
            // The thread is gone only when the connection is, which the next receipt reports.
            let _ = outbox.send(message);
        }
    }

    /// The next message and its number.
    pub fn receive(&mut self) -> io::Result<(u32, Vec<u8>)> {
        let mut header = [0; HEADER];
        self.stream.read_exact(&mut header)?;
        let (number, len) = header.split_at(4);
        let number = u32::from_le_bytes(number.try_into().unwrap_or_default());
        let len = u64::from_le_bytes(len.try_into().unwrap_or_default());
        let mut payload = Vec::new();
        // Grows with what really comes, whatever length a stranger claims.
        (&mut self.stream).take(len).read_to_end(&mut payload)?;
        if payload.len() as u64 != len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok((number, payload))
    }
}

impl Drop for Link {
    /// Lets the last messages go out first.
    fn drop(&mut self) {
        drop(self.outbox.take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}
