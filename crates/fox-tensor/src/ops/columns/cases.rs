//! Columns cut apart.

use crate::cases::{Case, Output};

pub(crate) fn cases() -> Vec<Case> {
    vec![columns()]
}

/// Parts of a matrix, one of them without a gradient.
fn columns() -> Case {
    Case::new("columns/113x40", |tape, args| {
        let parts = tape.split_columns(args.var("x")?, &[7, 1, 24, 8])?;
        let mut names = ["a", "b", "c"].into_iter();
        let used = parts.into_iter().enumerate().filter(|(n, _)| *n != 1);
        Ok(used.map(|(_, part)| Output::Var(names.next().unwrap_or("d"), part)).collect())
    })
    .normal("x", &[113, 40])
}
