//! The example of a mixer from outside: what it claims to show is so.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[path = "../examples/own_mixer.rs"]
mod own_mixer;

#[test]
fn external_mixer_trains_stores_and_decodes() {
    let folder = tempfile::tempdir().unwrap();
    let seen = own_mixer::run(folder.path()).unwrap();
    let (first, last) = seen.losses;
    assert!(last < first - 1.0, "the loss went from {first} to {last}");
    // Its own parameter gets gradients, too.
    assert!(seen.theta_moved > 0.01, "{}", seen.theta_moved);
    assert!(seen.decode_error < 1e-4, "{:e}", seen.decode_error);
    assert_eq!(seen.options, ["averages over 1 to 32 tokens"]);
    let config = std::fs::read_to_string(folder.path().join("run/export/config.json")).unwrap();
    assert!(config.contains("\"model_type\": \"moving_average\""), "{config}");
    assert!(config.contains("\"memory_max\": 32.0"), "{config}");
}
