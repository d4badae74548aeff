"""Forgetting attention on NumPy arrays against the oracle in float64."""

import os

import numpy as np
import pytest

import foxlm
import oracle

CASES = {
    "plain": {},
    "one head, one token": {"b": 1, "m": 1, "n": 1, "h": 1, "hk": 1},
    "odd sizes": {"m": 113, "n": 113, "d": 24},
    "grouped heads": {"h": 6, "hk": 2},
    "fewer queries": {"m": 17, "n": 130},
    "one query": {"m": 1, "n": 130},
    "window": {"window": 20},
    "bidirectional": {"causal": False},
    "bidirectional window": {"causal": False, "window": 9},
    "left padding": {"starts": [3, 40]},
    "left padding beyond the queries": {"m": 30, "n": 100, "starts": [90, 0]},
    "no gates": {"gated": False},
    "head dim 1": {"d": 1},
    "head dim 13": {"d": 13},
    "head dim 256": {"d": 256, "n": 40, "m": 40},
    "values wider than keys": {"d": 16, "dv": 40},
    "values narrower than keys": {"d": 40, "dv": 5},
    "own scale": {"scale": 0.3},
    "everything": {"h": 4, "hk": 2, "m": 50, "n": 90, "d": 20, "dv": 12, "window": 33, "starts": [5, 60], "scale": 0.4},
}


def make(b=2, m=100, n=100, h=3, hk=3, d=16, dv=None, gated=True, seed=0, **_):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    gates = (-np.log1p(np.exp(-(2 * draw(b, n, h) + 1)))).astype(np.float32) if gated else None
    dv = d if dv is None else dv
    return draw(b, m, h, d), draw(b, n, hk, d), draw(b, n, hk, dv), gates, draw(b, m, h, dv)


def split(case):
    ours = {"causal": case.get("causal", True), "window": case.get("window"), "sm_scale": case.get("scale")}
    if "starts" in case:
        ours["seq_start"] = np.array(case["starts"])
    theirs = {key: case[key] for key in ("causal", "window", "scale", "starts") if key in case}
    if "m" in case and "n" not in case:
        case["n"] = case["m"]
    return ours, theirs


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    case = dict(CASES[name])
    ours, theirs = split(case)
    q, k, v, gates, d_out = make(**case)
    o, lse = foxlm.forgetting_attention(q, k, v, gates, return_lse=True, **ours)
    assert oracle.error(o, oracle.attention(q, k, v, gates, **theirs)) < 3e-6
    got = foxlm.forgetting_attention_backward(d_out, q, k, v, gates, o, lse, **ours)
    for name, x, y in zip(("dq", "dk", "dv", "dg"), got, oracle.gradients(d_out, q, k, v, gates, **theirs)):
        if y is None:
            assert x is None
        else:
            # Where a token sees only itself the gradients of q and k vanish, and errors are relative to nothing.
            assert oracle.error(x, y) < 1e-5 or np.abs(x - y).max() < 1e-6, name


@pytest.mark.parametrize("kind", ["transposed", "reversed", "sliced", "broadcast gates", "float16"])
def test_strided_arrays_are_not_copied(kind):
    q, k, v, gates, _ = make()
    want = foxlm.forgetting_attention(q, k, v, gates)
    if kind == "transposed":
        swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, gates)]
        o = foxlm.forgetting_attention(*swapped, head_first=True)
        np.testing.assert_array_equal(o.swapaxes(1, 2), want)
        np.testing.assert_array_equal(foxlm.forgetting_attention(*[x.swapaxes(1, 2) for x in swapped]), want)
    elif kind == "reversed":
        flipped = [np.ascontiguousarray(x[:, ::-1]) for x in (q, k, v, gates)]
        np.testing.assert_array_equal(foxlm.forgetting_attention(*[x[:, ::-1] for x in flipped]), want)
    elif kind == "sliced":
        wide = np.zeros((*q.shape[:3], 2 * q.shape[3]), np.float32)
        wide[..., ::2] = q
        np.testing.assert_array_equal(foxlm.forgetting_attention(wide[..., ::2], k, v, gates), want)
    elif kind == "broadcast gates":
        one = np.broadcast_to(gates[:1, :1, :1], gates.shape)
        full = np.ascontiguousarray(one)
        np.testing.assert_array_equal(
            foxlm.forgetting_attention(q, k, v, one), foxlm.forgetting_attention(q, k, v, full)
        )
    else:
        half = [x.astype(np.float16) for x in (q, k, v)]
        o = foxlm.forgetting_attention(*half, gates)
        assert o.dtype == np.float16
        exact = oracle.attention(*half, gates)
        assert oracle.error(o, exact) < 2 * oracle.error(exact.astype(np.float16), exact) + 1e-6


