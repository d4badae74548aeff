"""Transforms of `torch.func`, float64, autocast and export, for attention, sinks and scans."""

import pytest
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402

low = torch.nn.functional.logsigmoid


def attention(q, k, v, g):
    return foxlm.forgetting_attention(q, k, v, low(g))


def sinks(q, k, v, g):
    return foxlm.parallel_attn(q, k, v, low(g), sink_bias=g[0, 0])


def gla(q, k, v, g):
    o, last = foxlm.chunk_simple_gla(q, k, v, low(g), output_final_state=True)
    return o + last.sum()


def delta(q, k, v, g):
    return foxlm.chunk_gated_delta_rule(q, k / 3, v, low(g), g.sigmoid(), initial_state=v[:, :8].transpose(1, 2))[0]


def path(q, k, v, g):
    return foxlm.parallel_path_attn(q, k, v, torch.nn.functional.normalize(k + v, dim=-1), g.sigmoid(), low(g))[0]


def wall(q, k, v, g):
    return foxlm.parallel_wall_attn(q, k, v, low(q + v), g_scalar=low(g), sink_bias=g[0, 0])


OPS = [attention, sinks, gla, delta, path, wall]


def operands(dtype=torch.float32, n=9):
    draw = torch.Generator().manual_seed(3)
    shapes = [(2, n, 2, 8)] * 3 + [(2, n, 2)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", OPS)
def test_func_transforms_equal_autograd(op):
    x = operands()
    leaves = [a.clone().requires_grad_() for a in x]
    loss = lambda *x: op(*x).square().sum()
    want = torch.autograd.grad(loss(*leaves), leaves)
    for got, right in zip(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*x), want):
        torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)
    row = lambda *x: op(*x)[0, -1, 0]
    jacobian = torch.func.jacrev(row, argnums=1)(*x)
    (first,) = torch.autograd.grad(row(*leaves)[0], leaves[1])
    torch.testing.assert_close(jacobian[0], first, atol=1e-4, rtol=1e-4)
    one = lambda *x: loss(*[a[None] for a in x])
    each = torch.vmap(torch.func.grad(one))(*x)
    alone = torch.stack([torch.func.grad(one)(*[a[n] for a in x]) for n in range(2)])
    torch.testing.assert_close(each, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_activation_checkpointing(op, reentrant):
    from torch.utils.checkpoint import checkpoint

    x = [a.requires_grad_() for a in operands()]
    block = lambda q, *rest: op(q.cos(), *rest).sin()
    want = torch.autograd.grad(block(*x).sum(), x)
    leaves = [a.detach().requires_grad_() for a in x]
    checkpoint(block, *leaves, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(a.grad, b) for a, b in zip(leaves, want))


@pytest.mark.parametrize("op", OPS)
def test_float64_is_exact(op):
    x = [a.requires_grad_() for a in operands(torch.float64)]
    assert torch.autograd.gradcheck(op, x, fast_mode=True)
    assert op(*x).dtype == torch.float64
    torch.testing.assert_close(op(*operands()).double(), op(*x), atol=1e-5, rtol=1e-5)


def test_float64_has_the_options_of_attention():
    q, k, v, g = operands(n=20)
    gates, start, ends = low(g), torch.tensor([3, 20]), torch.tensor([0, 7, 7, 20])
    for options in ({}, {"causal": False}, {"window": 4}, {"seq_start": start}, {"sm_scale": 0.7, "head_first": True}):
        x = [y.transpose(1, 2) for y in (q, k, v, gates)] if "head_first" in options else [q, k, v, gates]
        o, lse = foxlm.forgetting_attention(*x, return_lse=True, **options)
        want, sums = foxlm.forgetting_attention(*[y.double() for y in x], return_lse=True, **options)
        torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)
        seen = sums.isfinite()
        torch.testing.assert_close(lse.double()[seen], sums[seen], atol=1e-5, rtol=1e-5)
    one = [y[:1] for y in (q, k, v, gates)]
    o = foxlm.forgetting_attention(*one, cu_seqlens=ends)
    want = foxlm.forgetting_attention(*[y.double() for y in one], cu_seqlens=ends)
    torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_export_with_another_length(op):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, g):
            return op(q, k, v, g)

    x, time = operands(n=12), torch.export.Dim("time", min=9, max=512)
    exported = torch.export.export(Module(), tuple(x), dynamic_shapes=({1: time},) * 4).module()
    short = [a[:, :10] for a in x]
    torch.testing.assert_close(exported(*short), op(*short), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_autocast_has_gradients_in_float32(op):
    x = [a.requires_grad_() for a in operands()]
    with torch.autocast("cpu", torch.bfloat16):
        o = op(*x)
    assert o.dtype in (torch.bfloat16, torch.float32)
    for got, want in zip(torch.autograd.grad(o.float().sum(), x), torch.autograd.grad(op(*x).sum(), x)):
        assert got.dtype == torch.float32 and (got - want).norm() < 0.05 * want.norm() + 0.05
