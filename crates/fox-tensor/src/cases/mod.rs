//! The list of op cases.
