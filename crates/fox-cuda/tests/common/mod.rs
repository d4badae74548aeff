//! What the tests share.

/// Says that a test did not run, which is a failure where `FOX_REQUIRE_GPU` is 1.
pub fn skipped(reason: &str) {
    println!("skipped: {reason}");
    let required = std::env::var_os("FOX_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(!required, "FOX_REQUIRE_GPU is set, but {reason}");
}
