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
fn left_padding_changes_nothing() {
    bodies::left_padding_changes_nothing(&fox_cpu::device(), TOLERANCE);
}

#[test]
fn a_failed_step_leaves_the_cache_as_it_was() {
    bodies::a_failed_step_leaves_the_cache_as_it_was(&fox_cpu::device());
}

#[test]
fn recomputed_blocks_give_the_same_gradients() {
    bodies::recomputed_blocks_give_the_same_gradients(&fox_cpu::device());
}
