//! Hugging Face folders: config.json and model.safetensors, or shards and their index.
//!
//! Files are streamed: the header is read and checked first, then one tensor at a time is read
//! into its destination. A file is never in memory as a whole, and nothing in it is trusted
//! before it is checked against the size of the file.

mod convert;
mod file;
mod file_writer;
mod header;
mod int8;
mod missing;
mod names;
mod ranges;
mod reader;
mod writer;

pub use convert::{convert_checkpoint, copy_tokenizer_files};
pub use file::SafetensorsFile;
pub use file_writer::{FileDtype, SafetensorsWriter};
pub(crate) use missing::sentence as missing;
pub use names::{FileTensor, single_tensor, split_mlp};
pub use ranges::SafetensorsRanges;
pub use reader::{CheckpointReader, TensorMismatch};
pub use writer::{WriteOptions, write_checkpoint};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
