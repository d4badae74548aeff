//! Listening, accepting connections, graceful shutdown.

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};

use crate::app::{App, ServedModel};
use crate::body::ReceivedBody;
use crate::completions::Kind;
use crate::routes::ConnectionInfo;
use crate::stall_guard::{RequestPhase, StallGuard};
use crate::{Error, Result, ServeOptions, completions, routes};

/// Connections beyond the limit that are accepted for `/health` and `/metrics`.
const RESERVE: usize = 32;
/// Time limit for the request on such a connection.
const RESERVE_TIME: Duration = Duration::from_secs(2);

/// Connections that the system holds until they are accepted. The standard library asks for 128, which a burst of
/// clients exceeds; attempts to connect are then dropped, and repeated by the client a second later.
const BACKLOG: i32 = 1024;

/// A server that is bound but does not accept connections yet.
pub struct Server {
    listener: TcpListener,
    app: Arc<App>,
    stop: ShutdownHandle,
}

/// Ends a server from another thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ShutdownHandle(watch::Sender<bool>);

impl ShutdownHandle {
    /// Stops accepting connections. Running requests may finish within [`ServeOptions::drain_time`].
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

impl Server {
    /// Binds the address.
    ///
    /// # Errors
    /// An address in use, an option out of range, or a tokenizer that is not the model's.
    pub fn bind(served: ServedModel, options: ServeOptions) -> Result<Server> {
        let address = options.address;
        let app = App::new(served, options)?;
        let failed = |source| Error::Bind { address, source };
        let listener = listen(address).map_err(failed)?;
        Ok(Server { listener, app: Arc::new(app), stop: ShutdownHandle(watch::Sender::new(false)) })
    }

    /// The bound address, with the actual port for port 0.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// A handle that stops the server.
    pub fn shutdown_handle(&self) -> ShutdownHandle {
        self.stop.clone()
    }

    /// Answers the body of one completion request in this process, without a connection: the status and the
    /// body of the response.
    ///
    /// # Errors
    /// No thread to run on.
    pub fn complete(&self, body: &[u8]) -> Result<(u16, Vec<u8>)> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(Error::Runtime)?;
        let body = ReceivedBody::local(body, &self.app.bodies);
        let app = self.app.clone();
        runtime.block_on(async move {
            let answer = completions::complete(app, Kind::Text, body).await;
            let response = answer.unwrap_or_else(|error| error.response());
            let status = response.status().as_u16();
            let Ok(body) = response.into_body().collect().await;
            Ok((status, body.to_bytes().into()))
        })
    }

    /// Serves until it is stopped, then drains running requests, closes the engine and returns.
    ///
    /// # Errors
    /// No threads to run on.
    pub fn run(self) -> Result<()> {
        let Server { listener, app, stop } = self;
        // These threads only read and write sockets; the engine and the text workers have separate threads.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("fox-serve")
            .enable_all()
            .build()
            .map_err(Error::Runtime)?;
        let shared = app.clone();
        let served = runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Runtime)?;
            serve(listener, shared, stop.0.subscribe()).await;
            Ok(())
        });
        // Open connections are dropped here, and with them their requests.
        runtime.shutdown_timeout(Duration::from_secs(1));
        app.engine.drain();
        served
    }
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restarted server gets its address back while old connections close. Windows gives the option another meaning.
    #[cfg(not(windows))]
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

async fn serve(listener: tokio::net::TcpListener, app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let permits = Arc::new(Semaphore::new(app.options.max_connections));
    let reserve = Arc::new(Semaphore::new(RESERVE));
    let connections = GracefulShutdown::new();
    let mut stopping = std::pin::pin!(async move { drop(stop.wait_for(|stop| *stop).await) });
    loop {
        let next = async {
            let permit = match permits.clone().try_acquire_owned() {
                Ok(permit) => (Some(permit), false),
                Err(_) => (reserve.clone().acquire_owned().await.ok(), true),
            };
            (listener.accept().await, permit)
        };
        let Some((accepted, (mut permit, mut is_reserve))) = unless(&mut stopping, next).await
        else {
            break;
        };
        match accepted {
            Ok((stream, peer)) => {
                // A regular connection may have ended since.
                if let (true, Ok(free)) = (is_reserve, permits.clone().try_acquire_owned()) {
                    (permit, is_reserve) = (Some(free), false);
                }
                let info =
                    ConnectionInfo { peer, reserve: is_reserve, phase: RequestPhase::default() };
                let connection = connections.watch(connection(stream, app.clone(), info));
                tokio::spawn(async move {
                    // An error of a connection concerns its client only.
                    drop(connection.await);
                    drop(permit);
                });
            }
            // Mostly too many open files, which passes.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    drop(listener);
    drop(tokio::time::timeout(app.options.drain_time, connections.shutdown()).await);
}

/// The output of `work`, or `None` if `end` completes first.
async fn unless<T>(
    end: &mut (impl Future<Output = ()> + Unpin),
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|cx| {
        if std::pin::Pin::new(&mut *end).poll(cx).is_ready() {
            return std::task::Poll::Ready(None);
        }
        work.as_mut().poll(cx).map(Some)
    })
    .await
}

/// Serves one connection: sequential requests, each with its limits.
fn connection(
    stream: TcpStream,
    app: Arc<App>,
    info: ConnectionInfo,
) -> impl hyper_util::server::graceful::GracefulConnection<Error = hyper::Error> {
    // Tokens are sent without delay. A socket without this option still works.
    drop(stream.set_nodelay(true));
    let limit = match info.reserve {
        false => app.options.stall_time,
        true => app.options.stall_time.min(RESERVE_TIME),
    };
    let io = TokioIo::new(StallGuard::new(stream, limit, info.phase.clone()));
    let service = service_fn(move |request| {
        info.phase.receive();
        routes::answer(app.clone(), request, info.clone())
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limit)
        .serve_connection(io, service)
}
