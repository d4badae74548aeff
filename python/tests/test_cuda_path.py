"""The way to a GPU without one: kernels of the CPU stand in for those of the GPU, at the same addresses.

So layouts, padding of heads, types and the order of arguments are tested where there is no GPU; the kernels are tested
by `bench/h200.py`.
"""

import pytest
import test_attention_torch as attention
import test_scans_torch as scans
import test_transitions as transitions
from conftest import need

torch = need("torch")

from torch.autograd import forward_ad  # noqa: E402

import foxlm  # noqa: E402
from foxlm import _core  # noqa: E402
from foxlm import _torch as ops  # noqa: E402
from foxlm import _cuda as cuda  # noqa: E402
from foxlm import _direct as short  # noqa: E402


def described(address, shape, wide, head_first):
    """A contiguous tensor at an address as the CPU's kernels take it: `[B, T, H(, d)]`, whichever way it lies."""
    if address == 0:
        return None
    b, t, h, *d = shape
    d = d[0] if d else 1
    strides = (h * t * d, d, t * d, 1) if head_first else (t * h * d, h * d, d, 1)
    return address, "f32" if wide else "bf16", shape, strides[: len(shape)]


class Attention:
    """The library's object for calls of one kind, on the CPU."""

    def __init__(self, dims, wide, head_first, scale, causal, window, tolerance, starts, ends):
        self.dims, self.wide, self.head_first = dims, wide, head_first
        self.options = scale, causal, window, tolerance
        self.segments = starts, ends
        self.calls = []

    def operands(self, q, k, v, gates):
        b, m, n, h, hk, d = self.dims
        shapes = [(b, m, h, d), (b, n, hk, d), (b, n, hk, d)]
        x = [described(a, s, self.wide, self.head_first) for a, s in zip((q, k, v), shapes)]
        return *x, described(gates, (b, n, h), True, self.head_first)

    def rows(self, address):
        b, m, _, h, _, d = self.dims
        return described(address, (b, m, h, d), self.wide, self.head_first)

    def sums(self, address):
        b, m, _, h, _, _ = self.dims
        if address == 0:
            self.scratch = torch.empty(b, m, h)
            return ops.describe(self.scratch)
        return described(address, (b, m, h), True, self.head_first)

    def packed(self, bounds):
        b, h, ends = self.dims[0], self.dims[3], self.segments[1]
        n = b if ends is None else len(ends) - 1
        bounds = None if bounds == 0 else (bounds, "f32", (1, n, h), (n * h, h, 1))
        return *self.options, bounds, *self.segments

    def forward(self, device, stream, q, k, v, gates, bounds, o, lse):
        assert all(address % 16 == 0 for address in (q, k, v, gates, o, lse))
        self.calls.append("forward")
        x = self.operands(q, k, v, gates)
        _core.attention_forward(*x, self.rows(o), self.sums(lse), self.packed(bounds))

    def backward(self, device, stream, q, k, v, gates, bounds, o, lse, d_out, dq, dk, dv, d_gates):
        assert all(address % 16 == 0 for address in (q, k, v, gates, o, lse, d_out, dq, dk, dv, d_gates))
        self.calls.append("backward")
        x, made = self.operands(q, k, v, gates), self.operands(dq, dk, dv, d_gates)
        _core.attention_backward(self.rows(d_out), *x, self.rows(o), self.sums(lse), made, self.packed(bounds))