def test_packed_sequences_do_not_see_each_other():
    q, k, v, gates, d_out = make(b=1, m=120, n=120)
    ends = [0, 50, 51, 51, 120]
    o, lse = foxlm.forgetting_attention(q, k, v, gates, cu_seqlens=ends, return_lse=True)
    dq = foxlm.forgetting_attention_backward(d_out, q, k, v, gates, o, lse, cu_seqlens=ends)[0]
    cut = [x[:, :50] for x in (q, k, v, gates)]
    assert oracle.error(dq[:, :50], oracle.gradients(d_out[:, :50], *cut)[0]) < 1e-5
    for a, e in zip(ends, ends[1:]):
        if e > a:
            alone = foxlm.forgetting_attention(q[:, a:e], k[:, a:e], v[:, a:e], gates[:, a:e])
            np.testing.assert_array_equal(o[:, a:e], alone)
    fla = foxlm.parallel_forgetting_attn(q, k, v, gates, cu_seqlens=np.array(ends))
    np.testing.assert_array_equal(fla, o)


def test_pruning_error_is_within_its_bound():
    q, k, v, gates, _ = make(b=1, m=700, n=700, h=2, hk=2, d=8)
    full = foxlm.forgetting_attention(q, k, v, gates)
    auto = foxlm.forgetting_attention(q, k, v, gates, adaptive_threshold="auto")
    assert np.abs(auto - full).max() <= 2 * np.exp(-10) * np.abs(v).max()
    assert (auto == foxlm.forgetting_attention(q, k, v, gates, log_tolerance=-10.0)).all()
    # With a threshold near 0 a block of queries sees only the keys of the same block.
    own = foxlm.forgetting_attention(q, k, v, gates, adaptive_threshold=-1e-6)
    alone = foxlm.forgetting_attention(q[:, 64:128], k[:, 64:128], v[:, 64:128], gates[:, 64:128])
    np.testing.assert_allclose(own[:, 64:128], alone, atol=1e-5)
    # One threshold for each head: the second prunes nothing.
    mixed = foxlm.forgetting_attention(q, k, v, gates, adaptive_threshold=np.array([[-1e-6, -1e9]]))
    np.testing.assert_array_equal(mixed[:, :, 0], own[:, :, 0])
    np.testing.assert_array_equal(mixed[:, :, 1], full[:, :, 1])


def test_bits_do_not_depend_on_threads():
    q, k, v, gates, _ = make(b=1, m=300, n=300, h=2, hk=1)
    before = foxlm.threads()
    want = foxlm.forgetting_attention(q, k, v, gates)
    try:
        foxlm.set_threads(1)
        assert foxlm.threads() == 1
        np.testing.assert_array_equal(foxlm.forgetting_attention(q, k, v, gates), want)
    finally:
        foxlm.set_threads(before)
    with pytest.raises(ValueError, match="-1 threads; use 1 to 4096, or 0 for all cores"):
        foxlm.set_threads(-1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list threads")
def test_thread_pools_are_reused():
    before = foxlm.threads()
    try:
        for count in (2, 3):
            foxlm.set_threads(count)
        running = len(os.listdir("/proc/self/task"))
        for _ in range(10):
            for count in (2, 3):
                foxlm.set_threads(count)
        assert len(os.listdir("/proc/self/task")) == running
    finally:
        foxlm.set_threads(before)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"q": np.zeros((2, 10, 3))}, r"q has shape [2, 10, 3]; it must be [batch, time, heads, dim]"),
        ({"q": np.zeros((2, 200, 3, 16), np.float32)}, "200 queries, but only 100 keys"),
        ({"q": np.zeros((2, 100, 4, 16), np.float32)}, "4 query heads do not share 3 key heads"),
        ({"q": np.zeros((2, 100, 3, 16))}, "q is float64; use float32, bfloat16 or float16"),
        ({"log_fgate": np.zeros((2, 3, 100), np.float32)}, "log_fgate has shape [2, 3, 100], expected [2, 100, 3]"),
        ({"window": 0}, "a window of 0 keys; use 1 or more"),
        ({"seq_start": [1]}, "seq_start has shape [1], expected [2]"),
        ({"seq_start": [1, 101]}, "seq_start is [1, 101]; each must be from 0 to 100"),
        ({"cu_seqlens": [0, 100]}, "cu_seqlens with batch 2"),
        ({"adaptive_threshold": "best"}, 'adaptive_threshold is "best"'),
        (
            {"adaptive_threshold": np.zeros((3, 2))},
            "adaptive_threshold has shape [3, 2]; it must be a number or an array",
        ),
        ({"seq_start": [1.5, 2.0]}, "seq_start is [1.5, 2.0]; it must hold integers"),
        ({"k": None}, "k has shape []; it must be [batch, time, heads, dim]"),
        ({"log_tolerance": 1.0}, "log_tolerance is 1.0, but must be at most 0"),
    ],
)
def test_errors_name_the_argument(change, sentence):
    q, k, v, gates, _ = make()
    arguments = {"q": q, "k": k, "v": v, "log_fgate": gates} | change
    with pytest.raises(ValueError) as complaint:
        foxlm.forgetting_attention(**arguments)
    assert sentence in str(complaint.value)
