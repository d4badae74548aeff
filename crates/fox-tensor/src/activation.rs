//! Nonlinearities that several ops apply.

/// Pointwise nonlinearity of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x * sigmoid(x)`, also called swish.
    Silu,
}
