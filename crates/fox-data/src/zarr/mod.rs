//! LongCrawl64 and arrays like it: Zarr version 2, two dimensions, one document per row.
//!
//! The array is read where it lies. A read opens the chunks it touches and decodes only the Blosc blocks that hold
//! the wanted tokens; decoded blocks are kept up to a limit, because neighbouring documents share them.

mod blosc;
mod cache;
mod dataset;
mod metadata;

pub use dataset::ZarrDataset;
pub use metadata::{TokenType, ZarrMetadata};
