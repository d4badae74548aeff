"""The scans against their definition, token by token in float64, with gradients."""

import pytest
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402


def recur(q, k, v, decay=None, write=None, skip=None, scale=1.0, delta=False, state=None, ends=None):
    """The definition. decay `[B, T, H, 1 or dk]`, write `[B, T, H]`: o and the last states."""
    double = lambda x: None if x is None else x.double()
    q, k, v, decay, write, skip, state = map(double, (q, k, v, decay, write, skip, state))
    if ends is not None:
        parts = []
        for n, (a, e) in enumerate(zip(ends, ends[1:])):
            cut = [None if x is None else x[:, a:e] for x in (q, k, v, decay, write)]
            parts.append(recur(*cut, skip, scale, delta, None if state is None else state[n : n + 1]))
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])
    h = v.shape[2]
    q, k = (x.repeat_interleave(h // x.shape[2], 2) for x in (q, k))
    s = q.new_zeros(q.shape[0], h, q.shape[3], v.shape[3]) if state is None else state
    out = []
    for t in range(q.shape[1]):
        if decay is not None:
            s = s * decay[:, t].exp()[..., None]
        value = v[:, t]
        if delta:
            value = value - torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        if write is not None:
            value = value * write[:, t, :, None]
        s = s + k[:, t, :, :, None] * value[:, :, None]
        o = scale * torch.einsum("bhkv,bhk->bhv", s, q[:, t])
        out.append(o if skip is None else o + skip[:, None] * v[:, t])
    return torch.stack(out, 1) if out else v[:, :0], s


def draw(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


B, T, H, K, V = 2, 150, 2, 24, 40


def error(a, b):
    a, b = a.double(), b.double()
    assert a.shape == b.shape and a.isfinite().all()
    return ((a - b).norm() / b.norm()).item()


def delta_rule():
    q, k, v, b = draw((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H))
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    ours = lambda q, k, v, b: foxlm.chunk_delta_rule(q, k, v, b.sigmoid(), **options)
    unit = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    naive = lambda q, k, v, b: recur(unit(q), unit(k), v, None, b.sigmoid(), scale=K**-0.5, delta=True)
    return (q, k, v, b), ours, naive


def gated_delta_rule():
    q, k, v, g, b = draw((B, T, H, K), (B, T, H, K), (B, T, 2 * H, V), (B, T, 2 * H), (B, T, 2 * H))
    low = torch.nn.functional.logsigmoid
    ours = lambda q, k, v, g, b: foxlm.chunk_gated_delta_rule(
        q, k, v, low(g), b.sigmoid(), use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    unit = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    naive = lambda q, k, v, g, b: recur(unit(q), unit(k), v, low(g)[..., None], b.sigmoid(), scale=K**-0.5, delta=True)
    return (q, k, v, g, b), ours, naive


def gla():
    q, k, v, g = draw((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K))
    low = torch.nn.functional.logsigmoid
    ours = lambda q, k, v, g: foxlm.chunk_gla(q, k, v, low(g), scale=0.3, output_final_state=True)
    return (q, k, v, g), ours, lambda q, k, v, g: recur(q, k, v, low(g), scale=0.3)


def hgrn2():
    q, f, v = draw((B, T, H, K), (B, T, H, K), (B, T, H, V))
    ours = lambda q, f, v: foxlm.fused_recurrent_gla(
        q, 1 - f.sigmoid(), v, torch.nn.functional.logsigmoid(f), output_final_state=True
    )
    naive = lambda q, f, v: recur(q, 1 - f.sigmoid(), v, torch.nn.functional.logsigmoid(f), scale=K**-0.5)
    return (q, f, v), ours, naive


def simple_gla():
    q, k, v = draw((B, T, H, K), (B, T, H, K), (B, T, H, V))
    return (q, k, v), lambda *x: foxlm.chunk_simple_gla(*x), lambda *x: recur(*x, scale=K**-0.5)


def mamba():
    x, dt, a, b, c, d, z = draw((B, T, 4, V), (B, T, 4), (4,), (B, T, 2, K), (B, T, 2, K), (4,), (B, T, 4, V))
    (h,) = draw((B, 4, V, K))
    bias = torch.tensor([0.1, -0.2, 0.3, 0.0])
    ours = lambda x, dt, a, b, c, d, z, h: foxlm.mamba_chunk_scan_combined(
        x, dt, -a.exp(), b, c, 64, D=d, z=z, dt_bias=bias.to(dt.device), dt_softplus=True, return_final_states=True,
        initial_states=h,
    )  # fmt: skip

    def naive(x, dt, a, b, c, d, z, h):
        step = torch.nn.functional.softplus(dt + bias.to(dt.device))
        o, s = recur(c, b, x, (-a.exp() * step)[..., None], step, d, state=h.transpose(2, 3))
        return o * torch.nn.functional.silu(z), s.transpose(2, 3)

    return (x, dt, a, b, c, d, z, h), ours, naive


def from_a_state():
    q, k, v, g, b, h = draw((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, V, K))
    low = torch.nn.functional.logsigmoid
    ours = lambda q, k, v, g, b, h: foxlm.fused_recurrent_gated_delta_rule(
        q, k / K**0.5, v, low(g), beta=b.sigmoid(), initial_state=h, output_final_state=True, state_v_first=True
    )

    def naive(q, k, v, g, b, h):
        x = q, k / K**0.5, v, low(g)[..., None], b.sigmoid()
        o, s = recur(*x, scale=K**-0.5, delta=True, state=h.transpose(2, 3))
        return o, s.transpose(2, 3)

    return (q, k, v, g, b, h), ours, naive


def packed_states():
    q, k, v, g, h = draw((1, T, H, K), (1, T, H, K), (1, T, H, V), (1, T, H, K), (3, H, K, V))
    low, ends = torch.nn.functional.logsigmoid, [0, 70, 70, T]
    ours = lambda q, k, v, g, h: foxlm.chunk_gla(
        q, k, v, low(g), initial_state=h, output_final_state=True, cu_seqlens_cpu=torch.tensor(ends)
    )
    return (q, k, v, g, h), ours, lambda q, k, v, g, h: recur(q, k, v, low(g), scale=K**-0.5, state=h, ends=ends)


def fixed_decays():
    q, k, v, g, h = draw((B, T, H, K), (B, T, H, K), (B, T, H, V), (H,), (B, H, K, V))
    ours = lambda q, k, v, g, h: foxlm.chunk_simple_gla(q, k, v, None, -g.exp(), 0.5, h, True, chunk_size=32)
    naive = lambda q, k, v, g, h: recur(q, k, v, -g.exp().expand(B, T, H)[..., None], scale=0.5, state=h)
    return (q, k, v, g, h), ours, naive


def gates_in_the_op():
    q, k, v, g, b = draw((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H))
    a, bias = draw((H,), (H,))
    ours = lambda q, k, v, g, b, a, bias: foxlm.chunk_gated_delta_rule(
        q, k / K**0.5, v, g, b, use_gate_in_kernel=True, A_log=a, dt_bias=bias, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, output_final_state=True,
    )  # fmt: skip

    def naive(q, k, v, g, b, a, bias):
        decay = -a.exp() * torch.nn.functional.softplus(g + bias)
        return recur(q, k / K**0.5, v, decay[..., None], 2 * b.sigmoid(), scale=K**-0.5, delta=True)

    return (q, k, v, g, b, a, bias), ours, naive


def backwards():
    q, k, v, g, h = draw((1, T, H, K), (1, T, H, K), (1, T, H, V), (1, T, H), (2, H, K, V))
    ends, low = [0, 60, T], torch.nn.functional.logsigmoid
    ours = lambda q, k, v, g, h: foxlm.fused_recurrent_simple_gla(
        q, k, v, low(g), initial_state=h, output_final_state=True, reverse=True, cu_seqlens=torch.tensor(ends)
    )

    def naive(q, k, v, g, h):
        x = [torch.cat([x[:, :60].flip(1), x[:, 60:].flip(1)], 1) for x in (q, k, v, low(g)[..., None])]
        o, s = recur(*x, scale=K**-0.5, state=h, ends=ends)
        return torch.cat([o[:, :60].flip(1), o[:, 60:].flip(1)], 1), s

    return (q, k, v, g, h), ours, naive


def kimi_delta_attention():
    q, k, v, g, b = draw((B, T, H, K), (B, T, H, K), (B, T, 2 * H, V), (B, T, 2 * H, K), (B, T, 2 * H))
    a, bias, h = draw((2 * H,), (2 * H * K,), (B, 2 * H, V, K))
    ours = lambda q, k, v, g, b, a, bias, h: foxlm.chunk_kda(
        q, k / K**0.5, v, g, b, initial_state=h, output_final_state=True, use_gate_in_kernel=True, A_log=a,
        dt_bias=bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True,
    )  # fmt: skip

    def naive(q, k, v, g, b, a, bias, h):
        decay = -a.exp()[:, None] * torch.nn.functional.softplus(g + bias.view(2 * H, K))
        x = q, k / K**0.5, v, decay, 2 * b.sigmoid()
        o, s = recur(*x, scale=K**-0.5, delta=True, state=h.transpose(2, 3))
        return o, s.transpose(2, 3)

    return (q, k, v, g, b, a, bias, h), ours, naive


def packed_kimi_delta_attention():
    q, k, v, g, b = draw((1, T, H, K), (1, T, H, K), (1, T, H, V), (1, T, H, K), (1, T, H))
    (h,) = draw((3, H, K, V))
    ends = [0, 70, 70, T]
    ours = lambda q, k, v, g, b, h: foxlm.fused_recurrent_kda(
        q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0, scale=0.5,
        initial_state=h, output_final_state=True, cu_seqlens=torch.tensor(ends),
    )  # fmt: skip
    unit = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    naive = lambda q, k, v, g, b, h: recur(
        unit(q), unit(k), v, -5 * g.sigmoid(), b.sigmoid(), scale=0.5, delta=True, state=h, ends=ends
    )
    return (q, k, v, g, b, h), ours, naive


KINDS = [
    delta_rule, gated_delta_rule, gla, hgrn2, simple_gla, mamba, from_a_state, packed_states, fixed_decays,
    gates_in_the_op, backwards, kimi_delta_attention, packed_kimi_delta_attention,
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS)
def test_values_and_gradients(make):
    # A gradient of a few numbers is a sum that may nearly cancel, with a large relative error: the draw is fixed.
    torch.manual_seed(0)
    x, ours, naive = make()
    (o, state), (want, last) = ours(*x), naive(*x)
    assert error(o, want) < 1e-5
    w = torch.randn(o.shape)
    got, right = (o * w).sum(), (want * w.double()).sum()
    if state is not None:
        assert error(state, last) < 1e-5
        w = torch.randn(state.shape)
        got, right = got + (state * w).sum(), right + (last * w.double()).sum()
    for n, (a, b) in enumerate(zip(torch.autograd.grad(got, x), torch.autograd.grad(right, x))):
        assert error(a, b) < 3e-5, n


def test_states_and_packed_sequences():
    q, k, v, b = (x.detach() for x in delta_rule()[0])
    b, k = b.sigmoid(), torch.nn.functional.normalize(k, dim=-1)
    _, middle = foxlm.chunk_delta_rule(q[:, :70], k[:, :70], v[:, :70], b[:, :70], output_final_state=True)
    o, last = foxlm.chunk_delta_rule(q[:, 70:], k[:, 70:], v[:, 70:], b[:, 70:], None, middle, True)
    whole, end = foxlm.chunk_delta_rule(q, k, v, b, output_final_state=True)
    assert error(o, whole[:, 70:]) < 1e-5 and error(last, end) < 1e-5
    one = lambda x: x.reshape(1, -1, *x.shape[2:])
    ends = torch.tensor([0, T, 2 * T])
    packed, states = foxlm.chunk_delta_rule(one(q), one(k), one(v), one(b), output_final_state=True, cu_seqlens=ends)
    assert torch.equal(packed, one(whole)) and torch.equal(states, end)


@pytest.mark.parametrize("make", [delta_rule, gla])
def test_half_precision_views_and_compile(make):
    x, ours, naive = make()
    low = [a.detach().bfloat16().requires_grad_() for a in x]
    o = ours(*low)[0]
    assert o.dtype == torch.bfloat16 and error(o, naive(*low)[0]) < 2e-2
    head_first = [a.detach().transpose(1, 2).contiguous().transpose(1, 2) for a in x]
    assert torch.equal(ours(*head_first)[0], ours(*x)[0])
    fast = torch.compile(lambda *a: ours(*a)[0].sin().sum(), fullgraph=True, backend="aot_eager")
    got, want = torch.autograd.grad(fast(*x), x), torch.autograd.grad(ours(*x)[0].sin().sum(), x)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_keys_are_normalised_before_they_are_rounded():
    q, k, v, b = (x.detach().bfloat16() for x in delta_rule()[0])
    unit = lambda x: (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    want = foxlm.chunk_delta_rule(unit(q), unit(k), v, b)[0]
    assert torch.equal(foxlm.chunk_delta_rule(q, k, v, b, use_qk_l2norm_in_kernel=True)[0], want)


def test_time_steps_are_clamped():
    x, dt, a, b, c, d, z, _ = (x.detach() for x in mamba()[0])
    run = lambda dt, **more: foxlm.mamba_chunk_scan_combined(x, dt, -a.exp(), b, c, **more)
    assert (dt < 0).any() and torch.equal(run(dt), run(dt.clamp(min=0.0)))
    assert torch.equal(run(dt, dt_limit=(0.1, 0.5)), run(dt.clamp(0.1, 0.5)))
    with pytest.raises(ValueError, match=r"D has shape \[2\], expected \[4\] or \[4, 40\]"):
        run(dt, D=d[:2])
    with pytest.raises(ValueError, match=r"z has shape \[2, 150, 1, 40\], expected \[2, 150, 4, 40\]"):
        run(dt, z=z[:, :, :1])
    with pytest.raises(ValueError, match=r"dt_limit is \(0.1,\); it must be the lowest and the highest step"):
        run(dt, dt_limit=(0.1,))


def test_mamba_sequence_ids_start_again():
    x, dt, a, b, c, d, z, _ = (x.detach() for x in mamba()[0])
    ids = (torch.arange(T) >= 50).int() + (torch.arange(T) >= 51).int()
    ids = torch.stack((ids, torch.zeros(T, dtype=torch.int32)))
    first = torch.randn(B, 4, V, K, requires_grad=True)
    more = {"D": torch.randn(4, V), "return_final_states": True, "state_dtype": torch.float16}
    step = dt.abs()
    o, last = foxlm.mamba_chunk_scan_combined(
        x, step, -a.exp(), b, c, seq_idx=ids, initial_states=first, **more
    )
    decay, want, states = (-a.exp() * step)[..., None], [], []
    for row, ends in ((0, [0, 50, 51, T]), (1, [0, T])):
        x0 = [y[row : row + 1] for y in (c, b, x, decay, step)]
        begin = torch.zeros(len(ends) - 1, 4, K, V)
        begin[0] = first.detach()[row].transpose(1, 2)
        y, s = recur(*x0, state=begin, ends=ends)
        want.append(y + more["D"] * x[row : row + 1])
        states.append(s[-1:].transpose(2, 3))
    assert error(o, torch.cat(want)) < 1e-5
    assert last.dtype == torch.float16 and error(last, torch.cat(states)) < 1e-3
    (grad,) = torch.autograd.grad(last[0].float().sum() + o[0, 60:].sum(), first)
    assert grad.abs().max() == 0
    ends = torch.tensor([0, 50, 51, T])
    one = [y[:1] for y in (x, step)]
    packed = foxlm.mamba_chunk_scan_combined(
        *one, -a.exp(), b[:1], c[:1], cu_seqlens=ends, seq_idx=ids[:1], return_final_states=True,
        return_varlen_states=True,
    )  # fmt: skip
    assert packed[1].shape[0] == 1 and packed[2].shape[0] == 3 and torch.equal(packed[1][0], packed[2][2])
    with pytest.raises(ValueError, match="seq_idx and cu_seqlens name different sequences"):
        foxlm.mamba_chunk_scan_combined(*one, -a.exp(), b[:1], c[:1], cu_seqlens=ends[[0, 1, 3]], seq_idx=ids[:1])
    with pytest.raises(ValueError, match="return_varlen_states needs cu_seqlens"):
        foxlm.mamba_chunk_scan_combined(*one, -a.exp(), b[:1], c[:1], return_varlen_states=True)


@pytest.mark.parametrize("by_channel", [False, True])
def test_wide_heads_are_split_into_blocks(by_channel, monkeypatch):
    from foxlm import _scan_torch

    monkeypatch.setattr(_scan_torch, "WIDEST", 16)
    group, ends = (H, torch.tensor([0, 70, T])) if by_channel else (1, None)
    n = 1 if by_channel else B
    x = draw((n, T, group, K), (n, T, group, K), (n, T, H, V), (n, T, H, K if by_channel else 1), (n, T, H), (H,),
             (2 if by_channel else B, H, K, V))  # fmt: skip

    def run(scan, q, k, v, g, b, d, h):
        return scan(q, k, v, -g.abs(), b.sigmoid(), d, h, ends, 0.3, *(() if scan is split else (False,)), True)

    split = lambda *a: _scan_torch.split_scan(_scan_torch._scan, *a)
    (o, last), (want, end) = run(split, *x), run(_scan_torch._scan, *x)
    assert error(o, want) < 1e-6 and error(last, end) < 1e-6
    grads = [torch.autograd.grad(a.square().sum() + s.square().sum(), x) for a, s in ((o, last), (want, end))]
    for n, (a, b) in enumerate(zip(*grads)):
        assert error(a, b) < 3e-5, n


def test_recurrent_forms_take_positional_arguments():
    q, k, v, g, b, a, bias = (x.detach() for x in gates_in_the_op()[0])
    (h,) = (x.detach() for x in draw((B, H, V, K)))
    got = foxlm.fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, b, 0.3, h, True, True, True, a, bias, True, True, True, None
    )
    want = foxlm.chunk_gated_delta_rule(
        q, k, v, g, b, scale=0.3, initial_state=h, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=a, dt_bias=bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        state_v_first=True,
    )  # fmt: skip
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    ones, k = torch.ones(B, T, H), torch.nn.functional.normalize(k, dim=-1)
    got = foxlm.fused_recurrent_delta_rule(q, k, v, None, 0.3, output_final_state=True)
    want = foxlm.chunk_delta_rule(q, k, v, ones, 0.3, output_final_state=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_kda_returns_states_of_chunks():
    q, k, v, g, b, h = (x.detach() for x in packed_kimi_delta_attention()[0])
    g, b, k, ends = -g.abs(), b.sigmoid(), k / K**0.5, [0, 40, T]
    with torch.inference_mode():
        o, last, states = foxlm.chunk_kda(
            q, k, v, g, b, initial_state=h[:2], output_final_state=True, return_intermediate_states=True, chunk_size=32,
            cu_seqlens=torch.tensor(ends),
        )  # fmt: skip
    assert states.shape == (1, 2 + 4, H, K, V) and torch.equal(states[0, [0, 2]], h[:2])
    _, want = recur(*[x[:, 40:104] for x in (q, k, v, g, b)], delta=True, state=h[1:2])
    assert error(states[:, 4], want) < 1e-5
    with pytest.raises(ValueError, match=r"return_intermediate_states outside of torch.inference_mode\(\)"):
        foxlm.chunk_kda(q, k, v, g, b, return_intermediate_states=True)


def test_empty_batch_and_empty_sequence():
    q, k, v, b = (x.detach() for x in delta_rule()[0])
    o, last = foxlm.chunk_delta_rule(q[:0], k[:0], v[:0], b[:0], output_final_state=True)
    assert o.shape == (0, T, H, V) and last.shape == (0, H, K, V)
    state = torch.randn(B, H, K, V)
    cut = [x[:, :0] for x in (q, k, v, b)]
    assert torch.equal(foxlm.chunk_delta_rule(*cut, initial_state=state, output_final_state=True)[1], state)


def test_second_derivatives_are_refused():
    x, ours, _ = simple_gla()
    (dq,) = torch.autograd.grad(ours(*x)[0].square().sum(), x[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="there are no second derivatives"):
        dq.square().sum().backward()
    q, k, v = (a.detach() for a in x)
    with pytest.raises(NotImplementedError, match="foxlm::scan has no forward-mode gradients"):
        torch.func.jvp(lambda q: ours(q, k, v)[0], (q,), (q,))


def test_opcheck():
    q, k, v, g = (x.detach() for x in gla()[0])
    x = [a.requires_grad_() for a in (q, k, v, torch.nn.functional.logsigmoid(g))]
    torch.library.opcheck(torch.ops.foxlm.scan, (*x, None, None, None, None, 0.3, False, True))


def test_errors():
    q, k, v, b = delta_rule()[0]
    with pytest.raises(ValueError, match=r"beta has shape \[2, 2, 150\], expected \[2, 150, 2\]"):
        foxlm.chunk_delta_rule(q, k, v, b.transpose(1, 2))
    with pytest.raises(TypeError, match="chunk_delta_rule has no argument initial_states"):
        foxlm.chunk_delta_rule(q, k, v, b, initial_states=None)
    with pytest.raises(ValueError, match=r"g_gamma has shape \[\], expected \[2\]"):
        foxlm.chunk_simple_gla(q, k, v, None, torch.tensor(0.5))
    with pytest.raises(ValueError, match="g_gamma is a float; it must be a tensor of PyTorch"):
        foxlm.chunk_simple_gla(q, k, v, None, 0.5)
    with pytest.raises(ValueError, match="gk is given; the delta rule has one decay for each head"):
        foxlm.fused_recurrent_gated_delta_rule(q, k, v, gk=k)
    with pytest.raises(ValueError, match="allow_neg_eigval needs use_beta_sigmoid_in_kernel"):
        foxlm.chunk_gated_delta_rule(q, k, v, b, b, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="`chunk_size` must be either 32 or 64 for chunk_kda, got 16"):
        foxlm.chunk_kda(q, k, v, k, b, chunk_size=16)
    with pytest.raises(ValueError, match="lower_bound is None; safe_gate needs one from -5 to 0"):
        foxlm.chunk_kda(q, k, v, k, b, use_gate_in_kernel=True, safe_gate=True)
    with pytest.raises(ValueError, match="lower_bound is 5.0; it must be below 0"):
        foxlm.fused_kda_gate(k, lower_bound=5.0)
    with pytest.raises(ValueError, match=r"g has shape \[3\]; it must be \[..., heads, dim\]"):
        foxlm.fused_kda_gate(k[0, 0, 0, :3])
    one = [x[:1] for x in (q, k, v, b)]
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu has shape \[3\], expected \[2\]"):
        ends = torch.tensor([0, 20, T])
        foxlm.chunk_delta_rule(*one, cu_seqlens=ends[[0, 2]], cu_seqlens_cpu=ends)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 30, 20, 150\]; it must start at 0, never fall"):
            foxlm.chunk_delta_rule(*[x.to(dtype) for x in one], cu_seqlens=torch.tensor([0, 30, 20, T]))
    with pytest.raises(ValueError, match="A_log is missing; it may be None only with lower_bound"):
        foxlm.chunk_kda(q, k, v, k, b, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match="A_log and dt_bias need use_gate_in_kernel"):
        foxlm.chunk_kda(q, k, v, k, b, A_log=b)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is the old name of state_v_first"):
        foxlm.chunk_gla(q, k, v, -k.abs(), transpose_state_layout=True)
    with pytest.raises(ValueError, match="q is a ndarray; it must be a tensor of PyTorch"):
        foxlm.chunk_delta_rule(q.detach().numpy(), k, v, b)
    with pytest.raises(ValueError, match=r"beta has shape None, expected \[2, 150, 2\]"):
        foxlm.chunk_delta_rule(q, k, v, None)
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \[0\]; it must hold 0 and the end of each sequence"):
        foxlm.chunk_delta_rule(*[x[:1] for x in (q, k, v, b)], cu_seqlens=torch.tensor([]))
    with pytest.raises(ValueError, match=r"initial_state has shape \[1, 2, 24, 40\], expected \[2, 2, 24, 40\]"):
        foxlm.chunk_delta_rule(q, k, v, b, initial_state=torch.zeros(1, H, K, V))


@pytest.mark.parametrize("delta", [False, True])
def test_decay_gradients_where_little_is_left(delta):
    """Decays of up to `e^-50`: the states after a chunk are almost all written after them."""
    q, k, v, g, b, h = draw((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, K, V))
    x = [a.detach() for a in (q, k / k.norm(dim=-1, keepdim=True), v, -50 * g.sigmoid(), b.sigmoid(), h)]
    w, last = draw((B, T, H, V), (B, H, K, V))

    def gradient(dtype):
        q, k, v, g, b, h = (a.to(dtype).requires_grad_() for a in x)
        op = foxlm.chunk_gated_delta_rule if delta else foxlm.chunk_simple_gla
        o, s = op(q, k, v, g, *([b] if delta else []), initial_state=h, output_final_state=True)
        return torch.autograd.grad((o * w.to(dtype)).sum() + (s * last.to(dtype)).sum(), g)[0]

    assert error(gradient(torch.float32), gradient(torch.float64)) < 1e-6
