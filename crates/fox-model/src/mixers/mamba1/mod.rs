//! Mamba-1: a selective scan with a decay for every channel and every element of its state. It is stored as a
//! part of Samba.

mod config;
mod layer;
mod selective_scan;

pub use config::Mamba1Config;
