"""Forgetting attention on PyTorch tensors: values and gradients against a naive version in float64, and the ways in
which PyTorch calls an op."""

import os
import subprocess
import sys

import pytest
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402

CASES = {
    "plain": {},
    "grouped heads": {"h": 6, "hk": 2},
    "fewer queries": {"m": 17, "n": 130},
    "one query": {"m": 1, "n": 130},
    "window": {"window": 20},
    "bidirectional": {"causal": False},
    "left padding": {"starts": [3, 40]},
    "packed": {"b": 1, "ends": [0, 30, 31, 100]},
    "no gates": {"gated": False},
    "head dim 13": {"d": 13},
    "head dim 128": {"d": 128},
    "other values": {"d": 16, "dv": 40},
    "own scale": {"scale": 0.3},
    "pruned": {"n": 300, "m": 300, "log_tolerance": -20.0},
    "threshold": {"n": 300, "m": 300, "threshold": -40.0},
    "everything": {
        "h": 4,
        "hk": 2,
        "m": 50,
        "n": 90,
        "d": 20,
        "window": 33,
        "starts": [5, 60],
        "scale": 0.4,
        "log_tolerance": -20.0,
    },
    "everything, bidirectional": {
        "h": 4,
        "hk": 2,
        "b": 1,
        "d": 36,
        "causal": False,
        "window": 33,
        "ends": [0, 40, 100],
        "log_tolerance": -20.0,
    },
}


def make(
    b=2, m=100, n=100, h=3, hk=3, d=16, dv=None, gated=True, dtype=torch.float32, head_first=False, device="cpu", **_
):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    gates = torch.nn.functional.logsigmoid(2 * draw(b, n, h) + 1) if gated else None
    x = [draw(b, m, h, d), draw(b, n, hk, d), draw(b, n, hk, dv or d)]
    x = [a.to(dtype) for a in x] + [gates]
    x = [None if a is None else a.to(device) for a in x]
    if head_first:
        x = [None if a is None else a.transpose(1, 2).contiguous() for a in x]
    return [None if a is None else a.requires_grad_() for a in x]


def naive(q, k, v, gates, scale=None, causal=True, window=None, starts=None, ends=None, dtype=torch.float64, **_):
    """The definition, with a matrix of scores, in any precision."""
    (m, h, d), n = q.shape[1:], k.shape[1]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * (d**-0.5 if scale is None else scale)
    j = torch.arange(n, device=q.device)[None]
    i = j[0, n - m :, None]
    if gates is not None:
        c = gates.to(torch.float64).cumsum(1).transpose(1, 2)
        decay = c[:, :, n - m :, None] - c[:, :, None]
        s = s + (decay if causal else -decay.abs()).to(s.dtype)
    seen = (j <= i) if causal else torch.ones_like(j <= i)
    if window is not None:
        seen = seen & ((i - j).abs() < window)
    seen = seen[None]
    if starts is not None:
        start = torch.tensor(starts, device=q.device)[:, None, None]
        seen = seen & (j[None] >= start) & (i[None] >= start)
    if ends is not None:
        document = torch.bucketize(j[0], torch.tensor(ends[1:], device=q.device), right=True)
        seen = seen & (document[n - m :, None] == document[None])
    p = torch.softmax(s.masked_fill(~seen[:, None], torch.finfo(s.dtype).min / 2), -1) * seen[:, None]
    return (p.to(dtype) @ v).transpose(1, 2)


def ours(
    q,
    k,
    v,
    gates,
    scale=None,
    causal=True,
    window=None,
    starts=None,
    ends=None,
    log_tolerance=None,
    threshold=None,
    head_first=False,
    **_,
):
    return foxlm.forgetting_attention(
        q, k, v, gates, sm_scale=scale, causal=causal, window=window, log_tolerance=log_tolerance,
        seq_start=None if starts is None else torch.tensor(starts, device=q.device),
        cu_seqlens=None if ends is None else torch.tensor(ends, device=q.device),
        adaptive_threshold=threshold, head_first=head_first,
    )  # fmt: skip


def run(f, x, case, d_out):
    o = f(*x, **case)
    wanted = [a for a in x if a is not None]
    return [o.detach(), *torch.autograd.grad(o, wanted, d_out.to(o.dtype))]


