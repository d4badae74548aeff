//! Cases of trained linear layers beside frozen ops. A device that recomputes cheap results defers work to the backward
//! pass of the op, which does not run where the op is frozen.

use super::{Args, Case, Output};
use crate::{Activation, HeadSpec, Result, Segments, Tape, Var};

const ROWS: usize = 26;
const WIDTH: usize = 16;

/// Ops whose results are cheap to recompute.
#[derive(Clone, Copy, Debug)]
enum Cheap {
    Norm,
    GatedNorm,
    Glu,
    Heads,
}

pub(super) fn cases() -> Vec<Case> {
    let ops = [Cheap::Norm, Cheap::GatedNorm, Cheap::Glu, Cheap::Heads];
    ops.into_iter().flat_map(|op| [below(op), between(op)]).collect()
}

/// A frozen op and its frozen input below trained layers, one alone and two as a group.
fn below(op: Cheap) -> Case {
    let case = Case::new(format!("frozen/{op:?} below"), move |tape, args| {
        let y = cheap(tape, op, args.var("x")?, args)?;
        layers(tape, &y, args)
    });
    let x = case.rng("x").normals(ROWS * WIDTH);
    trained(frozen(case.constant("x", &[ROWS, WIDTH], x)), op)
}

/// Frozen weights between trained ones: the gradient goes through them.
fn between(op: Cheap) -> Case {
    let case = Case::new(format!("frozen/{op:?} between"), move |tape, args| {
        let x = tape.linear(args.var("x")?, args.var("low")?, None)?;
        let x = tape.linear(&x, args.var("square")?, None)?;
        let y = cheap(tape, op, &x, args)?;
        layers(tape, &y, args)
    });
    let x = case.rng("x").normals(ROWS * 8);
    let square = case.rng("square").normals(WIDTH * WIDTH);
    let case = case
        .constant("x", &[ROWS, 8], x)
        .constant("square", &[WIDTH, WIDTH], square)
        .normal("low", &[WIDTH, 8]);
    trained(frozen(case), op)
}

fn frozen(case: Case) -> Case {
    let norm = case.rng("norm").normals(WIDTH);
    case.constant("norm", &[WIDTH], norm)
}

fn trained(case: Case, op: Cheap) -> Case {
    let width = if matches!(op, Cheap::Glu) { WIDTH / 2 } else { WIDTH };
    let case = case.normal("w0", &[40, width]);
    case.normal("w1", &[3, width]).normal("w2", &[5, width])
}

fn layers(tape: &mut Tape<'static>, y: &Var, args: &Args<'_>) -> Result<Vec<Output>> {
    let alone = tape.linear(y, args.var("w0")?, None)?;
    let weights = [args.var("w1")?.clone(), args.var("w2")?.clone()];
    let group = tape.linear_group(y, &weights)?;
    let outs = std::iter::once(alone).chain(group).zip(["alone", "first", "second"]);
    Ok(outs.map(|(y, name)| Output::Var(name, y)).collect())
}

fn cheap(tape: &mut Tape<'static>, op: Cheap, x: &Var, args: &Args<'_>) -> Result<Var> {
    let norm = args.var("norm")?;
    match op {
        Cheap::Norm => Ok(tape.add_rms_norm(x, None, norm, 1e-6)?.1),
        Cheap::GatedNorm => tape.gated_norm(x, Some(norm), None, 2, 1e-6, Activation::Silu),
        Cheap::Glu => tape.glu(x, Activation::Silu),
        Cheap::Heads => {
            let segments = Segments::packed(&[0, ROWS])?;
            let spec =
                HeadSpec { heads: 2, head_dim: WIDTH / 2, norm_eps: 1e-6, rope: None, segments };
            tape.prepare_heads(x, None, None, Some(norm), &spec)
        }
    }
}