class Stand:
    """The library's functions for a GPU, on the CPU."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return getattr(_core, name)

    def CudaAttention(self, *options):  # noqa: N802, it stands for a class
        self.made.append(Attention(*options))
        return self.made[-1]

    def calls(self):
        return [call for attention in self.made for call in attention.calls]

    @staticmethod
    def scan(at, shape):
        (b, t, g, dk), (_, _, h, dv), by_channel, wide = shape
        shapes = [(b, t, g, dk), (b, t, g, dk), (b, t, h, dv), (b, t, h, dk if by_channel else 1), (b, t, h), (1, 1, h)]
        return [described(a, s, wide or n > 2, False) for n, (a, s) in enumerate(zip(at, shapes))]

    @staticmethod
    def states(at, shape, options):
        (b, _, _, dk), (_, _, h, dv), _, _ = shape
        n, width = b if options[2] is None else len(options[2]) - 1, h * dk * dv
        return None if at == 0 else (at, "f32", (1, n, width), (n * width, width, 1))

    def cuda_scan_forward(self, place, at, results, shape, options):
        x, first = self.scan(at, shape), self.states(at[6], shape, options)
        o, last = described(results[0], shape[1], shape[3], False), self.states(results[1], shape, options)
        _core.scan_forward(x[:3], [*x[3:], first], o, last, options)

    def cuda_scan_backward(self, place, given, at, gradients, shape, options):
        x, first = self.scan(at, shape), self.states(at[6], shape, options)
        d_out, d_last = described(given[0], shape[1], shape[3], False), self.states(given[1], shape, options)
        made = [*self.scan(gradients, shape), self.states(gradients[6], shape, options)]
        _core.scan_backward(d_out, d_last, x[:3], [*x[3:], first], made, options)

    @staticmethod
    def transition(at, shape, options):
        (b, t, h, d), (_, _, hk, _), wide = shape
        shapes = [(b, t, h, d), (b, t, hk, d), (b, t, hk, d), (b, t, hk if options[0] else h, d), (b, t, h)]
        x = [described(a, s, wide or n > 2, False) for n, (a, s) in enumerate(zip(at, shapes))]
        return x[:4], x[4]

    def cuda_transition_forward(self, place, at, results, shape, options):
        assert all(address % 16 == 0 for address in at[:3])
        made = [described(results[0], shape[0], shape[2], False), described(results[1], shape[0][:3], True, False)]
        _core.transition_forward(*self.transition(at, shape, options), made, options)

    def cuda_transition_backward(self, place, given, at, gradients, shape, options):
        d_out, o = (described(a, shape[0], shape[2], False) for a in given[:2])
        saved = [o, described(given[2], shape[0][:3], True, False)]
        x, made = self.transition(at, shape, options), self.transition(gradients, shape, options)
        _core.transition_backward(d_out, *x, saved, made, options)


@pytest.fixture
def stand(monkeypatch):
    """Sends the ops of the CPU the way of the GPU's."""
    stand = Stand()
    monkeypatch.setattr(cuda, "_core", stand)
    monkeypatch.setattr(cuda, "_place", lambda x: (0, 0))
    return stand


@pytest.fixture
def direct(stand, monkeypatch):
    """Lets tensors of the CPU take the short way, too."""
    monkeypatch.setattr(short, "_kinds", {})
    monkeypatch.setattr(short, "_possible", True)
    monkeypatch.setattr(cuda, "load_nvrtc", lambda: None)
    for name, value in (("_is_cuda", True), ("_ordinal", 0), ("_current", 0), ("_stream", 0)):
        monkeypatch.setattr(short, name, lambda *_, value=value: value, raising=False)
    return stand


class Through(torch.autograd.Function):
    """The op with the GPU's implementation on tensors of the CPU."""

    @staticmethod
    def forward(ctx, q, k, v, gates, *rest):
        o, lse = cuda._attention(q, k, v, gates, *rest)
        ctx.save_for_backward(q, k, v, o, lse, gates)
        ctx.rest = rest
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, d_out, _):
        grads = cuda._attention_backward(d_out, *ctx.saved_tensors, *ctx.rest)
        gates = ctx.saved_tensors[5]
        return (*grads[:3], None if gates is None else grads[3], *(None,) * len(ctx.rest))


class Ops:
    class foxlm:
        class attention:
            default = staticmethod(Through.apply)

        class attention_backward:
            default = staticmethod(lambda *a: cuda._attention_backward(*a))


def operands(case, layout, dtype):
    x = [None if a is None else a.detach() for a in attention.make(**case, dtype=dtype)]
    if layout == "head first":
        x = [None if a is None else a.transpose(1, 2).contiguous().transpose(1, 2) for a in x]
    elif layout == "mixed":
        x[1] = x[1].transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "one projection" and len({a.shape for a in x[:3]}) == 1:
        x[:3] = torch.cat(x[:3], -1).split(x[0].shape[3], -1)
    return [None if a is None else a.detach().requires_grad_() for a in x]


def is_plain(case, dtype):
    """Whether such tensors are passed as they are, if they lie right."""
    return dtype != torch.float16 and case.get("d", 16) % 8 == 0 and "dv" not in case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["time first", "head first", "mixed", "one projection"])
