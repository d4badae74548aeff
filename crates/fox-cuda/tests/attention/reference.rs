//! Attention and its gradients in f64, one row at a time; optionally with the roundings of a naive bf16 implementation,
//! to calibrate tolerances: P, dP and dS are bf16 matrices, delta comes from the bf16 output, everything else is exact.

use fox_tensor::{AttentionSpec, Mask, Segment};
use half::bf16;

/// Operands in f32, exactly representable in bf16.
pub struct Operands {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_out: Vec<f32>,
    pub log_gates: Option<Vec<f32>>,
}

/// All results, in the layout of the GPU.
#[derive(Clone, Default)]
pub struct Results {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub dlog_gates: Vec<f64>,
}

fn rounded(x: f64, on: bool) -> f64 {
    if on { f64::from(bf16::from_f64(x).to_f32()) } else { x }
}

/// Results of one host thread for one head of one segment.
struct HeadGrads {
    dk: Vec<f64>,
    dv: Vec<f64>,
    dc: Vec<f64>,
    rows: Vec<(usize, Vec<f64>, f64, Vec<f64>)>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum()
}

fn axpy(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// Rows `rows` of one head of one segment.
fn head_rows(
    spec: &AttentionSpec,
    s: &Segment,
    rows: impl Iterator<Item = usize>,
    head: [&[f64]; 4],
    c: &[f64],
    naive: bool,
) -> HeadGrads {
    let [q, k, v, d_out] = head;
    let d = spec.head_dim;
    let scale = f64::from(spec.scale);
    let n = s.k_len;
    let mut grads =
        HeadGrads { dk: vec![0.0; n * d], dv: vec![0.0; n * d], dc: vec![0.0; n], rows: vec![] };
    let (mut p, mut dp) = (vec![0.0; n], vec![0.0; n]);
    for i in rows {
        let at = s.offset() + i;
        let (qi, doi) = (&q[i * d..][..d], &d_out[i * d..][..d]);
        let end = if spec.mask == Mask::Causal { at + 1 } else { n };
        let begin = spec.window.map_or(0, |w| (at + 1).saturating_sub(w));
        let end = spec.window.map_or(end, |w| end.min(at + w));
        let mut top = f64::NEG_INFINITY;
        for j in begin..end {
            p[j] = dot(qi, &k[j * d..][..d]) * scale - (c[at] - c[j]).abs();
            top = top.max(p[j]);
        }
        let mut sum = 0.0;
        for x in &mut p[begin..end] {
            *x = (*x - top).exp();
            sum += *x;
        }
        let mut o = vec![0.0; d];
        let mut delta = 0.0;
        for j in begin..end {
            p[j] /= sum;
            let pj = rounded(p[j], naive);
            axpy(&mut o, pj, &v[j * d..][..d]);
            dp[j] = rounded(dot(doi, &v[j * d..][..d]), naive);
            delta += p[j] * dp[j];
            axpy(&mut grads.dv[j * d..][..d], pj, doi);
        }
        if naive {
            delta = o.iter().zip(doi).map(|(&o, d)| rounded(o, true) * d).sum();
        }
        let mut dq = vec![0.0; d];
        for j in begin..end {
            let ds = rounded(p[j] * (dp[j] - delta), naive);
            axpy(&mut dq, ds * scale, &k[j * d..][..d]);
            axpy(&mut grads.dk[j * d..][..d], ds * scale, qi);
            let ds = if j <= at { ds } else { -ds };
            grads.dc[at] += ds;
            grads.dc[j] -= ds;
        }
        grads.rows.push((i, o, top + sum.ln(), dq));
    }
    grads
}

/// Columns of one head, rows `start..start + len`, as f64.
fn columns(x: &[f32], start: usize, len: usize, width: usize, head: usize, d: usize) -> Vec<f64> {
    (start..start + len)
        .flat_map(|r| x[r * width + head * d..][..d].iter().map(|&x| f64::from(x)))
        .collect()
}

/// Output and gradients; `naive` rounds like a bf16 implementation.
pub fn attention(spec: &AttentionSpec, x: &Operands, naive: bool) -> Results {
    let (h, hk, d) = (spec.heads, spec.kv_heads, spec.head_dim);
    let (wq, wk) = (h * d, hk * d);
    let (q_rows, k_rows) = (x.q.len() / wq, x.k.len() / wk);
    let mut out = Results {
        o: vec![0.0; q_rows * wq],
        lse: vec![f64::NEG_INFINITY; q_rows * h],
        dq: vec![0.0; q_rows * wq],
        dk: vec![0.0; k_rows * wk],
        dv: vec![0.0; k_rows * wk],
        dlog_gates: x.log_gates.as_ref().map_or(vec![], |g| vec![0.0; g.len()]),
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    for s in spec.segments.as_slice() {
        for head in 0..h {
            let kv = head / (h / hk);
            let q = columns(&x.q, s.q_start, s.q_len, wq, head, d);
            let d_out = columns(&x.d_out, s.q_start, s.q_len, wq, head, d);
            let k = columns(&x.k, s.k_start, s.k_len, wk, kv, d);
            let v = columns(&x.v, s.k_start, s.k_len, wk, kv, d);
            let mut c = vec![0.0; s.k_len];
            if let Some(g) = &x.log_gates {
                let mut sum = 0.0;
                for t in 0..s.k_len {
                    sum += f64::from(g[(s.k_start + t) * h + head]);
                    c[t] = sum;
                }
            }
            let threads = if s.q_len < 64 { 1 } else { threads };
            let parts: Vec<HeadGrads> = std::thread::scope(|scope| {
                let (q, k, v, d_out, c) = (&q, &k, &v, &d_out, &c);
                let handles: Vec<_> = (0..threads)
                    .map(|t| {
                        scope.spawn(move || {
                            let rows = (t..s.q_len).step_by(threads);
                            head_rows(spec, s, rows, [q, k, v, d_out], c, naive)
                        })
                    })
                    .collect();
                handles.into_iter().map(|h| h.join().unwrap()).collect()
            });
            let mut dc = vec![0.0; s.k_len];
            for grads in parts {
                axpy(&mut dc, 1.0, &grads.dc);
                for j in 0..s.k_len {
                    let at = (s.k_start + j) * wk + kv * d;
                    axpy(&mut out.dk[at..][..d], 1.0, &grads.dk[j * d..][..d]);
                    axpy(&mut out.dv[at..][..d], 1.0, &grads.dv[j * d..][..d]);
                }
                for (i, o, lse, dq) in grads.rows {
                    let row = s.q_start + i;
                    out.lse[row * h + head] = lse;
                    out.o[row * wq + head * d..][..d].copy_from_slice(&o);
                    out.dq[row * wq + head * d..][..d].copy_from_slice(&dq);
                }
            }
            if !out.dlog_gates.is_empty() {
                let mut sum = 0.0;
                for t in (0..s.k_len).rev() {
                    sum += dc[t];
                    out.dlog_gates[(s.k_start + t) * h + head] = sum;
                }
            }
        }
    }
    if naive {
        for x in [&mut out.o, &mut out.dq, &mut out.dk, &mut out.dv] {
            x.iter_mut().for_each(|x| *x = rounded(*x, true));
        }
    }
    out
}
