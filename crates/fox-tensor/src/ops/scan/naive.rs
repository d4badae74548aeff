//! The linear recurrence, token by token.

use crate::naive::{Matrix, Naive, axpy, dot, matrix, maybe_matrix, maybe_real};
use crate::{
    Result, ScanExtras, ScanGrads, ScanInputs, ScanOps, ScanOut, ScanSpec, Segment, StateUpdate,
    Tensor, check_scan_bwd, check_scan_fwd,
};

impl ScanOps for Naive {
    fn scan_fwd(
        &self,
        inputs: &ScanInputs<'_>,
        spec: &ScanSpec,
        keep: ScanExtras,
    ) -> Result<ScanOut> {
        check_scan_fwd(self, inputs, spec)?;
        let (o, state) = scan(inputs, spec)?.forward();
        let device = inputs.v.device();
        let shape = [spec.segments.len(), spec.state_len()];
        Ok(ScanOut {
            o: self.like(inputs.v, o),
            state: keep.state.then(|| self.tensor(device, state, shape)),
            saved: None,
        })
    }

    fn scan_bwd(
        &self,
        d_out: &Tensor,
        d_state: Option<&Tensor>,
        inputs: &ScanInputs<'_>,
        saved: Option<&Tensor>,
        spec: &ScanSpec,
    ) -> Result<ScanGrads> {
        check_scan_bwd(self, d_out, d_state, inputs, saved, spec)?;
        let grads = scan(inputs, spec)?.backward(matrix(d_out)?, maybe_matrix(d_state)?);
        Ok(ScanGrads {
            dq: self.like(inputs.q, grads.dq),
            dk: self.like(inputs.k, grads.dk),
            dv: self.like(inputs.v, grads.dv),
            dlog_decay: inputs.log_decay.map(|x| self.like(x, grads.dlog_decay)),
            dwrite: inputs.write.map(|x| self.like(x, grads.dwrite)),
            dskip: inputs.skip.map(|x| self.like(x, grads.dskip)),
            dstate: inputs.state.map(|x| self.like(x, grads.dstate)),
        })
    }
}

fn scan<'a>(inputs: &ScanInputs<'a>, spec: &'a ScanSpec) -> Result<Scan<'a>> {
    Ok(Scan {
        q: matrix(inputs.q)?,
        k: matrix(inputs.k)?,
        v: matrix(inputs.v)?,
        log_decay: maybe_matrix(inputs.log_decay)?,
        write: maybe_matrix(inputs.write)?,
        skip: maybe_real(inputs.skip)?,
        state: maybe_matrix(inputs.state)?,
        spec,
    })
}

/// Operands and options.
struct Scan<'a> {
    q: Matrix<'a>,
    k: Matrix<'a>,
    v: Matrix<'a>,
    log_decay: Option<Matrix<'a>>,
    write: Option<Matrix<'a>>,
    skip: Option<&'a [f64]>,
    state: Option<Matrix<'a>>,
    spec: &'a ScanSpec,
}

/// Gradients of [`Scan::forward`].
struct ScanBackward {
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dlog_decay: Vec<f64>,
    dwrite: Vec<f64>,
    dskip: Vec<f64>,
    dstate: Vec<f64>,
}

/// One token of one head.
struct Token<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    /// Decay of each row of the state.
    decay: Vec<f64>,
    write: f64,
    skip: f64,
}

/// What a token did to the state.
struct Step {
    /// `diag(a_t) S_{t-1}`, `[dk, dv]`.
    decayed: Vec<f64>,
    /// What was written, before its strength `[dv]`.
    e: Vec<f64>,
    /// `S_t`, `[dk, dv]`.
    state: Vec<f64>,
}

