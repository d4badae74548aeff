//! Bad operands get a sentence that names the op and the shapes, never a panic.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::{
    Acp, Activation, AttentionSpec, DType, Device, Gradients, HeadSpec, LogitBound, Result, Rope,
    Segment, Segments, Tape, Tensor, Var,
};

fn zeros(device: &Device, dims: &[usize]) -> Tensor {
    device.zeros(dims, DType::F32).unwrap()
}

fn var(device: &Device, dims: &[usize]) -> Var {
    Var::constant(zeros(device, dims))
}

/// The error's sentence holds every one of the words.
fn says<T>(result: Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("no error; expected one that says {words:?}") };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
}

#[test]
fn shapes() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let of = |dims: &[usize]| var(&device, dims);
    says(tape.linear(&of(&[2, 3]), &of(&[5, 4]), None), &["linear", "weight", "[5, 4]", "[5, 3]"]);
    says(tape.linear(&of(&[6]), &of(&[5, 4]), None), &["linear", "x", "[6]", "two dimensions"]);
    says(
        tape.linear(&of(&[2, 3]), &of(&[5, 3]), Some(&of(&[4]))),
        &["linear", "bias", "[4]", "[5]"],
    );
    says(
        tape.add_rms_norm(&of(&[2, 3]), Some(&of(&[3, 2])), &of(&[3]), 1e-6),
        &["add_rms_norm", "delta", "[3, 2]", "[2, 3]"],
    );
    says(
        tape.add_rms_norm(&of(&[2, 3]), None, &of(&[2]), 1e-6),
        &["add_rms_norm", "weight", "[2]", "[3]"],
    );
    says(
        tape.gated_norm(&of(&[2, 6]), None, None, 4, 1e-6, Activation::Silu),
        &["gated_norm", "4 groups", "width 6"],
    );
    says(
        tape.gated_norm(&of(&[2, 6]), None, None, 0, 1e-6, Activation::Silu),
        &["gated_norm", "0 groups"],
    );
    says(
        tape.gated_norm(&of(&[2, 6]), None, Some(&of(&[2, 5])), 1, 1e-6, Activation::Silu),
        &["gated_norm", "gate", "[2, 5]", "[2, 6]"],
    );
    says(tape.glu(&of(&[2, 5]), Activation::Silu), &["glu", "width 5", "odd"]);
    says(tape.log_gate(None, None, 3), &["log_gate", "neither"]);
    says(tape.log_gate(Some(&of(&[2, 3])), None, 4), &["log_gate", "z", "[2, 3]", "[4, 3]"]);
    says(
        tape.log_gate(Some(&of(&[4, 3])), Some(&of(&[2])), 4),
        &["log_gate", "bias", "[2]", "[3]"],
    );
    says(device.from_f32(&[0.0; 5], [2, 3]), &["from_f32", "5", "6 elements", "[2, 3]"]);
    says(zeros(&device, &[2, 3]).reshape([7]), &["reshape", "[2, 3]", "[7]"]);
    says(zeros(&device, &[2, 3]).slice_rows(1, 2), &["slice_rows", "[2, 3]"]);
    says(zeros(&device, &[2, 3]).slice_rows(usize::MAX, 2), &["slice_rows", "[2, 3]"]);
    says(zeros(&device, &[]).slice_rows(0, 1), &["slice_rows", "[]"]);
}

