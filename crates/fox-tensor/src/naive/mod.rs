//! The oracle.

/// The f64 backend.
#[derive(Debug, Default)]
pub struct Naive;
