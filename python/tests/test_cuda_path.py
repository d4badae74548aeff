"""The way to a GPU without one: kernels of the CPU stand in for those of the GPU, at the same addresses.

So layouts, padding of heads, types and the order of arguments are tested where there is no GPU; the kernels are tested
by `bench/h200.py`.
"""

import pytest
import test_attention_torch as attention
import test_scans_torch as scans
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402
from foxlm import _core  # noqa: E402
from foxlm import _torch as ops  # noqa: E402
from foxlm import _cuda as cuda  # noqa: E402


def described(address, shape, wide, head_first):
    """A contiguous tensor at an address as the CPU's kernels take it: `[B, T, H(, d)]`, whichever way it lies."""
    if address == 0:
        return None
    b, t, h, *d = shape
    d = d[0] if d else 1
    strides = (h * t * d, d, t * d, 1) if head_first else (t * h * d, h * d, d, 1)
    return address, "f32" if wide else "bf16", shape, strides[: len(shape)]


def operands(at, dims, options):
    (wide, head_first), (scale, causal, window, tolerance, bounds, starts, ends) = options
    b, m, n, h, hk, d = dims
    segments = b if ends is None else len(ends) - 1
    bounds = None if bounds is None else (bounds, "f32", (1, segments, h), (segments * h, h, 1))
    shapes = [(b, m, h, d), (b, n, hk, d), (b, n, hk, d)]
    x = [described(a, s, wide, head_first) for a, s in zip(at, shapes)]
    gates = described(at[3], (b, n, h), True, head_first)
    rows = lambda address: described(address, shapes[0], wide, head_first)
    lse = lambda address: described(address, (b, m, h), True, head_first)
    return x, gates, rows, lse, (scale, causal, window, tolerance, bounds, starts, ends)


class Stand:
    """The library's functions for a GPU, on the CPU."""

    calls: list = []

    def __getattr__(self, name):
        return getattr(_core, name)

    def cuda_attention_forward(self, place, at, results, dims, options):
        self.calls.append(options[0])
        assert all(address % 16 == 0 for address in [*at, *results])
        x, gates, rows, lse, packed = operands(at, dims, options)
        _core.attention_forward(*x, gates, rows(results[0]), lse(results[1]), packed)

    def cuda_attention_backward(self, place, at, saved, gradients, dims, options):
        x, gates, rows, lse, packed = operands(at, dims, options)
        made, d_gates, *_ = operands(gradients, dims, options)
        _core.attention_backward(rows(saved[0]), *x, gates, rows(saved[1]), lse(saved[2]), (*made, d_gates), packed)

    @staticmethod
    def scan(at, shape):
        (b, t, g, dk), (_, _, h, dv), by_channel, wide = shape
        shapes = [(b, t, g, dk), (b, t, g, dk), (b, t, h, dv), (b, t, h, dk if by_channel else 1), (b, t, h), (1, 1, h)]
        return [described(a, s, wide or n > 2, False) for n, (a, s) in enumerate(zip(at, shapes))]

    def cuda_scan_forward(self, place, at, results, shape, options):
        x = self.scan(at, shape)
        (b, t, _, dk), (_, _, h, dv), _, wide = shape
        n = b if options[2] is None else len(options[2]) - 1
        state = lambda a: None if a == 0 else (a, "f32", (1, n, h * dk * dv), (n * h * dk * dv, h * dk * dv, 1))
        o = described(results[0], (b, t, h, dv), wide, False)
        _core.scan_forward(x[:3], [*x[3:], state(at[6])], o, state(results[1]), options)

    def cuda_scan_backward(self, place, d_out, at, gradients, shape, options):
        x = self.scan(at, shape)
        d_out = described(d_out, shape[1], shape[3], False)
        _core.scan_backward(d_out, x[:3], [*x[3:], None], self.scan(gradients, shape), options)


