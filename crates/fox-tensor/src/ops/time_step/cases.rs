//! Time steps, free and between limits.

use crate::cases::{Case, Output};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads) in [(1, 1), (113, 3), (65, 24)] {
        cases.push(time_step(rows, heads, (0.0, f32::INFINITY)));
        cases.push(time_step(rows, heads, (0.5, 1.5)));
    }
    cases
}

fn time_step(rows: usize, heads: usize, limits: (f32, f32)) -> Case {
    let name = format!("time_step/{limits:?}/{rows}x{heads}");
    let case = Case::new(name, move |tape, args| {
        let (z, bias, a_log) = (args.var("z")?, args.var("bias")?, args.var("a_log")?);
        let (dt, decay) = tape.time_step(z, bias, a_log, limits)?;
        Ok(vec![Output::Var("dt", dt), Output::Var("log_decay", decay)])
    });
    case.normal("z", &[rows, heads]).normal("bias", &[heads]).normal("a_log", &[heads])
}