#[test]
fn heads_and_attention() {
    let device = Device::naive();
    let tape = &mut Tape::inference(&device);
    let of = |dims: &[usize]| var(&device, dims);
    let heads = HeadSpec {
        heads: 2,
        head_dim: 8,
        norm_eps: 1e-5,
        rope: None,
        segments: Segments::uniform(1, 4),
    };
    let mut prepare = |u: &Var, shift: Option<&Var>, norm: Option<&Var>, spec: &HeadSpec| {
        tape.prepare_heads(u, shift, None, norm, spec)
    };
    let u = of(&[4, 16]);
    says(prepare(&of(&[4, 15]), None, None, &heads), &["prepare_heads", "u", "[4, 15]"]);
    says(prepare(&u, Some(&of(&[4, 3])), None, &heads), &["prepare_heads", "shift", "[4, 2]"]);
    says(prepare(&u, None, Some(&of(&[9])), &heads), &["prepare_heads", "norm", "[9]", "[16]"]);
    let long = HeadSpec { segments: Segments::uniform(1, 5), ..heads.clone() };
    says(prepare(&u, None, None, &long), &["prepare_heads", "reaches beyond", "4 query rows"]);
    let odd = HeadSpec { heads: 1, head_dim: 5, rope: Some(Rope::new(1e4)), ..heads };
    says(prepare(&of(&[4, 5]), None, None, &odd), &["prepare_heads", "RoPE", "5"]);

    let spec = AttentionSpec::causal(2, 8, Segments::uniform(1, 4));
    let mut attend = |q: &[usize], k: &[usize], gates: &[usize], spec: AttentionSpec| {
        let (q, k, v, gates) = (of(q), of(k), of(k), of(gates));
        tape.attention(&q, &k, &v, Some(&gates), &spec)
    };
    let (x, g) = ([4, 16], [4, 2]);
    assert!(attend(&x, &x, &g, spec.clone()).is_ok());
    says(attend(&[4, 8], &x, &g, spec.clone()), &["attention", "q", "[4, 8]", "[4, 16]"]);
    says(attend(&x, &[4, 8], &g, spec.clone()), &["attention", "k", "[4, 8]", "[4, 16]"]);
    says(attend(&x, &x, &[4, 1], spec.clone()), &["attention", "log_gates", "[4, 1]"]);
    says(attend(&[3, 16], &x, &g, spec.clone()), &["attention", "3 query rows"]);
    says(attend(&x, &[3, 16], &[3, 2], spec.clone()), &["attention", "3 key rows"]);
    let head_dim = AttentionSpec { head_dim: 12, ..spec.clone() };
    says(attend(&x, &x, &g, head_dim), &["attention", "head dim 12"]);
    let kv = AttentionSpec { kv_heads: 3, ..spec.clone() };
    says(attend(&x, &x, &g, kv), &["attention", "2 query heads", "3 key heads"]);
    let window = AttentionSpec { window: Some(0), ..spec.clone() };
    says(attend(&x, &x, &g, window), &["attention", "window of 0"]);
    for log_tolerance in [0.5, f32::NAN] {
        let acp = Acp::On { log_tolerance, bound: LogitBound::Norms };
        let spec = AttentionSpec { acp, ..spec.clone() };
        says(attend(&x, &x, &g, spec), &["attention", "log_tolerance"]);
    }
    let (q, k) = (zeros(&device, &[16]), zeros(&device, &[7]));
    let acp = Acp::On { log_tolerance: -1.0, bound: LogitBound::QkNorm { q, k } };
    says(attend(&x, &x, &g, AttentionSpec { acp, ..spec }), &["attention", "k_norm", "[7]"]);
}

#[test]
fn ids() {
    let device = Device::naive();
    let tape = &mut Tape::recording(&device);
    let (table, x) = (var(&device, &[10, 4]), var(&device, &[3, 4]));
    let weights = zeros(&device, &[3]);
    for bad in [10, -1, -100, i32::MIN, i32::MAX] {
        let ids = device.from_i32(&[0, bad, 1], [3]).unwrap();
        says(tape.embedding(&table, &ids, None), &["embedding", &bad.to_string(), "10 entries"]);
        let loss = tape.linear_cross_entropy(&x, &table, &ids, &weights);
        if bad == -100 {
            assert!(loss.is_ok());
        } else {
            says(loss, &["linear_cross_entropy", &bad.to_string(), "10 entries"]);
        }
    }
    says(tape.embedding(&table, &weights, None), &["embedding", "ids", "f32", "i32"]);
    let ids = device.from_i32(&[0, 1], [2]).unwrap();
    says(
        tape.linear_cross_entropy(&x, &table, &ids, &weights),
        &["linear_cross_entropy", "labels", "[2]", "[3]"],
    );
    says(ids.to_f32(), &["to_f32", "i32", "f32"]);
    says(weights.to_i32(), &["to_i32", "f32", "i32"]);
    let integers = Var::constant(device.zeros([2, 2], DType::I32).unwrap());
    says(tape.linear(&integers, &integers, None), &["linear", "x", "i32", "f32"]);
}

