//! Limits of templates: sizes of values and output, nesting, steps.
//!
//! Every operation that can create a large value passes through a [`Meter`] before it runs. Work and memory are then
//! proportional to the messages, with a fixed allowance for short ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Longest source of a template, bytes.
pub(super) const MAX_SOURCE_BYTES: usize = 512 << 10;
/// Most tokens inside of one `{{ }}` or `{% %}`, which bounds the depth of expressions.
pub(super) const MAX_TAG_TOKENS: usize = 1_000;
/// Most `elif` branches of a template, which nest in the parser.
pub(super) const MAX_ELIFS: usize = 500;
/// Steps of the interpreter.
pub(super) const MAX_STEPS: u64 = 1_000_000;
/// Depth of nested macros and loops, in the interpreter's units.
pub(super) const MAX_RECURSION: usize = 200;
/// Depth of nested lists and maps.
const MAX_DEPTH: usize = 32;
/// Bytes that one list element or map entry counts for.
const NODE_BYTES: u64 = 32;

/// The limit that a template exceeds. Displays as a predicate: "repeats text without end".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateLimit {
    /// The source is too long.
    #[error("has more than {MAX_SOURCE_BYTES} bytes")]
    Source,
    /// An expression has too many tokens, or there are too many branches.
    #[error(
        "has an expression of more than {MAX_TAG_TOKENS} tokens or more than {MAX_ELIFS} branches"
    )]
    Expression,
    /// A text, list or the output is too large.
    #[error("creates a text or list that is too large for these messages")]
    Size,
    /// All values together are too large.
    #[error("creates or compares too much text for these messages")]
    Work,
    /// Lists, maps or macros are nested too deeply.
    #[error("nests lists, maps or macros too deeply")]
    Depth,
    /// Too many steps.
    #[error("takes more than {MAX_STEPS} steps")]
    Steps,
    /// A namespace is stored inside of a namespace.
    #[error("stores a namespace, loop or macro inside of a namespace")]
    Cycle,
}

impl From<TemplateLimit> for Error {
    fn from(limit: TemplateLimit) -> Error {
        Error::new(ErrorKind::InvalidOperation, limit.to_string()).with_source(limit)
    }
}

type Result<T> = std::result::Result<T, Error>;

/// Size of a value: its text when written out, and its elements.
#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    pub(super) bytes: u64,
    nodes: u64,
}

impl Size {
    pub(super) fn total(self) -> u64 {
        self.bytes.saturating_add(self.nodes.saturating_mul(NODE_BYTES))
    }
}

/// Counts what one rendering of a template creates.
#[derive(Clone)]
pub(super) struct Meter {
    /// Largest value and output, bytes.
    max_value: u64,
    /// Bytes that may still be created or compared.
    work: Arc<AtomicU64>,
    output: Arc<AtomicU64>,
}

impl Meter {
    /// For messages of so many bytes.
    pub(super) fn new(input_bytes: usize) -> Self {
        let input = input_bytes as u64;
        Meter {
            max_value: (4 << 20) + 8 * input,
            work: Arc::new(AtomicU64::new((64 << 20) + 64 * input)),
            output: Arc::default(),
        }
    }

    /// Charges work.
    pub(super) fn charge(&self, bytes: u64) -> Result<()> {
        let take = |left: u64| left.checked_sub(bytes);
        match self.work.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(_) => Err(TemplateLimit::Work.into()),
        }
    }

    /// Charges a new text or list of so many bytes.
    pub(super) fn create(&self, bytes: u64) -> Result<()> {
        if bytes > self.max_value {
            return Err(TemplateLimit::Size.into());
        }
        self.charge(bytes)
    }

    /// Charges text that is written to the output or to a captured block.
    pub(super) fn write(&self, bytes: u64) -> Result<()> {
        let written = self.output.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        match written > self.max_value {
            true => Err(TemplateLimit::Size.into()),
            false => Ok(()),
        }
    }

    /// The size of a value; an error if it is too large or too deep.
    pub(super) fn size(&self, value: &Value) -> Result<Size> {
        let mut size = Size::default();
        self.add_size(value, 0, &mut size)?;
        Ok(size)
    }

    fn add_size(&self, value: &Value, depth: usize, size: &mut Size) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(TemplateLimit::Depth.into());
        }
        size.nodes += 1;
        match value.kind() {
            ValueKind::String | ValueKind::Bytes => size.bytes += value.len().unwrap_or(0) as u64,
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.add_size(&item, depth + 1, size)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    self.add_size(&value.get_item(&key)?, depth + 1, size)?;
                    self.add_size(&key, depth + 1, size)?;
                }
            }
            _ => size.bytes += 8,
        }
        match size.total() > self.max_value {
            true => Err(TemplateLimit::Size.into()),
            false => Ok(()),
        }
    }

    /// Charges a value that an operation has created. Lazy sequences become lists, so that none refers to another.
    pub(super) fn created(&self, value: Value) -> Result<Value> {
        let size = self.size(&value)?;
        let text = if value.as_str().is_some() { size.bytes } else { 0 };
        self.create(text.saturating_add(size.nodes * NODE_BYTES))?;
        match value.kind() {
            ValueKind::Iterable => Ok(value.try_iter()?.collect()),
            _ => Ok(value),
        }
    }

    /// Charges a comparison, or a search in the second value.
    pub(super) fn compare(&self, a: &Value, b: &Value) -> Result<()> {
        self.charge(self.size(a)?.total() / 8)?;
        self.charge(self.size(b)?.total() / 8)
    }
}

/// An error if a value that is to be stored in a namespace holds a namespace, loop or macro: it could hold itself.
pub(super) fn check_stored(value: &Value, depth: usize) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(TemplateLimit::Depth.into());
    }
    let Some(object) = value.as_object() else { return Ok(()) };
    let name = object.type_name();
    if ["Namespace", "Loop", "Macro", "Closure"].iter().any(|kind| name.contains(kind)) {
        return Err(TemplateLimit::Cycle.into());
    }
    if let ValueKind::Seq | ValueKind::Map = value.kind() {
        for item in value.try_iter()? {
            let item = if value.kind() == ValueKind::Map { value.get_item(&item)? } else { item };
            check_stored(&item, depth + 1)?;
        }
    }
    Ok(())
}
