//! Columns, element by element.

use crate::naive::{Naive, matrix};
use crate::{ColumnOps, Result, Tensor};

impl ColumnOps for Naive {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        let (data, mut first) = (matrix(x)?, 0);
        let mut part = |&width: &usize| {
            let rows = (0..data.rows).flat_map(|r| &data.row(r)[first..first + width]);
            let values = rows.copied().collect();
            first += width;
            self.tensor(x.device(), values, [data.rows, width])
        };
        Ok(widths.iter().map(&mut part).collect())
    }

    fn join_columns(&self, parts: &[Tensor]) -> Result<Tensor> {
        let data = parts.iter().map(matrix).collect::<Result<Vec<_>>>()?;
        let (rows, width) = (data[0].rows, data.iter().map(|part| part.cols).sum());
        let row = |r: usize| data.iter().flat_map(move |part| part.row(r));
        let values = (0..rows).flat_map(row).copied().collect();
        Ok(self.tensor(parts[0].device(), values, [rows, width]))
    }
}