#[test]
fn devices() {
    let (here, there) = (Device::naive(), Device::naive());
    assert!(here.same(&here.clone()) && !here.same(&there));
    let tape = &mut Tape::recording(&here);
    let (near, far) = (var(&here, &[4, 8]), var(&there, &[4, 8]));
    says(tape.linear(&near, &far, None), &["linear", "weight", "is on"]);
    says(tape.glu(&far, Activation::Silu), &["glu", "x", "is on"]);
    let ids = there.from_i32(&[0], [1]).unwrap();
    says(tape.embedding(&near, &ids, None), &["embedding", "ids", "is on"]);
    // Weights that all heads share take a separate path.
    let segments = Segments::uniform(1, 4);
    let spec =
        HeadSpec { heads: 1, head_dim: 8, norm_eps: 0.0, rope: None, segments: segments.clone() };
    let shared = var(&there, &[8]);
    says(
        tape.prepare_heads(&near, None, None, Some(&shared), &spec),
        &["prepare_heads", "norm", "is on"],
    );
    let bound = LogitBound::QkNorm { q: zeros(&there, &[8]), k: zeros(&here, &[8]) };
    let acp = Acp::On { log_tolerance: -1.0, bound };
    let spec = AttentionSpec { acp, ..AttentionSpec::causal(1, 8, segments) };
    says(tape.attention(&near, &near, &near, None, &spec), &["attention", "q_norm", "is on"]);
}

#[test]
fn seeds() {
    let (device, there) = (Device::naive(), Device::naive());
    let run = |seed: Tensor| {
        let mut tape = Tape::recording(&device);
        let x = tape.leaf(zeros(&device, &[3, 4]));
        let y = tape.glu(&x, Activation::Silu).unwrap();
        tape.backward_from(&[(y, seed)], &[x], &mut Gradients::default())
    };
    assert!(run(zeros(&device, &[3, 2])).is_ok());
    says(run(zeros(&device, &[2, 3])), &["backward", "seed", "[2, 3]", "[3, 2]"]);
    says(run(zeros(&there, &[3, 2])), &["backward", "seed", "is on"]);
}

#[test]
fn segments() {
    let of = |list: &[[usize; 4]]| {
        let segment = |&[q_start, q_len, k_start, k_len]: &[usize; 4]| Segment {
            q_start,
            q_len,
            k_start,
            k_len,
        };
        Segments::new(list.iter().map(segment).collect())
    };
    assert!(of(&[]).unwrap().is_empty());
    assert!(of(&[[0, 3, 0, 3], [3, 0, 3, 0], [3, 1, 3, 9]]).is_ok());
    says(of(&[[0, 3, 0, 3], [2, 1, 3, 1]]), &["segment 1", "overlaps"]);
    says(of(&[[0, 3, 0, 3], [3, 1, 2, 1]]), &["segment 1", "overlaps"]);
    says(of(&[[0, 3, 0, 2]]), &["segment 0", "fewer keys"]);
    says(of(&[[usize::MAX, 2, 0, 3]]), &["segment 0", "too long"]);
    says(of(&[[0, 2, 5, usize::MAX]]), &["segment 0", "too long"]);
    says(Segments::packed(&[]), &["cu_seqlens"]);
    says(Segments::packed(&[1, 2]), &["cu_seqlens", "[1, 2]"]);
    says(Segments::packed(&[0, 5, 4]), &["cu_seqlens", "[0, 5, 4]"]);
    says(Segments::left_padded(4, &[1, 5]), &["5 pads", "4 rows"]);
    let padded = Segments::left_padded(4, &[1, 4]).unwrap();
    let want = of(&[[1, 3, 1, 3], [8, 0, 8, 0]]).unwrap();
    assert_eq!(padded, want);
    assert_eq!(Segments::uniform(2, 3), of(&[[0, 3, 0, 3], [3, 3, 3, 3]]).unwrap());
    assert_eq!(Segments::packed(&[0, 2, 2, 3]).unwrap().len(), 3);
    assert_eq!(of(&[[0, 1, 0, 9]]).unwrap().as_slice()[0].offset(), 8);
}
