//! Cases of scans with every kind of decay and update.

use crate::cases::{Case, Output, Rng, recurrent_layouts, round};
use crate::{Result, ScanSpec, ScanVars, Segments, StateUpdate};

/// Decay of the state per token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// None: the operand is absent.
    None,
    /// One factor per head.
    Head(Strength),
    /// One factor for every row of the state.
    Channel(Strength),
}

/// Strength of a decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strength {
    /// Factors around 0.9.
    Mild,
    /// Factors from `e^-60` to `1 - 1e-6`, side by side.
    Wild,
}

/// Description of a scan case.
#[derive(Clone, Debug)]
pub struct ScanCase {
    /// Update rule of the state.
    pub update: StateUpdate,
    /// Decay of the state.
    pub decay: Decay,
    /// Whether there is the operand `write`.
    pub write: bool,
    /// Whether there is the operand `skip`.
    pub skip: bool,
    /// Whether there is an initial state.
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

pub(crate) fn cases() -> Vec<Case> {
    use Strength::{Mild, Wild};
    let layouts = recurrent_layouts();
    let heads = [(1, 1), (2, 2), (3, 1), (6, 2), (5, 1)];
    let dims = [(8, 8), (16, 24), (5, 3), (32, 17), (1, 4), (40, 64)];
    let mut cases = Vec::new();
    let kinds = [
        (StateUpdate::Add, Decay::None),
        (StateUpdate::Add, Decay::Head(Mild)),
        (StateUpdate::Add, Decay::Head(Wild)),
        (StateUpdate::Add, Decay::Channel(Mild)),
        (StateUpdate::Add, Decay::Channel(Wild)),
        (StateUpdate::Delta, Decay::None),
        (StateUpdate::Delta, Decay::Head(Mild)),
        (StateUpdate::Delta, Decay::Head(Wild)),
        (StateUpdate::Delta, Decay::Channel(Mild)),
        (StateUpdate::Delta, Decay::Channel(Wild)),
    ];
    for (update, decay) in kinds {
        for (n, (layout, rows)) in layouts.iter().enumerate() {
            // Cycles through options and sizes so that they mix.
            let turn = cases.len() + n;
            let mut heads = heads[turn % heads.len()];
            if matches!(decay, Decay::Channel(_)) && update == StateUpdate::Add {
                heads.1 = heads.0;
            }
            cases.push(scan(ScanCase {
                update,
                decay,
                write: update == StateUpdate::Delta || turn.is_multiple_of(2),
                skip: turn.is_multiple_of(3),
                state: turn % 4 < 2,
                heads,
                dims: dims[turn % dims.len()],
                layout: layout.clone(),
                rows: *rows,
            }));
        }
    }
    // As many heads and chunks as training has: a device need not split the heads that share keys.
    let many = Segments::uniform(270, 9);
    cases.push(scan(ScanCase {
        update: StateUpdate::Add,
        decay: Decay::Head(Mild),
        write: true,
        skip: true,
        state: false,
        heads: (24, 1),
        dims: (8, 8),
        layout: ("many", many),
        rows: 270 * 9,
    }));
    // Heads as wide as published ones, whose tiles are larger.
    let wide =
        [(Decay::None, (128, 128)), (Decay::Head(Mild), (96, 192)), (Decay::Head(Wild), (64, 160))];
    for ((decay, dims), (layout, rows)) in wide.into_iter().zip(layouts.iter().cycle().skip(2)) {
        cases.push(scan(ScanCase {
            update: StateUpdate::Delta,
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
    cases
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
        let before = args.get("state");
        let (o, last) = tape.scan(&vars, before, true, &spec)?;
        // Without a first state the last one has no gradient: that is another backward pass.
        let last = match last {
            Some(last) if before.is_some() => Some(Output::Var("last state", last)),
            Some(last) => Some(Output::Plain("last state", last.value().to_f64()?)),
            None => None,
        };
        Ok([Output::Var("o", o)].into_iter().chain(last).collect())
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
        case = case.real("state", &[segments, state_len], data);
    }
    case
}

/// A scan of random options, sizes and lengths, for property tests.
pub fn random_scan(seed: u64) -> Result<Case> {
    let mut rng = Rng::new(seed);
    let update = rng.pick(&[StateUpdate::Add, StateUpdate::Delta]);
    let strength = rng.pick(&[Strength::Mild, Strength::Wild]);
    let decay = match rng.between(0, 2) {
        0 => Decay::None,
        1 => Decay::Channel(strength),
        _ => Decay::Head(strength),
    };
    let key_heads = rng.between(1, 3);
    let heads = match (update, decay) {
        (StateUpdate::Add, Decay::Channel(_)) => key_heads,
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
