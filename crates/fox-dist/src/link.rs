//! A data link to one other rank: numbered messages over TCP.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// Bytes before a message: its number and its length.
const HEADER: usize = 12;
/// Messages that are read before they are asked for; the other side waits with more.
const READ_AHEAD: usize = 2;

/// A message with its number.
type Message = (u32, Vec<u8>);

/// A data link. Sending never waits for the other side: a dedicated thread writes, so that two ranks can send to
/// each other at once. Another one reads, so that messages arrive while this rank computes.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    outbox: Option<Sender<Vec<u8>>>,
    inbox: Option<Receiver<io::Result<Message>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    pub fn new(stream: TcpStream) -> io::Result<Link> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        let (mut writing, reading) = (stream.try_clone()?, stream.try_clone()?);
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
        let (arrived, inbox) = sync_channel(READ_AHEAD);
        let reader = std::thread::Builder::new()
            .name("fox-link-read".into())
            .spawn(move || read_all(reading, &arrived))?;
        let threads = vec![writer, reader];
        Ok(Link { stream, outbox: Some(outbox), inbox: Some(inbox), threads })
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
    pub fn receive(&mut self) -> io::Result<Message> {
        let next = self.inbox.as_ref().and_then(|inbox| inbox.recv().ok());
        // The thread ends after it has reported an error.
        next.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))
    }
}

fn read_all(mut stream: TcpStream, arrived: &SyncSender<io::Result<Message>>) {
    loop {
        let message = read(&mut stream);
        let over = message.is_err();
        if arrived.send(message).is_err() || over {
            break;
        }
    }
}

fn read(stream: &mut TcpStream) -> io::Result<Message> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let (number, len) = header.split_at(4);
    let number = u32::from_le_bytes(number.try_into().unwrap_or_default());
    let len = u64::from_le_bytes(len.try_into().unwrap_or_default());
    let mut payload = Vec::new();
    // Grows with what really comes, whatever length a stranger claims.
    stream.take(len).read_to_end(&mut payload)?;
    if payload.len() as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((number, payload))
}

impl Drop for Link {
    /// Lets the last messages go out first.
    fn drop(&mut self) {
        drop(self.outbox.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
            // The writer is done: the reader has nothing to wait for.
            drop(self.inbox.take());
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }
}
