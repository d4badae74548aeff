//! Whether two lists of figures have the same order.

use serde::Serialize;

/// How many pairs of rows are in the same order in two lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Agreement {
    /// Pairs that differ in the reference.
    pub pairs: usize,
    /// Those of them that are in the same order here.
    pub agree: usize,
}

impl Agreement {
    /// Compares `(reference, here)` of every two rows. Pairs that are equal in the reference are left out; those that
    /// are equal here do not agree.
    pub fn of(rows: &[(f64, f64)]) -> Agreement {
        let mut found = Agreement::default();
        for (i, a) in rows.iter().enumerate() {
            for b in &rows[i + 1..] {
                if a.0 != b.0 {
                    found.pairs += 1;
                    found.agree += usize::from((a.0 < b.0) == (a.1 < b.1) && a.1 != b.1);
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_by_hand() {
        let of = |rows: &[(f64, f64)]| {
            let found = Agreement::of(rows);
            (found.agree, found.pairs)
        };
        assert_eq!(of(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]), (3, 3));
        // 1-2 and 1-3 agree, 2-3 does not.
        assert_eq!(of(&[(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]), (2, 3));
        // Equal in the reference: no pair; equal here: no agreement.
        assert_eq!(of(&[(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)]), (0, 2));
        assert_eq!(of(&[(2.0, 1.0), (1.0, 1.0)]), (0, 1));
        assert_eq!(of(&[]), (0, 0));
    }
}
