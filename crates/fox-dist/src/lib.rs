//! Process groups: several processes ("ranks") that train or evaluate one model.
//!
//! - [`Placement`] reads rank and world size from the environment of torchrun, mpirun, srun or `fox launch`.
//! - [`Group::join`] runs the rendezvous over TCP, within a timeout: ranks are authenticated by a [`Secret`] and compared
//!   by [`Invariant`]s. [`Group::alone`] is the group of a single process.
//! - A group exchanges bytes ([`Group::all_gather`], [`Group::broadcast`]) and tensors
//!   ([`Group::reduce_to_owners`], [`Group::share`]). Sums are made in a fixed order, see [`tree_sum`]. Devices that can
//!   do it exchange tensors without the host, beside other work: [`Group::connect`], [`Group::begin_reduce`],
//!   [`Group::begin_gather`].
//! - Context parallelism, where ranks hold chunks of the same sequences: [`context`].
//! - A rank that is killed, hangs or fails ends every wait of the other ranks with one error, within
//!   [`HEARTBEAT_TIMEOUT`] and a second.
//!
//! ```text
//! rank 0 <- hello (version, invariants, port) - every other rank  control links: heartbeats, failures, goodbyes
//! rank 0 - roster (addresses) -> every other rank
//! rank i - connects -> rank j, for all j < i                      data links: collectives
//! ```
//!
//! ```
//! use fox_dist::{Group, owners, tree_sum};
//!
//! // Under torchrun and the like: Group::join(&placement, &rendezvous), where Placement::from_env() finds one.
//! let group = Group::alone();
//! assert_eq!((group.rank(), group.size(), group.is_first()), (0, 1, true));
//! assert_eq!(group.all_gather(b"mine")?, [b"mine"]);
//! group.leave()?;
//!
//! // The largest parameters first, each to the rank with the least so far.
//! assert_eq!(owners(&[10, 70, 30, 60], 2), [0, 0, 1, 1]);
//! // ((a + b) + (c + d)), whatever the number of ranks that hold a, b, c and d.
//! assert_eq!(tree_sum(vec![vec![1.0], vec![2.0], vec![3.0], vec![4.0]]), [10.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod context;
mod error;
mod free_port;
mod gather;
mod group;
mod handshake;
mod heartbeat;
mod link;
mod link_speed;
mod peers;
mod placement;
mod reduce;
mod rendezvous;
mod secret;

pub use error::{Error, Result};
pub use free_port::free_port;
pub use gather::Gather;
pub use group::Group;
pub use heartbeat::HEARTBEAT_TIMEOUT;
pub use placement::Placement;
pub use reduce::{Owned, owners, tree_sum};
pub use rendezvous::{Invariant, Rendezvous};
pub use secret::Secret;
