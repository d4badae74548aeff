//! The baselines' ops: scans with every kind of decay and update, the short convolution, gates.

use super::{Case, Output, Rng, round};
use crate::{Activation, ConvSpec, L2Norm, Result, ScanSpec, ScanVars, Segment, Segments, Update};

/// How much is forgotten from token to token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Nothing, and there is no such operand.
    None,
    /// One factor per head.
    Head(Strength),
    /// One factor for every row of the state.
    Channel(Strength),
}

/// How strong a decay is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strength {
    /// Factors around 0.9.
    Mild,
    /// Factors from `e^-60` to `1 - 1e-6`, side by side.
    Wild,
}

/// Everything that makes a scan.
#[derive(Clone, Debug)]
pub struct ScanCase {
    /// How tokens change the state.
    pub update: Update,
    /// What is forgotten.
    pub decay: Decay,
    /// Whether writes have a strength.
    pub write: bool,
    /// Whether values go to the output directly.
    pub skip: bool,
    /// Whether there is a state before the first token.
    pub state: bool,
    /// Heads, and heads of keys.
    pub heads: (usize, usize),
    /// Widths of keys and of values.
    pub dims: (usize, usize),
    /// Name and segments of the layout.
    pub layout: (&'static str, Segments),
    /// Number of rows.
    pub rows: usize,
}

pub(super) fn cases() -> Vec<Case> {
    use Strength::{Mild, Wild};
    let layouts = layouts();
    let heads = [(1, 1), (2, 2), (3, 1), (6, 2), (5, 1)];
    let dims = [(8, 8), (16, 24), (5, 3), (32, 17), (1, 4), (40, 64)];
    let mut cases = Vec::new();
    let kinds = [
        (Update::Add, Decay::None),
        (Update::Add, Decay::Head(Mild)),
        (Update::Add, Decay::Head(Wild)),
        (Update::Add, Decay::Channel(Mild)),
        (Update::Add, Decay::Channel(Wild)),
        (Update::Delta, Decay::None),
        (Update::Delta, Decay::Head(Mild)),
        (Update::Delta, Decay::Head(Wild)),
    ];
    for (update, decay) in kinds {
        for (n, (layout, rows)) in layouts.iter().enumerate() {
            // Walks through options and sizes so that they mix.
            let turn = cases.len() + n;
            let mut heads = heads[turn % heads.len()];
            if matches!(decay, Decay::Channel(_)) {
                heads.1 = heads.0;
            }
            cases.push(scan(ScanCase {
                update,
                decay,
                write: update == Update::Delta || turn.is_multiple_of(2),
                skip: turn.is_multiple_of(3),
                state: turn % 4 < 2,
                heads,
                dims: dims[turn % dims.len()],
                layout: layout.clone(),
                rows: *rows,
            }));
        }
    }
    // Heads as wide as published ones, whose tiles are larger.
    let wide =
        [(Decay::None, (128, 128)), (Decay::Head(Mild), (96, 192)), (Decay::Head(Wild), (64, 160))];
    for ((decay, dims), (layout, rows)) in wide.into_iter().zip(layouts.iter().cycle().skip(2)) {
        cases.push(scan(ScanCase {
            update: Update::Delta,
            decay,
            write: true,
            skip: false,
            state: true,
            heads: (2, 2),
            dims,
            layout: layout.clone(),
            rows: *rows,
        }));
    }
    for (n, (layout, rows)) in layouts.iter().enumerate() {
        for act in [None, Some(Activation::Silu)] {
            for norm in [false, true] {
                let turn = cases.len() + n;
                cases.push(conv(act, norm, [1, 2, 4, 5][turn % 4], turn, layout, *rows));
            }
        }
    }
    cases.push(columns());
    for (rows, heads) in [(1, 1), (113, 3), (65, 24)] {
        cases.push(time_step(rows, heads, (0.0, f32::INFINITY)));
        cases.push(time_step(rows, heads, (0.5, 1.5)));
    }
    for (rows, width) in [(1, 1), (113, 20), (65, 64), (7, 301)] {
        cases.extend([hgrn(rows, width, false), hgrn(rows, width, true)]);
    }
    for layer in 0..3 {
        cases.push(lower_bound(layer));
    }
    cases
}

/// Named segments with the number of rows they lie in; lengths below, at and above the sizes in
/// which kernels cut them.
fn layouts() -> Vec<((&'static str, Segments), usize)> {
    let alone = |q_start, q_len, k_start, k_len| Segment { q_start, q_len, k_start, k_len };
    let lists = [
        ("uniform", vec![alone(0, 33, 0, 33), alone(33, 33, 33, 33)], 66),
        ("one token", vec![alone(0, 1, 0, 1)], 1),
        ("long", vec![alone(0, 203, 0, 203)], 203),
        ("even", vec![alone(0, 128, 0, 128)], 128),
        (
            "packed",
            vec![alone(0, 5, 0, 5), alone(5, 0, 5, 0), alone(5, 1, 5, 1), alone(6, 81, 6, 81)],
            87,
        ),
        ("padded", vec![alone(3, 7, 3, 7), alone(10, 20, 10, 20), alone(49, 1, 49, 1)], 51),
        ("decode", vec![alone(0, 1, 0, 63), alone(1, 5, 100, 130), alone(8, 1, 230, 1)], 9),
    ];
    lists.into_iter().filter_map(|(n, s, rows)| Some(((n, Segments::new(s).ok()?), rows))).collect()
}

/// Logarithms of decays.
fn log_decays(rng: &mut Rng, strength: Strength, len: usize) -> Vec<f64> {
    let mut one = || match strength {
        Strength::Mild => -0.2 * rng.uniform(),
        Strength::Wild => match rng.between(0, 3) {
            0 => -60.0 * rng.uniform(),
            1 => -1e-6 * rng.uniform(),
            _ => -1.5 * rng.uniform(),
        },
    };
    (0..len).map(|_| round(one())).collect()
}

/// Rows of length at most 1, as keys are; one in ten is zero.
fn unit_rows(rng: &mut Rng, rows: usize, width: usize) -> Vec<f64> {
    let mut row = || {
        let x = rng.normals(width);
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if rng.chance(0.1) { 0.0 } else { 1.0 / norm };
        x.into_iter().map(move |x| round(x * scale))
    };
    (0..rows).flat_map(|_| row()).collect()
}

/// The case of a scan.
pub fn scan(options: ScanCase) -> Case {
    let ScanCase { update, decay, write, skip, state, heads, dims, layout, rows } = options;
    let (heads, key_heads) = heads;
    let (dk, dv) = dims;
    let spec = ScanSpec {
        heads,
        key_heads,
        key_dim: dk,
        value_dim: dv,
        scale: round(1.0 / (dk as f64).sqrt()) as f32,
        update,
        segments: layout.1.clone(),
    };
    let mark = |on: bool, word: &'static str| if on { word } else { "" };
    let name = format!(
        "scan/{update:?}+{decay:?}{}{}{}/{}/{rows}x{heads}:{key_heads}/d{dk}:{dv}",
        mark(write, "+write"),
        mark(skip, "+skip"),
        mark(state, "+state"),
        layout.0
    );
    let segments = spec.segments.len();
    let state_len = spec.state_len();
    let case = Case::new(name, move |tape, args| {
        let vars = ScanVars {
            q: args.var("q")?,
            k: args.var("k")?,
            v: args.var("v")?,
            log_decay: args.get("log_decay"),
            write: args.get("write"),
            skip: args.get("skip"),
        };
        let before = args.get("state").map(|state| state.value());
        let (o, state) = tape.scan(&vars, before, true, &spec)?;
        let last = state.map(|state| state.to_f64()).transpose()?.unwrap_or_default();
        Ok(vec![Output::Var("o", o), Output::Plain("last state", last)])
    });
    let mut rng = Rng::new(case.seed);
    let k = unit_rows(&mut rng, rows * key_heads, dk);
    let mut case = case
        .normal("q", &[rows, key_heads * dk])
        .real("k", &[rows, key_heads * dk], k)
        .normal("v", &[rows, heads * dv]);
    let width = match decay {
        Decay::None => None,
        Decay::Head(strength) => Some((heads, strength)),
        Decay::Channel(strength) => Some((heads * dk, strength)),
    };
    if let Some((width, strength)) = width {
        let data = log_decays(&mut rng, strength, rows * width);
        case = case.real("log_decay", &[rows, width], data);
    }
    if write {
        let data = (0..rows * heads).map(|_| round(rng.uniform())).collect();
        case = case.real("write", &[rows, heads], data);
    }
    if skip {
        case = case.normal("skip", &[heads]);
    }
    if state {
        let data = rng.normals(segments * state_len);
        case = case.constant("state", &[segments, state_len], data);
    }
    case
}

/// A scan drawn at random: kinds, sizes and lengths that nobody thought of.
pub fn random_scan(seed: u64) -> Result<Case> {
    let mut rng = Rng::new(seed);
    let update = rng.pick(&[Update::Add, Update::Delta]);
    let strength = rng.pick(&[Strength::Mild, Strength::Wild]);
    let decay = match rng.between(0, 2) {
        0 => Decay::None,
        1 if update == Update::Add => Decay::Channel(strength),
        _ => Decay::Head(strength),
    };
    let key_heads = rng.between(1, 3);
    let heads = match decay {
        Decay::Channel(_) => key_heads,
        _ => key_heads * rng.between(1, 5),
    };
    let mut ends = vec![0];
    for _ in 0..rng.between(1, 4) {
        ends.push(ends[ends.len() - 1] + rng.between(0, 150));
    }
    Ok(scan(ScanCase {
        update,
        decay,
        write: rng.chance(0.5),
        skip: rng.chance(0.3),
        state: rng.chance(0.5),
        heads: (heads, key_heads),
        dims: (rng.between(1, 40), rng.between(1, 40)),
        rows: ends[ends.len() - 1] + rng.between(0, 3),
        layout: ("random", Segments::packed(&ends)?),
    }))
}

fn conv(
    activation: Option<Activation>,
    norm: bool,
    taps: usize,
    turn: usize,
    layout: &(&'static str, Segments),
    rows: usize,
) -> Case {
    let (head, heads) = [(8, 5), (3, 7), (40, 2), (16, 4)][turn / 2 % 4];
    let (width, bias, before) = (head * heads, turn.is_multiple_of(2), !turn.is_multiple_of(3));
    let spec = ConvSpec {
        activation,
        l2_norm: norm.then_some(L2Norm { width: head, eps: 1e-6 }),
        segments: layout.1.clone(),
    };
    let segments = spec.segments.len();
    let mark = |on: bool, word: &'static str| if on { word } else { "" };
    let name = format!(
        "short_conv/{}{}{}{}/{}/{rows}x{width}/k{taps}",
        activation.map_or("plain".into(), |act| format!("{act:?}")),
        mark(norm, "+l2"),
        mark(bias, "+bias"),
        mark(before, "+before"),
        layout.0
    );
    let mut case = Case::new(name, move |tape, args| {
        let before = args.get("before").map(|before| before.value());
        let (x, w) = (args.var("x")?, args.var("weight")?);
        let y = tape.short_conv(x, w, args.get("bias"), before, &spec)?;
        Ok(vec![Output::Var("y", y)])
    })
    .normal("x", &[rows, width])
    .normal("weight", &[width, 1, taps]);
    if bias {
        case = case.normal("bias", &[width]);
    }
    if before {
        let rows = segments * (taps - 1);
        let data = Rng::new(case.seed).normals(rows * width);
        case = case.constant("before", &[rows, width], data);
    }
    case
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

fn time_step(rows: usize, heads: usize, limits: (f32, f32)) -> Case {
    let name = format!("time_step/{limits:?}/{rows}x{heads}");
    let case = Case::new(name, move |tape, args| {
        let (z, bias, a_log) = (args.var("z")?, args.var("bias")?, args.var("a_log")?);
        let (dt, decay) = tape.time_step(z, bias, a_log, limits)?;
        Ok(vec![Output::Var("dt", dt), Output::Var("log_decay", decay)])
    });
    case.normal("z", &[rows, heads]).normal("bias", &[heads]).normal("a_log", &[heads])
}

/// Gates near 0 and near 1 among others.
fn hgrn(rows: usize, width: usize, bounded: bool) -> Case {
    let mark = if bounded { "bounded" } else { "free" };
    let case = Case::new(format!("hgrn_gates/{mark}/{rows}x{width}"), |tape, args| {
        let (q, k, log_f) = tape.hgrn_gates(args.var("q")?, args.var("z")?, args.get("lower"))?;
        Ok(vec![Output::Var("q", q), Output::Var("k", k), Output::Var("log_f", log_f)])
    });
    let mut rng = Rng::new(case.seed);
    let spread = |rng: &mut Rng| if rng.chance(0.1) { 20.0 } else { 2.0 };
    let z = (0..rows * width).map(|_| round(spread(&mut rng) * rng.normal())).collect();
    let case = case.normal("q", &[rows, width]).real("z", &[rows, width], z);
    if !bounded {
        return case;
    }
    let lower = (0..width).map(|_| round(0.05 + 0.9 * rng.uniform())).collect();
    case.real("lower", &[width], lower)
}

fn lower_bound(layer: usize) -> Case {
    Case::new(format!("lower_bound/layer {layer}/3x20"), move |tape, args| {
        Ok(vec![Output::Var("y", tape.lower_bound(args.var("table")?, layer)?)])
    })
    .normal("table", &[3, 20])
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_layout_is_valid() {
        assert_eq!(super::layouts().len(), 7);
    }
}
