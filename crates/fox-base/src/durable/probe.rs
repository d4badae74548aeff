//! Recording and fault injection of file system calls in tests.

use std::cell::{Cell, RefCell};
use std::io;
use std::path::Path;

thread_local! {
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static FAILING: Cell<Option<&'static str>> = const { Cell::new(None) };
}

pub(super) fn before(action: &'static str, path: &Path) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    CALLS.with_borrow_mut(|calls| calls.push(format!("{action} {name}")));
    match FAILING.get() {
        Some(failing) if failing == action => Err(io::Error::other("planted")),
        _ => Ok(()),
    }
}

/// The calls of this thread since the last call of `take`, as `action name`.
pub(super) fn take() -> Vec<String> {
    CALLS.take()
}

/// Makes every call of this action fail on this thread during `work`.
pub(super) fn failing<T>(action: &'static str, work: impl FnOnce() -> T) -> T {
    FAILING.set(Some(action));
    let result = work();
    FAILING.set(None);
    result
}
