//! Decoding on the CPU: the bodies that fox-model's tests run on the oracle.

#[path = "../../fox-model/tests/bodies/decode.rs"]
mod bodies;

/// Two blocks of f32 sums in another order: some hundred roundings of 6e-8 each.
const TOLERANCE: f64 = 2e-5;

#[test]
fn steps_chunks_and_one_pass_agree() {
    bodies::steps_chunks_and_one_pass_agree(&fox_cpu::device(), TOLERANCE);
}

#[test]
fn left_padding_has_no_effect() {
    bodies::left_padding_has_no_effect(&fox_cpu::device(), TOLERANCE);
}

#[test]
fn failed_steps_leave_the_cache_unchanged() {
    bodies::failed_steps_leave_the_cache_unchanged(&fox_cpu::device());
}

#[test]
fn recomputed_blocks_give_the_same_gradients() {
    bodies::recomputed_blocks_give_the_same_gradients(&fox_cpu::device());
}
