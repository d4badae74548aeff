//! Splitting a matrix by columns, and the inverse.

use fox_tensor::{ColumnOps, Result, Tensor, check_join_columns, check_split_columns};
use rayon::prelude::*;

use crate::Cpu;
use crate::rows::rows_per_task;

impl ColumnOps for Cpu {
    fn split_columns(&self, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
        check_split_columns(self, x, widths)?;
        self.run(|| split(self, x, widths))
    }

    fn join_columns(&self, matrices: &[Tensor]) -> Result<Tensor> {
        check_join_columns(self, matrices)?;
        self.run(|| join(self, matrices))
    }
}

/// Splits `x[R, C]`.
fn split(cpu: &Cpu, x: &Tensor, widths: &[usize]) -> Result<Vec<Tensor>> {
    let (data, width, mut first) = (cpu.real(x), x.cols(), 0);
    let mut parts = Vec::with_capacity(widths.len());
    for &part in widths {
        let mut out = cpu.pool().take(x.rows() * part)?;
        let step = rows_per_task(part);
        if part > 0 {
            out.par_chunks_mut(step * part).zip(data.par_chunks(step * width)).for_each(
                |(out, data)| {
                    for (out, row) in out.chunks_exact_mut(part).zip(data.chunks_exact(width)) {
                        out.copy_from_slice(&row[first..first + part]);
                    }
                },
            );
        }
        parts.push(cpu.tensor(out, [x.rows(), part], x.device()));
        first += part;
    }
    Ok(parts)
}

/// Concatenates matrices along their columns.
fn join(cpu: &Cpu, parts: &[Tensor]) -> Result<Tensor> {
    let rows = parts[0].rows();
    let data: Vec<(&[f32], usize)> =
        parts.iter().map(|part| (cpu.real(part), part.cols())).collect();
    let width: usize = data.iter().map(|(_, part)| part).sum();
    let mut out = cpu.pool().take(rows * width)?;
    let step = rows_per_task(width);
    out.par_chunks_mut(step * width.max(1)).enumerate().for_each(|(at, out)| {
        for (r, mut out) in out.chunks_exact_mut(width).enumerate() {
            for (data, part) in &data {
                let (here, rest) = out.split_at_mut(*part);
                here.copy_from_slice(&data[(at * step + r) * part..][..*part]);
                out = rest;
            }
        }
    });
    Ok(cpu.tensor(out, [rows, width], parts[0].device()))
}
