//! Command-line arguments that several commands share: device, engine, models and corpora.

pub mod corpus;
pub mod count;
pub mod device;
pub mod engine;
pub mod hints;
pub mod hub;
pub mod pretrained;
pub mod sampling;
pub mod subjects;
pub mod tolerance;