impl<'a> Scan<'a> {
    fn token(&self, row: usize, head: usize) -> Token<'a> {
        let (dk, dv, heads) = (self.spec.key_dim, self.spec.value_dim, self.spec.heads);
        let group = head / (heads / self.spec.key_heads);
        let decay = match self.log_decay {
            None => vec![1.0; dk],
            Some(log) if log.cols == heads => vec![log.row(row)[head].exp(); dk],
            Some(log) => log.head(row, head, dk).iter().map(|x| x.exp()).collect(),
        };
        Token {
            q: self.q.head(row, group, dk),
            k: self.k.head(row, group, dk),
            v: self.v.head(row, head, dv),
            decay,
            write: self.write.map_or(1.0, |write| write.row(row)[head]),
            skip: self.skip.map_or(0.0, |skip| skip[head]),
        }
    }

    /// The state of a head before a segment, or a gradient shaped as the states.
    fn state_of(&self, states: Option<Matrix<'_>>, segment: usize, head: usize) -> Vec<f64> {
        let len = self.spec.key_dim * self.spec.value_dim;
        match states {
            Some(state) => state.head(segment, head, len).to_vec(),
            None => vec![0.0; len],
        }
    }

    fn step(&self, state: &[f64], token: &Token<'_>) -> Step {
        let dv = self.spec.value_dim;
        let decayed: Vec<f64> =
            state.iter().enumerate().map(|(i, s)| token.decay[i / dv] * s).collect();
        let mut e = token.v.to_vec();
        if self.spec.update == StateUpdate::Delta {
            for (k, row) in token.k.iter().zip(decayed.chunks(dv)) {
                axpy(&mut e, -k, row);
            }
        }
        let mut next = decayed.clone();
        for (k, row) in token.k.iter().zip(next.chunks_mut(dv)) {
            axpy(row, k * token.write, &e);
        }
        Step { decayed, e, state: next }
    }

    /// Every head of every segment: index of the segment, head, segment.
    fn units(&self) -> impl Iterator<Item = (usize, usize, &'a Segment)> + use<'a> {
        let spec = self.spec;
        let segments = spec.segments.as_slice().iter().enumerate();
        segments.flat_map(move |(n, segment)| (0..spec.heads).map(move |head| (n, head, segment)))
    }

    /// `(o, state after each segment)`.
    fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let (dv, scale) = (self.spec.value_dim, f64::from(self.spec.scale));
        let (mut o, mut last) = (vec![0.0; self.v.data.len()], Vec::new());
        for (n, head, segment) in self.units() {
            let mut state = self.state_of(self.state, n, head);
            for row in segment.q_start..segment.q_start + segment.q_len {
                let token = self.token(row, head);
                state = self.step(&state, &token).state;
                let o = &mut o[row * self.v.cols + head * dv..][..dv];
                axpy(o, token.skip, token.v);
                for (q, row) in token.q.iter().zip(state.chunks(dv)) {
                    axpy(o, scale * q, row);
                }
            }
            last.extend(state);
        }
        (o, last)
    }

    fn backward(&self, d_out: Matrix<'_>, d_state: Option<Matrix<'_>>) -> ScanBackward {
        let zeros = |x: Option<Matrix<'_>>| vec![0.0; x.map_or(0, |x| x.data.len())];
        let mut grads = ScanBackward {
            dq: vec![0.0; self.q.data.len()],
            dk: vec![0.0; self.k.data.len()],
            dv: vec![0.0; self.v.data.len()],
            dlog_decay: zeros(self.log_decay),
            dwrite: zeros(self.write),
            dskip: vec![0.0; self.spec.heads],
            dstate: Vec::new(),
        };
        for (n, head, segment) in self.units() {
            let rows = segment.q_start..segment.q_start + segment.q_len;
            let mut states = vec![self.state_of(self.state, n, head)];
            for row in rows.clone() {
                let step = self.step(&states[states.len() - 1], &self.token(row, head));
                states.push(step.state);
            }
            let mut g = self.state_of(d_state, n, head);
            for row in rows.rev() {
                states.pop();
                self.step_back(row, head, &states[states.len() - 1], d_out, &mut g, &mut grads);
            }
            grads.dstate.extend(g);
        }
        grads
    }

    /// One token back: `g` is the gradient of `S_t` from later tokens and becomes that of
    /// `S_{t-1}`.
    fn step_back(
        &self,
        row: usize,
        head: usize,
        before: &[f64],
        d_out: Matrix<'_>,
        g: &mut [f64],
        grads: &mut ScanBackward,
    ) {
        let (dk, dv, heads) = (self.spec.key_dim, self.spec.value_dim, self.spec.heads);
        let (token, scale) = (self.token(row, head), f64::from(self.spec.scale));
        let (step, d_out) = (self.step(before, &token), d_out.head(row, head, dv));
        let key_at = row * self.k.cols + head / (heads / self.spec.key_heads) * dk;
        let value_at = row * self.v.cols + head * dv;
        // w = g^T k, the gradient of what was written.
        let mut w = vec![0.0; dv];
        for c in 0..dk {
            grads.dq[key_at + c] += scale * dot(&step.state[c * dv..][..dv], d_out);
            axpy(&mut g[c * dv..][..dv], scale * token.q[c], d_out);
            axpy(&mut w, token.k[c], &g[c * dv..][..dv]);
        }
        let de: Vec<f64> = w.iter().map(|w| token.write * w).collect();
        axpy(&mut grads.dv[value_at..][..dv], 1.0, &de);
        axpy(&mut grads.dv[value_at..][..dv], token.skip, d_out);
        grads.dskip[head] += dot(d_out, token.v);
        if !grads.dwrite.is_empty() {
            grads.dwrite[row * heads + head] += dot(&w, &step.e);
        }
        for c in 0..dk {
            let (g, decayed) = (&mut g[c * dv..][..dv], &step.decayed[c * dv..][..dv]);
            grads.dk[key_at + c] += token.write * dot(g, &step.e);
            if self.spec.update == StateUpdate::Delta {
                grads.dk[key_at + c] -= dot(decayed, &de);
                axpy(g, -token.k[c], &de);
            }
            if let Some(log) = self.log_decay {
                let at = if log.cols == heads { head } else { head * dk + c };
                grads.dlog_decay[row * log.cols + at] += dot(g, decayed);
            }
            g.iter_mut().for_each(|g| *g *= token.decay[c]);
        }
    }
}
