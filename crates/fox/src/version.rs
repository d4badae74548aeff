//! Which fox this is: version, commit where it was built from a checkout, optional features.

/// For instance `0.1.0 (1a2b3c4d5, hf-tokenizers)`.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("FOX_BUILD"), ")");
