"""PaTH and Wall attention against their definition in float64: queries walk back token by token."""

import pytest
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402

B, T, HQ, H, K, V = 2, 150, 4, 2, 24, 40


def walk(q, k, v, move, gates, scale, window=None, ends=None, sink=None):
    """All queries walk back together, one key at a time; `move(x, n)` are the queries `[B, T - n, HQ, K]` at tokens
    `n, n + 1, ...` after the transitions of tokens `0, 1, ...`."""
    time, heads = q.shape[1], q.shape[2]
    x = q.double()
    k, v = (a.double().repeat_interleave(heads // k.shape[2], 2) for a in (k, v))
    c = torch.zeros(q.shape[:3], device=q.device).double() if gates is None else gates.double().cumsum(1)
    ends = torch.tensor(ends or [0, time])
    sequence = torch.searchsorted(ends[1:].contiguous(), torch.arange(time), right=True)
    sequence, columns = sequence.to(q.device), []
    for n in range(time if window is None else min(window, time)):
        s = scale * (x * k[:, : time - n]).sum(-1) + c[:, n:] - c[:, : time - n]
        apart = sequence[n:] != sequence[: time - n]
        s = s.masked_fill(apart[None, :, None], -torch.inf)
        columns.append(torch.nn.functional.pad(s, (0, 0, n, 0), value=-torch.inf))
        x = move(x, n)[:, 1:]
    sinks = [] if sink is None else [sink.double().expand(q.shape[:3])]
    weights = torch.stack(columns + sinks, -1).softmax(-1)
    shifted = lambda n: torch.nn.functional.pad(v[:, : time - n], (0, 0, 0, 0, n, 0))
    return sum(weights[..., n, None] * shifted(n) for n in range(len(columns)))


def error(a, b):
    a, b = a.double(), b.double()
    assert a.shape == b.shape and a.isfinite().all()
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def draw(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def path(gated, time=T, ends=None, rows=B, width=V):
    shapes = [(rows, time, HQ, K), (rows, time, H, K), (rows, time, H, width), (rows, time, H, K), (rows, time, H)]
    x = draw(*shapes, *([(rows, time, HQ)] if gated else []))
    low, unit = torch.nn.functional.logsigmoid, torch.nn.functional.normalize
    packed = None if ends is None else torch.tensor(ends)

    def ours(q, k, v, w, b, g=None, **more):
        g = None if g is None else low(g)
        return foxlm.parallel_path_attn(q, k, v, unit(w, dim=-1), 2 * b.sigmoid(), g, cu_seqlens=packed, **more)[0]

    def naive(q, k, v, w, b, g=None):
        w, b = unit(w.double(), dim=-1), 2 * b.double().sigmoid()

        w, b = (a.repeat_interleave(HQ // H, 2) for a in (w, b))

        def move(x, n):
            u = w[:, : time - n]
            return x - b[:, : time - n, :, None] * (x * u).sum(-1, keepdim=True) * u

        return walk(q, k, v, move, None if g is None else low(g.double()) * K**-0.5, K**-0.5, None, ends)

    return x, ours, naive


def wall(rate, gated=False, time=T, ends=None, rows=B, window=None, sink=False, width=V):
    shapes = [(rows, time, HQ, K), (rows, time, H, K), (rows, time, H, width), (rows, time, HQ, K)]
    x = draw(*shapes, *([(rows, time, HQ)] if gated else []), *([(HQ,)] if sink else []))
    packed = None if ends is None else torch.tensor(ends)

    def parts(g, rest):
        return -rate * g.abs(), -0.1 * rest[0].abs() if gated else None, rest[-1] if sink else None

    def ours(q, k, v, g, *rest):
        g, scalar, bias = parts(g, rest)
        return foxlm.parallel_wall_attn(
            q, k, v, g, g_scalar=scalar, sink_bias=bias, scale=0.3, window_size=window, cu_seqlens=packed
        )

    def naive(q, k, v, g, *rest):
        g, scalar, bias = parts(g.double(), rest)
        move = lambda x, n: x * g[:, : time - n].exp()
        return walk(q, k, v, move, scalar, 0.3, window, ends, bias)

    return x, ours, naive


CASES = {
    "path": lambda: path(False),
    "path with gates": lambda: path(True),
    "path packed": lambda: path(True, ends=[0, 30, 30, 95, T], rows=1, width=K),
    "path of one token": lambda: path(True, time=1),
    "wall": lambda: wall(0.05),
    "wall at 2 nats a step": lambda: wall(2.0),
    "wall at 100 nats a step": lambda: wall(100.0, time=70),
    "wall with gates and window": lambda: wall(0.05, gated=True, window=20),
    "wall packed with sinks": lambda: wall(0.3, gated=True, ends=[0, 30, 30, 95, T], rows=1, sink=True),
    "wall with wide values": lambda: wall(0.05, time=20, sink=True, width=300),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    x, ours, naive = CASES[name]()
    o, want = ours(*x), naive(*x)
    assert o.dtype == torch.float32 and error(o, want) < 2e-6
    w = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    got, right = torch.autograd.grad(o, x, w), torch.autograd.grad(want, x, w.double(), allow_unused=True)
    for n, (a, b) in enumerate(zip(got, right)):
        if b is None or b.norm() == 0:  # before the first token there is no key to be reflected or decayed
            assert a.abs().max() < 1e-6, n
        else:
            assert error(a, b) < 2e-5, n


@pytest.mark.parametrize("name", ["path with gates", "wall packed with sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    x, ours, naive = CASES[name]()
    x = [a.detach().to(dtype).requires_grad_() for a in x]
    o, want = ours(*x), naive(*x)
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert o.dtype == dtype and error(o, want) < limit
    got, right = torch.autograd.grad(o.float().square().sum(), x), torch.autograd.grad(want.square().sum(), x)
    for n, (a, b) in enumerate(zip(got, right)):
        assert a.dtype == dtype and error(a, b) < 4 * limit, n


@pytest.mark.parametrize("name", ["path with gates", "wall packed with sinks"])
def test_views_compile_export_and_transforms(name):
    x, ours, _ = CASES[name]()
    head_first = [a.detach().transpose(1, 2).contiguous().transpose(1, 2) if a.ndim > 2 else a.detach() for a in x]
    assert torch.equal(ours(*head_first), ours(*x))
    loss = lambda *a: ours(*a).sin().sum()
    want = torch.autograd.grad(loss(*x), x)
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    every = tuple(range(len(x)))
    for got in (torch.autograd.grad(fast(*x), x), torch.func.grad(loss, every)(*[a.detach() for a in x])):
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    class Module(torch.nn.Module):
        def forward(self, *a):
            return ours(*a)

    plain = tuple(a.detach() for a in x)
    exported = torch.export.export(Module(), plain, strict=False).module()
    assert torch.equal(exported(*plain), ours(*plain))
    stacked = [torch.stack((a, 2 * a)) for a in plain]
    twice = torch.vmap(ours)(*stacked)
    assert torch.equal(twice[0], ours(*plain)) and torch.equal(twice[1], ours(*[2 * a for a in plain]))


@pytest.mark.parametrize("make", [lambda: path(True, 5, width=3), lambda: wall(0.5, True, 5, sink=True, width=3)])
def test_float64_passes_gradcheck(make):
    x, ours, naive = make()
    x = [a.detach().double().requires_grad_() for a in x]
    assert error(ours(*x), naive(*x)) < 1e-14
    assert torch.autograd.gradcheck(ours, x, fast_mode=True)


def test_second_derivatives_are_refused():
    x, ours, _ = path(True, 20)
    (grad,) = torch.autograd.grad(ours(*x).sum(), x[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        grad.sum().backward()


def test_strength_of_0_has_a_gradient():
    x, *_ = path(False, 70)
    q, k, v, w, _ = (a.detach() for a in x)
    beta = torch.zeros(B, 70, H, requires_grad=True)
    o, cache = foxlm.parallel_path_attn(q, k, v, w, beta, use_cache=True)
    assert error(o, foxlm.forgetting_attention(q, k, v)) < 1e-6 and torch.equal(cache, k)
    (got,) = torch.autograd.grad(o.square().sum(), beta)
    exact = beta.detach().double().requires_grad_()
    o, _ = foxlm.parallel_path_attn(*(a.double() for a in (q, k, v, w)), exact)
    assert error(got, torch.autograd.grad(o.square().sum(), exact)[0]) < 1e-5


@pytest.mark.parametrize("gated", [False, True])
def test_path_decoding_continues_prefill(gated):
    x, *_ = path(gated)
    q, k, v, w, b, *g = (a.detach() for a in x)
    w, b = torch.nn.functional.normalize(w, dim=-1), 2 * b.sigmoid()
    g = torch.nn.functional.logsigmoid(g[0]) if g else None
    whole, cache = foxlm.parallel_path_attn(q, k, v, w, b, g, use_cache=True)
    part = [None if a is None else a[:, :130] for a in (q, k, v, w, b, g)]
    _, keys = foxlm.parallel_path_attn(*part, use_cache=True)
    for t in range(130, T):
        reflected = keys - b[:, t, None, :, None] * (keys * w[:, t, None]).sum(-1, keepdim=True) * w[:, t, None]
        keys = torch.cat((reflected, k[:, t : t + 1]), 1)
        for row in range(B):
            gates = None if g is None else g[row : row + 1, : t + 1]
            o = foxlm.attn_decoding_one_step(
                q[row : row + 1, t : t + 1], keys[row : row + 1], v[row : row + 1, : t + 1], gates,
                cu_seqlens=torch.tensor([0, t + 1]), do_gate_scale=True,
            )  # fmt: skip
            assert error(o[0, 0], whole[row, t]) < 1e-5
    assert error(keys, cache) < 1e-5


def test_packed_path_cache_is_that_of_each_sequence():
    q, k, v, w, b = (a[:1].detach() for a in path(False)[0])
    w, b = torch.nn.functional.normalize(w, dim=-1), 2 * b.sigmoid()
    ends = [0, 30, 30, 95, T]
    _, cache = foxlm.parallel_path_attn(q, k, v, w, b, cu_seqlens=torch.tensor(ends), use_cache=True)
    for first, end in zip(ends, ends[1:]):
        part = [a[:, first:end] for a in (q, k, v, w, b)]
        assert torch.equal(foxlm.parallel_path_attn(*part, use_cache=True)[1], cache[:, first:end])


@pytest.mark.parametrize("gated", [False, True])
def test_wall_decoding_continues_prefill(gated):
    q, k, v, g, *c = (a.detach() for a in wall(0.05, gated, sink=True)[0])
    g, (c, sink) = -0.05 * g.abs(), ((-0.1 * c[0].abs(), c[1]) if gated else (None, c[0]))
    whole = foxlm.parallel_wall_attn(q, k, v, g, g_scalar=c, sink_bias=sink)
    base2 = lambda x: None if x is None else x.cumsum(1) / torch.tensor(2.0).log()
    sums, gates = base2(g), base2(c)
    for t in (0, 31, 32, T - 1):
        keys, anchors = foxlm.build_wall_kv_cache(k[:, : t + 1], sums[:, : t + 1], 32)
        at = slice(t, t + 1)
        gates_here = None if gates is None else gates[:, : t + 1]
        o, lse = foxlm.parallel_wall_attn_decode(
            q[:, at], v[:, : t + 1], sums[:, at], keys, anchors, sink, K**-0.5, 32, gates_here
        )
        assert error(o, whole[:, at]) < 1e-5 and lse.shape == (B, 1, HQ)


def test_bad_operands_are_named():
    q, k, v, w, b = (a.detach() for a in path(False, 20)[0])
    refused = lambda words: pytest.raises(ValueError, match=words)
    with refused(r"w has shape \[2, 20, 1, 24\], expected \[2, 20, 2, 24\]"):
        foxlm.parallel_path_attn(q, k, v, w[:, :, :1], b)
    with refused("beta is -2 at its lowest; it must be at least 0"):
        foxlm.parallel_path_attn(q, k, v, w, b.clamp(-1, 0) - (b == b.min()).float())
    with refused("q has head dim 192; it must be from 1 to 128"):
        foxlm.parallel_path_attn(*(torch.zeros(1, 4, 1, 192) for _ in range(4)), torch.zeros(1, 4, 1))
    with refused("20 queries, but 21 keys|as many"):
        foxlm.parallel_path_attn(q[:, :19], k, v, w, b)
    with refused("cu_seqlens with batch 2"):
        foxlm.parallel_path_attn(q, k, v, w, b, cu_seqlens=torch.tensor([0, 20]))
    with refused("w is float64; use float32, bfloat16 or float16, or float64 for all"):
        foxlm.parallel_path_attn(q, k, v, w.double(), b.abs())
    g = -torch.rand(B, 20, HQ, K)
    with refused(r"g has shape \[2, 20, 4, 1\], expected \[2, 20, 4, 24\]"):
        foxlm.parallel_wall_attn(q, k, v, g[..., :1])
    with refused("a window of 0 keys"):
        foxlm.parallel_wall_attn(q, k, v, g, window_size=0)
    with refused("overflow float32 within a chunk of 20 tokens; use a smaller chunk_size"):
        foxlm.build_wall_kv_cache(k, (100 * g).cumsum(1), 20)
    with pytest.raises(TypeError, match="head_first"):
        foxlm.parallel_wall_attn(q, k, v, g, head_first=True)
    keys, anchors = foxlm.build_wall_kv_cache(k, g.cumsum(1), 8)
    with refused("r_cache has 2 chunks of 8 tokens; 20 keys need 3"):
        foxlm.parallel_wall_attn_decode(q[:, -1:], v, g[:, -1:], keys, anchors[:, :2], None, 1.0, 8)