@pytest.mark.parametrize("name", attention.CASES)
def test_attention(name, layout, dtype, stand, monkeypatch):
    case = attention.CASES[name]
    x = operands(case, layout, dtype)
    d_out = torch.randn(*x[0].shape[:3], x[2].shape[3]).to(dtype)
    want = attention.run(attention.ours, x, case, d_out)
    monkeypatch.setattr(ops.torch, "ops", Ops)
    got = attention.run(attention.ours, x, case, d_out)
    # float16 goes through float32, and so do the gradients between the two passes.
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for what, a, b in zip(("o", "dq", "dk", "dv", "dg"), got, want):
        assert a.dtype == b.dtype and a.stride() == b.stride(), what
        assert max(attention.errors(a, b)) < limit, what
    assert stand.calls() == ["forward", "backward"]
    alike = case.get("h", 3) == case.get("hk", 3) and "ends" not in case
    # Wholly head-first tensors are passed as they lie, unless their heads have to be filled up.
    if layout == "head first" and alike and is_plain(case, dtype):
        assert stand.made[0].head_first or case.get("m") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["time first", "head first"])
@pytest.mark.parametrize("name", attention.CASES)
def test_direct_call_is_bit_exact(name, layout, dtype, direct, monkeypatch):
    case = attention.CASES[name]
    x = operands(case, layout, dtype)
    d_out = torch.randn(*x[0].shape[:3], x[2].shape[3]).to(dtype)
    monkeypatch.setattr(ops.torch, "ops", Ops)
    with monkeypatch.context() as patch:
        patch.setattr(short, "_possible", False)
        want = attention.run(attention.ours, x, case, d_out)
    del direct.made[:]
    got = attention.run(attention.ours, x, case, d_out)
    again = attention.run(attention.ours, x, case, d_out)
    with torch.no_grad():
        forward = attention.ours(*x, **case)
    for what, a, b, c in zip(("o", "dq", "dk", "dv", "dg"), got, want, again):
        assert torch.equal(a, b) and torch.equal(a, c) and a.dtype == b.dtype and a.stride() == b.stride(), what
    assert torch.equal(forward, got[0]) and not forward.requires_grad
    assert direct.calls().count("forward") == 3 and direct.calls().count("backward") == 2
    # One object serves all calls of a kind, if nothing has to be copied or read by the host.
    fits = is_plain(case, dtype) and "starts" not in case and "ends" not in case
    if layout == "time first" or case.get("h", 3) == case.get("hk", 3):
        assert (len(direct.made) == 1) == fits