def errors(got, want):
    """By norm and by largest element, relative."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape and got.isfinite().all()
    return ((got - want).norm() / want.norm()).item(), ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_float32(name):
    case = CASES[name]
    x = make(**case)
    d_out = torch.randn(x[0].shape[0], x[0].shape[1], x[0].shape[2], x[2].shape[3])
    for what, a, b in zip(("o", "dq", "dk", "dv", "dg"), run(ours, x, case, d_out), run(naive, x, case, d_out)):
        assert max(errors(a, b)) < 1e-5, what
        assert a.dtype == torch.float32, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "grouped heads", "everything", "everything, bidirectional"])
def test_half_precision_error_matches_naive(name, dtype):
    case = CASES[name]
    x = make(**case, dtype=dtype)
    d_out = torch.randn(*x[0].shape[:3], x[2].shape[3]).to(dtype)
    got, want = run(ours, x, case, d_out), run(naive, x, case, d_out)
    rough = run(lambda *a, **c: naive(*a, dtype=dtype, **c), x, case, d_out)
    for what, a, b, c in zip(("o", "dq", "dk", "dv", "dg"), got, want, rough):
        for error, allowed in zip(errors(a, b), errors(c, b)):
            assert error <= 2 * allowed, (what, error, allowed)
    assert [a.dtype for a in got] == [dtype] * 4 + [torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_first_and_views_give_the_same_bits(dtype):
    x = make(dtype=dtype)
    d_out = torch.randn(x[0].shape).to(dtype)
    want = run(ours, x, {}, d_out)
    leaves = make(dtype=dtype, head_first=True)
    got = run(ours, leaves, {"head_first": True}, d_out.transpose(1, 2))
    for a, b in zip(got, want):
        assert torch.equal(a.transpose(1, 2), b)
    # The output lies in memory as the queries do.
    assert got[0].is_contiguous() and want[0].is_contiguous()
    # One projection for q, k and v, cut into views.
    together = torch.cat([a.detach() for a in x[:3]], -1).requires_grad_()
    o = foxlm.forgetting_attention(*together.split(16, -1), x[3])
    assert torch.equal(o, want[0])
    (d_together,) = torch.autograd.grad(o, together, d_out.flip(1).flip(1))
    assert torch.equal(d_together, torch.cat(want[1:4], -1))


def test_expanded_gradients_and_unused_outputs():
    x = make()
    o, lse = foxlm.forgetting_attention(*x, return_lse=True)
    assert not lse.requires_grad and o.requires_grad
    got = torch.autograd.grad(o.sum(), x)
    want = torch.autograd.grad(naive(*x).sum(), x)
    assert max(max(errors(a, b)) for a, b in zip(got, want)) < 1e-5
    s = torch.einsum("bihd,bjhd->bhij", x[0], x[1]) / 4
    c = x[3].cumsum(1).transpose(1, 2)
    s = (s + c[..., None] - c[:, :, None]).masked_fill(torch.ones(100, 100).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse, s.logsumexp(-1).transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["plain", "everything", "packed", "no gates", "threshold"])
def test_opcheck(name):
    case = CASES[name]
    x = make(**case)
    tensor = lambda key: None if key not in case else torch.tensor(case[key])
    bounds = torch.full((1, 2, 3), 10.0) if name == "threshold" else None
    arguments = (
        *x,
        bounds,
        tensor("starts"),
        tensor("ends"),
        0.25,
        True,
        case.get("window"),
        case.get("log_tolerance"),
    )
    torch.library.opcheck(torch.ops.foxlm.attention, arguments)
    o, lse = torch.ops.foxlm.attention(*arguments)
    q, k, v, gates = (None if a is None else a.detach() for a in x)
    backward = (torch.randn_like(o), q, k, v, o.detach(), lse, gates, *arguments[4:])
    torch.library.opcheck(torch.ops.foxlm.attention_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_gradients_agree_with_finite_differences():
    x = [a.detach() for a in make(b=1, m=20, n=20, h=2, hk=1, d=8)]
    w = torch.randn(1, 20, 2, 8)
    loss = lambda *a: (foxlm.forgetting_attention(*a) * w).sum()
    leaves = [a.clone().requires_grad_() for a in x]
    for n, gradient in enumerate(torch.autograd.grad(loss(*leaves), leaves)):
        direction = gradient / gradient.norm()
        step = 1e-2
        ahead, behind = ([a + s * step * direction if m == n else a for m, a in enumerate(x)] for s in (1, -1))
        slope = (naive(*ahead).mul(w).sum() - naive(*behind).mul(w).sum()) / (2 * step)
        assert abs(slope - gradient.norm()) < 2e-3 * gradient.norm()


def test_compile_in_one_graph():
    def f(q, k, v, g):
        o = foxlm.forgetting_attention(q * 2, k, v, g, head_first=True, adaptive_threshold="auto")
        return o.sin().sum()

    x = make(head_first=True)
    want = [f(*x), *torch.autograd.grad(f(*x), x)]
    fast = torch.compile(f, fullgraph=True, backend="aot_eager")
    loss = fast(*x)
    for a, b in zip([loss, *torch.autograd.grad(loss, x)], want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compile_for_all_lengths_and_numbers():
    def f(q, k, v, g, threshold, window):
        return foxlm.forgetting_attention(q, k, v, g, adaptive_threshold=threshold, window=window)

    fast = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, threshold, window in ((100, -5.0, 7), (70, -6.0, 9)):
        x = [a.detach() for a in make(m=n, n=n)]
        torch.testing.assert_close(fast(*x, threshold, window), f(*x, threshold, window), atol=1e-5, rtol=1e-5)


def test_second_derivatives_are_refused():
    x = make()
    (dq,) = torch.autograd.grad(foxlm.forgetting_attention(*x).square().sum(), x[0], create_graph=True)
    assert max(errors(dq, torch.autograd.grad(naive(*x).square().sum(), x[0])[0])) < 1e-5
    with pytest.raises(NotImplementedError, match="there are no second derivatives"):
        torch.autograd.grad(dq.square().sum(), x[1])
    q, *rest = (a.detach() for a in x)
    with pytest.raises(NotImplementedError, match="foxlm::attention has no forward-mode gradients"):
        torch.func.jvp(lambda q: foxlm.forgetting_attention(q, *rest), (q,), (q,))


def test_meta_tensors_give_shapes():
    x = [a.detach().to("meta").requires_grad_() for a in make(dv=20)]
    o = foxlm.forgetting_attention(*x)
    assert o.is_meta and o.shape == (2, 100, 3, 20)
    assert torch.autograd.grad(o.sum(), x)[2].shape == x[2].shape


def test_autocast_casts_all_but_the_gates():
    x = make()
    with torch.autocast("cpu", torch.bfloat16):
        o = foxlm.forgetting_attention(*x)
    assert o.dtype == torch.bfloat16
    low = [a.detach().bfloat16() for a in x[:3]]
    assert torch.equal(o, foxlm.forgetting_attention(*low, x[3]))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.float().sum(), x))


FORKED = """
import torch, foxlm
torch.manual_seed(0)
x = [torch.randn(2, 200, 3, 16) for _ in range(3)]
g = torch.nn.functional.logsigmoid(torch.randn(2, 200, 3))
want = foxlm.forgetting_attention(*x, g)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, n):
        return foxlm.forgetting_attention(*x, g)

loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
for batch in loader:
    assert torch.equal(batch[0], want), "another value in a worker"
    assert torch.equal(foxlm.forgetting_attention(*x, g), want), "another value beside a worker"
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_data_loader_workers_that_fork():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr


def test_errors_are_python_exceptions():
    q, k, v, g = make()
    with pytest.raises(ValueError, match="200 queries, but only 100 keys"):
        foxlm.forgetting_attention(torch.zeros(2, 200, 3, 16), k, v, g)
    with pytest.raises(ValueError, match="k is float64; use float32, bfloat16 or float16"):
        foxlm.forgetting_attention(q, k.double(), v, g)
    with pytest.raises(ValueError, match="v is a ndarray; it must be a tensor of PyTorch"):
        foxlm.forgetting_attention(q, k, v.detach().numpy(), g)
    with pytest.raises(ValueError, match="seq_start is a list; it must be a tensor of PyTorch"):
        foxlm.forgetting_attention(q, k, v, g, seq_start=[1, 2])
    with pytest.raises(ValueError, match=r"seq_start is \[1.5, 2.0\]; it must hold integers"):
        foxlm.forgetting_attention(q, k, v, g, seq_start=torch.tensor([1.5, 2]))
    with pytest.raises(ValueError, match="window is 3.0; it must be an integer"):
        foxlm.forgetting_attention(q, k, v, g, window=3.0)
    with pytest.raises(ValueError, match="log_fgate is on meta, but q on cpu; move one of them"):
        foxlm.forgetting_attention(q, k, v, g.to("meta"))
    with pytest.raises(ValueError, match="seq_start is .*each must be from 0 to 100"):
        foxlm.forgetting_attention(q, k, v, g, seq_start=torch.tensor([0, 101]))
