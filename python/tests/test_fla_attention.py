"""Attention under the names of flash-linear-attention, and attention sinks, against a softmax in float64."""

import pytest
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402


def naive(q, k, v, g=None, sink=None, scale=None, window=None):
    """Causal attention with a key of logit `sink` that has no value; queries are the last positions."""
    q, k, v = q.double(), k.double(), v.double()
    (m, h, d), n = q.shape[1:], k.shape[1]
    k, v = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if scale is None else scale)
    if g is not None:
        c = g.double().transpose(1, 2).cumsum(-1)
        s = s + c[:, :, n - m :, None] - c[:, :, None]
    i, j = torch.arange(n - m, n)[:, None], torch.arange(n)[None]
    s = s.masked_fill(~((j <= i) & (i - j < (window or n))), float("-inf"))
    if sink is not None:
        s = torch.cat((s, sink.double()[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., :n], v)


def operands(m=70, n=70, dv=24):
    draw = torch.Generator().manual_seed(2)
    shapes = [(2, m, 4, 16), (2, n, 2, 16), (2, n, 2, dv), (2, n, 4), (4,)]
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 9])
def test_sinks_have_gradients(window):
    q, k, v, g, sink = operands()
    low = torch.nn.functional.logsigmoid
    o = foxlm.parallel_attn(q, k, v, low(g), 0.3, window, sink_bias=sink)
    want = naive(q, k, v, low(g), sink, 0.3, window)
    torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)
    w, leaves = torch.randn(o.shape), (q, k, v, g, sink)
    for got, right in zip(torch.autograd.grad(o, leaves, w), torch.autograd.grad(want, leaves, w.double())):
        torch.testing.assert_close(got, right, atol=2e-4, rtol=2e-4)


def test_window_of_zero_sees_nothing():
    q, k, v, _, sink = operands()
    o = foxlm.parallel_attn(q, k, v, window_size=0, sink_bias=sink)
    assert o.abs().max() == 0
    assert all(x.abs().max() == 0 for x in torch.autograd.grad(o.sum(), (q, k, v, sink)))


def test_decoding_reads_packed_sequences():
    q, k, v, g, sink = (x.detach() for x in operands(m=3, n=70, dv=300))
    gates, ends = torch.nn.functional.logsigmoid(g[:1]), [0, 20, 20, 70]
    for scaled in (False, True):
        o = foxlm.attn_decoding_one_step(
            q[:1], k[:1], v[:1], gates, 0.4, torch.tensor(ends), scaled, sink_bias=sink
        )
        assert o.shape == (1, 3, 4, 300) and o[0, 1].abs().max() == 0
        for n in (0, 2):
            cut = slice(ends[n], ends[n + 1])
            part = gates[:, cut] * (0.4 if scaled else 1)
            want = naive(q[:1, n : n + 1], k[:1, cut], v[:1, cut], part, sink, 0.4)
            torch.testing.assert_close(o[0, n].double(), want[0, 0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="cu_seqlens is missing"):
        foxlm.attn_decoding_one_step(q[:1], k[:1], v[:1])


def test_token_shift_mixes_with_the_token_before():
    x, w = torch.randn(2, 7, 3, 5).half(), torch.rand(2, 7, 3)
    want = x.float() * w[..., None]
    want[:, 1:] += x[:, :-1].float() * (1 - w[:, 1:, :, None])
    torch.testing.assert_close(foxlm.token_shift(x, 1 - w, w), want.half())


def test_errors():
    q, k, v, g, sink = operands()
    with pytest.raises(TypeError, match="unexpected keyword argument .windows."):
        foxlm.parallel_attn(q, k, v, windows=3)
    with pytest.raises(ValueError, match=r"sink_bias has shape \[2\], expected \[4\]: one for each query head"):
        foxlm.parallel_attn(q, k, v, sink_bias=sink[:2])
    with pytest.raises(ValueError, match="attention sinks need tensors of PyTorch"):
        a = q.detach().numpy()
        foxlm.forgetting_attention(a, a, a, sink_bias=sink.detach().numpy())
    ends = torch.tensor([0, 70])
    for name, part in (("v", {"v": v[:1, :5]}), ("g", {"v": v[:1], "g": g[:1, :5]})):
        with pytest.raises(ValueError, match=rf"{name} has shape \[1, 5, .*expected \[1, 70, "):
            foxlm.attn_decoding_one_step(q[:1, :1], k[:1], **part, cu_seqlens=ends)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 80, 70\]; it must start at 0, never fall"):
            foxlm.parallel_attn(*[x[:1].to(dtype) for x in (q, k, v)], cu_seqlens=torch.tensor([0, 80, 70]))
    with pytest.raises(ValueError, match=r"x has shape \[2, 70, 4, 16\] and prev_weight \[4\]; they must fit"):
        foxlm.token_shift(q, sink, sink)


@pytest.mark.parametrize("window", [None, 9])
def test_gates_above_one_are_columns_of_keys(window):
    from foxlm._fla_attention import growing_attention

    q, k, v, g, sink = operands()
    assert (g > 0).any()
    d_out = torch.randn(2, 70, 4, 24, generator=torch.Generator().manual_seed(3))
    want = naive(q, k, v, g, sink, 0.3, window)
    wanted = torch.autograd.grad(want, (q, k, v, g, sink), d_out.double())
    for op in (growing_attention, lambda q, k, v, g, scale, window, ends, sink: foxlm.parallel_attn(
        q, k, v, g, scale, window, ends, sink_bias=sink)):  # fmt: skip
        o = op(q, k, v, g, 0.3, window, None, sink)
        torch.testing.assert_close(o, want.float(), atol=2e-5, rtol=2e-5)
        for a, b in zip(torch.autograd.grad(o, (q, k, v, g, sink), d_out), wanted):
            torch.testing.assert_close(a, b.float(), atol=2e-4, rtol=2e-4)
    ends = torch.tensor([0, 30, 70])
    packed = growing_attention(q[:1], k[:1], v[:1], g[:1], cu_seqlens=ends)
    parts = [naive(*[x[:1, a:b] for x in (q, k, v, g)]) for a, b in ((0, 30), (30, 70))]
    torch.testing.assert_close(packed, torch.cat(parts, 1).float(), atol=2e-5, rtol=2e-5)
