//! Every dump of the references, on the CPU, at the float32 tolerances.

#[path = "../../fox-model/tests/bodies/dumps.rs"]
mod bodies;

prove_dumps!(fox_cpu::device());
