//! Budgets in bytes for what requests hold in memory: unfinished bodies, and answers in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::StatusCode;
use hyper::body::Bytes;

use crate::error::{ApiError, ApiResult};

/// Bytes of one chunk of a serialized answer.
const CHUNK: usize = 64 << 10;

/// Bytes that many leases share. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ByteBudget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// What the bytes are used for, as error messages say it.
    purpose: &'static str,
    limit: usize,
    used: AtomicUsize,
}

impl ByteBudget {
    pub fn new(purpose: &'static str, limit: usize) -> ByteBudget {
        ByteBudget(Arc::new(Inner { purpose, limit, used: AtomicUsize::new(0) }))
    }

    /// A lease of nothing yet.
    pub fn lease(&self) -> ByteLease {
        ByteLease { budget: self.clone(), bytes: AtomicUsize::new(0) }
    }

    /// Bytes that all leases hold.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

/// Bytes that one request holds; dropping the lease returns them.
#[derive(Debug)]
pub(crate) struct ByteLease {
    budget: ByteBudget,
    bytes: AtomicUsize,
}

impl ByteLease {
    /// Takes bytes from the budget.
    ///
    /// # Errors
    /// 413 when this request alone needs more than the budget, 429 when others have what it needs.
    pub fn grow(&self, bytes: usize) -> ApiResult<()> {
        let Inner { purpose, limit, used } = &*self.budget.0;
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| sum <= limit);
        if used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok() {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            return Ok(());
        }
        if self.bytes().saturating_add(bytes) > *limit {
            let message = format!("the request needs more than the {limit} bytes for {purpose}");
            let status = StatusCode::PAYLOAD_TOO_LARGE;
            return Err(ApiError::new(status, "invalid_request_error", message)
                .with_code("memory_limit_exceeded"));
        }
        let message = format!("the {limit} bytes for {purpose} are in use; try again later");
        let status = StatusCode::TOO_MANY_REQUESTS;
        Err(ApiError::new(status, "rate_limit_error", message).with_code("memory_in_use"))
    }

    /// Bytes that the lease holds.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns bytes to the budget.
    pub fn shrink(&self, bytes: usize) {
        let held = |held: usize| Some(held.saturating_sub(bytes));
        let update = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, held);
        let before = update.unwrap_or_default();
        self.budget.0.used.fetch_sub(bytes.min(before), Ordering::Relaxed);
    }
}

impl Drop for ByteLease {
    fn drop(&mut self) {
        self.shrink(self.bytes());
    }
}

/// Writes an answer in chunks that are counted in a lease until the connection has sent them.
pub(crate) struct LeasedWriter {
    lease: Arc<ByteLease>,
    chunks: Vec<Bytes>,
    open: Vec<u8>,
    error: Option<ApiError>,
}

/// A chunk that returns its bytes when it is dropped.
struct LeasedChunk {
    bytes: Vec<u8>,
    lease: Arc<ByteLease>,
}

impl AsRef<[u8]> for LeasedChunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for LeasedChunk {
    fn drop(&mut self) {
        self.lease.shrink(self.bytes.len());
    }
}

impl LeasedWriter {
    /// Serializes a value as JSON.
    pub fn json(lease: &Arc<ByteLease>, value: &impl serde::Serialize) -> ApiResult<Vec<Bytes>> {
        let mut writer = LeasedWriter {
            lease: lease.clone(),
            chunks: Vec::new(),
            open: Vec::new(),
            error: None,
        };
        match serde_json::to_writer(&mut writer, value) {
            Ok(()) => {
                writer.seal()?;
                Ok(writer.chunks)
            }
            Err(error) => {
                Err(writer.error.unwrap_or_else(|| ApiError::internal(error.to_string())))
            }
        }
    }

    fn seal(&mut self) -> ApiResult<()> {
        let bytes = std::mem::take(&mut self.open);
        self.lease.grow(bytes.len())?;
        self.chunks.push(Bytes::from_owner(LeasedChunk { bytes, lease: self.lease.clone() }));
        Ok(())
    }
}

impl std::io::Write for LeasedWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.open.len() + bytes.len() > CHUNK
            && !self.open.is_empty()
            && let Err(error) = self.seal()
        {
            self.error = Some(error);
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        self.open.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_share_a_budget_and_return_it() {
        let budget = ByteBudget::new("tests", 100);
        let (first, second) = (budget.lease(), budget.lease());
        first.grow(60).unwrap();
        second.grow(40).unwrap();
        let error = second.grow(1).unwrap_err();
        assert_eq!(error.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(error.message, "the 100 bytes for tests are in use; try again later");
        let error = first.grow(41).unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
        first.shrink(20);
        second.grow(20).unwrap();
        // More than it has.
        first.shrink(1000);
        assert_eq!(budget.used(), 60);
        drop((first, second));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn serialized_answers_are_leased_until_they_are_sent() {
        let budget = ByteBudget::new("tests", 3 * CHUNK);
        let lease = Arc::new(budget.lease());
        let text = vec!["x".repeat(1000); 150];
        let chunks = LeasedWriter::json(&lease, &text).unwrap();
        assert!(chunks.len() > 1 && chunks.iter().all(|chunk| chunk.len() <= CHUNK));
        let joined: Vec<u8> = chunks.iter().flatten().copied().collect();
        assert_eq!(joined, serde_json::to_vec(&text).unwrap());
        assert_eq!(budget.used(), joined.len());
        let error = LeasedWriter::json(&lease, &text).unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(budget.used(), joined.len(), "a failed answer returns its bytes");
        drop(chunks);
        assert_eq!(budget.used(), 0);
    }
}