@pytest.fixture
def stand(monkeypatch):
    """Sends the ops of the CPU the way of the GPU's."""
    stand = Stand()
    stand.calls = []
    monkeypatch.setattr(cuda, "_core", stand)
    monkeypatch.setattr(cuda, "_place", lambda x: (0, 0))
    return stand


class Through(torch.autograd.Function):
    """The op with the GPU's implementation on tensors of the CPU."""

    @staticmethod
    def forward(ctx, q, k, v, gates, *rest):
        o, lse = cuda._attention(q, k, v, gates, *rest)
        ctx.save_for_backward(q, k, v, o, lse, gates)
        ctx.rest = rest
        return o

    @staticmethod
    def backward(ctx, d_out):
        grads = cuda._attention_backward(d_out, *ctx.saved_tensors, *ctx.rest)
        gates = ctx.saved_tensors[5]
        return (*grads[:3], None if gates is None else grads[3], *(None,) * len(ctx.rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["time first", "head first", "mixed", "one projection"])
@pytest.mark.parametrize("name", attention.CASES)
def test_attention(name, layout, dtype, stand, monkeypatch):
    case = attention.CASES[name]
    x = [None if a is None else a.detach() for a in attention.make(**case, dtype=dtype)]
    if layout == "head first":
        x = [None if a is None else a.transpose(1, 2).contiguous().transpose(1, 2) for a in x]
    elif layout == "mixed":
        x[1] = x[1].transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "one projection" and len({a.shape for a in x[:3]}) == 1:
        x[:3] = torch.cat(x[:3], -1).split(x[0].shape[3], -1)
    x = [None if a is None else a.detach().requires_grad_() for a in x]
    d_out = torch.randn(*x[0].shape[:3], x[2].shape[3]).to(dtype)
    want = attention.run(attention.ours, x, case, d_out)

    class Ops:
        class foxlm:
            class attention:
                default = staticmethod(lambda *a: (Through.apply(*a), None))

    monkeypatch.setattr(ops.torch, "ops", Ops)
    got = attention.run(attention.ours, x, case, d_out)
    # float16 goes through float32, and so do the gradients between the two passes.
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for what, a, b in zip(("o", "dq", "dk", "dv", "dg"), got, want):
        assert a.dtype == b.dtype and a.stride() == b.stride(), what
        assert max(attention.errors(a, b)) < limit, what
    assert len(stand.calls) == 1
    alike = case.get("h", 3) == case.get("hk", 3) and "ends" not in case
    # Wholly head-first tensors are passed as they lie, unless their heads have to be filled up.
    plain = dtype != torch.float16 and case.get("d", 16) % 8 == 0 and "dv" not in case
    if layout == "head first" and alike and plain:
        assert stand.calls[0][1] or case.get("m") == 1


@pytest.mark.parametrize("make", [scans.delta_rule, scans.gated_delta_rule, scans.gla, scans.simple_gla, scans.mamba])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scans(make, dtype, stand, monkeypatch):
    x, ours, _ = make()
    x = [a.detach().to(dtype).requires_grad_() for a in x]
    seen = []
    original = torch.ops.foxlm.scan.default

    def watch(*arguments):
        seen.append([a.detach() if isinstance(a, torch.Tensor) else a for a in arguments])
        return original(*arguments)

    class Ops:
        class foxlm:
            class scan:
                default = staticmethod(watch)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(foxlm._scan_torch.torch, "ops", Ops)
        ours(*x)
    (arguments,) = seen
    o, last = original(*arguments)
    got, state = cuda._scan(*arguments)
    assert scans.error(got, o) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert state.shape == last.shape and (last.numel() == 0 or scans.error(state, last) < 1e-2)
    d_out = torch.randn(o.shape).to(o.dtype)
    want = torch.ops.foxlm.scan_backward(d_out, *arguments[:-1])
    for n, (a, b) in enumerate(zip(cuda._scan_backward(d_out, *arguments[:-1]), want)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert b.numel() == 0 or scans.error(a, b) < (1e-6 if dtype == torch.float32 else 2e-2), n