def same_as_general(f, x, monkeypatch):
    """Runs `f` both ways and compares bits."""
    with monkeypatch.context() as patch:
        patch.setattr(short, "_possible", False)
        want = f(*x)
    for a, b in zip(f(*x), want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("head_first", [False, True])
def test_direct_call_accepts_head_first(head_first, direct, monkeypatch):
    monkeypatch.setattr(ops.torch, "ops", Ops)
    x = attention.make(head_first=True)
    if not head_first:  # heads first in the arguments, time first in memory, as the published model has them
        x = [a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in x]
    thresholds = torch.linspace(-40, -5, 3)

    def f(*x):
        o = foxlm.forgetting_attention(*x, head_first=True, adaptive_threshold=thresholds)
        return o, *torch.autograd.grad(o.square().sum(), x), *torch.autograd.grad(f_sum(*x), x)

    # The gradient of a sum is expanded, and has to be copied.
    f_sum = lambda *x: foxlm.forgetting_attention(*x, head_first=True).sum()
    same_as_general(f, x, monkeypatch)
    assert len(short._kinds) == 2 and None not in short._kinds.values()


def test_saved_tensors_that_were_moved(direct, monkeypatch):
    monkeypatch.setattr(ops.torch, "ops", Ops)
    x = [a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in attention.make()]
    moved = torch.autograd.graph.saved_tensors_hooks(lambda a: a, lambda a: a.contiguous().clone())

    def f(*x):
        with moved:
            o = foxlm.forgetting_attention(*x)
        return torch.autograd.grad(o.square().sum(), x)

    same_as_general(f, x, monkeypatch)
    assert None not in short._kinds.values()


def test_misaligned_tensors_use_the_general_path(direct, monkeypatch):
    monkeypatch.setattr(ops.torch, "ops", Ops)
    x = [a.detach() for a in attention.make()]
    shifted = torch.empty(x[0].numel() + 1)[1:].view_as(x[0]).copy_(x[0])
    want = foxlm.forgetting_attention(*x)
    assert len(direct.made) == 1
    assert torch.equal(foxlm.forgetting_attention(shifted, *x[1:]), want)
    assert len(direct.made) == 2 and len(short._kinds) == 1


def test_dispatch_modes_see_the_op(direct):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    x = attention.make()
    want = foxlm.forgetting_attention(*x)
    with Watch() as watch:
        o = foxlm.forgetting_attention(*x)
    assert torch.ops.foxlm.attention.default in watch.seen
    assert torch.allclose(o, want, atol=1e-6)
    # A transform needs the op, too.
    one = lambda *a: foxlm.forgetting_attention(*[b[None] for b in a])[0]
    got = torch.vmap(one)(*[a.detach() for a in x])
    assert torch.allclose(got, want, atol=1e-6)
    # So do gradients that come as a batch.
    w = torch.randn(2, *want.shape)
    got = torch.autograd.grad(want, x, w, is_grads_batched=True)
    for n in range(2):
        for a, b in zip(got, torch.autograd.grad(o, x, w[n], retain_graph=True)):
            assert torch.allclose(a[n], b, atol=1e-5)
    # Tangents are not lost, but refused.
    q, *rest = (a.detach() for a in x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode gradients"):
        foxlm.forgetting_attention(forward_ad.make_dual(q, q), *rest)
    assert direct.calls() == ["forward"]


def test_options_are_part_of_the_cache_key(direct):
    x = [a.detach() for a in attention.make()]
    f = foxlm.forgetting_attention
    outputs = [f(*x), f(*x, sm_scale=0.3), f(*x, window=7), f(*x, causal=False), f(*x[:3])]
    for n, a in enumerate(outputs):
        assert not any(torch.equal(a, b) for b in outputs[:n])
    assert torch.equal(f(*x, sm_scale=0.3), outputs[1]) and len(direct.made) == 5
    # A scale that is a tensor is not cached: it may change.
    scale = torch.tensor(0.3)
    assert torch.allclose(f(*x, sm_scale=scale), outputs[1], atol=1e-6)
    scale.fill_(x[0].shape[3] ** -0.5)
    assert torch.allclose(f(*x, sm_scale=scale), outputs[0], atol=1e-6)
    with pytest.raises(ValueError, match="200 queries, but only 100 keys"):
        f(torch.zeros(2, 200, 3, 16), *x[1:])


@pytest.mark.parametrize(
    "make",
    [scans.delta_rule, scans.gated_delta_rule, scans.gla, scans.simple_gla, scans.mamba, scans.from_a_state],
)
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
    given = torch.randn(o.shape).to(o.dtype), torch.randn(last.shape) if last.numel() else None
    want = torch.ops.foxlm.scan_backward(*given, *arguments[:-1])
    for n, (a, b) in enumerate(zip(cuda._scan_backward(*given, *arguments[:-1]), want)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert b.numel() == 0 or scans.error(a, b) < (1e-6 if dtype == torch.float32 else 2e-2), n


@pytest.mark.parametrize(
    "name", ["path with gates", "path packed", "wall with gates and window", "wall at 2 nats a step"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_transitions(name, dtype, stand):
    x, ours, _ = transitions.CASES[name]()
    x = [a.detach().to(dtype) for a in x]
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.foxlm.transition_attention.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Watch():
        ours(*x)
    (arguments,) = seen
    arguments = [*arguments, *[None] * (9 - len(arguments))]
    o, lse = torch.ops.foxlm.transition_attention(*arguments)
    got, sums = cuda._transition(*arguments)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert got.dtype == o.dtype and scans.error(got, o) < limit and scans.error(sums, lse) < limit
    given = torch.randn(o.shape).to(dtype), *arguments[:4], o, lse, *arguments[4:]
    want = torch.ops.foxlm.transition_attention_backward(*given)
    for n, (a, b) in enumerate(zip(cuda._transition_backward(*given), want)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert b.numel() == 0 or scans.error(a, b) < (1e-6 if dtype == torch.float32 else 2e-2), n
