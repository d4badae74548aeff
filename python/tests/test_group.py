"""Forgetting attention over a sequence that is sharded over gloo ranks, against the op on the whole sequence."""

import numpy as np
import pytest
from conftest import need

torch = need("torch")

import foxlm  # noqa: E402
from foxlm import context  # noqa: E402
from test_attention_torch import errors  # noqa: E402

CASES = {
    "plain": {},
    "remembering": {"gate": 6.0},
    "spread": {"gate": [-2.0, 1.0, 3.0, 8.0]},
    "no gates": {"gate": None},
    "grouped heads": {"hk": 2, "gate": [-2.0, 8.0, 2.0, 2.0]},
    "window": {"window": 90, "gate": 6.0},
    "short window": {"window": 5},
    "window without gates": {"window": 150, "gate": None},
    "pruned": {"log_tolerance": -20.0, "gate": 2.0},
    "threshold": {"adaptive_threshold": -40.0, "gate": 2.0},
    "packed": {"b": 1, "ends": [0, 30, 290, 300, 560, 600], "gate": 4.0},
    "packed, forgetting": {"b": 1, "ends": [0, 30, 290, 300, 600]},
    "packed, pruned": {"b": 1, "ends": [0, 10, 600], "log_tolerance": -20.0, "gate": 2.0},
    "packed at the cuts": {"b": 1, "ends": [0, 150, 300, 300, 450, 600], "gate": 4.0},
    "left padding": {"starts": [3, 380], "gate": 4.0},
    "unequal chunks": {"cuts": {2: [200, 400], 4: [100, 1, 299, 200]}, "gate": 3.0},
    "head first": {"head_first": True},
    "other values": {"dv": 24, "scale": 0.3},
    "sinks": {"sink": True, "gate": 3.0},
    "closed gates": {"gate": [float("-inf"), 0.0, 3.0, 8.0]},
    "everything": {"hk": 2, "b": 1, "ends": [0, 20, 600], "window": 170, "gate": 4.0, "log_tolerance": -20.0, "dv": 24},
}  # fmt: skip


def make(case, dtype=torch.float32):
    b, t, h, hk, d = case.get("b", 2), case.get("t", 600), 4, case.get("hk", 4), 16
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    x = [draw(b, t, h, d), draw(b, t, hk, d), draw(b, t, hk, case.get("dv", d))]
    gate = case.get("gate", 0.0)
    gates = None if gate is None else torch.nn.functional.logsigmoid(draw(b, t, h) + torch.tensor(gate))
    sink = draw(h) if case.get("sink") else None
    x = [a.to(dtype) for a in x] + [gates if dtype != torch.float64 or gates is None else gates.double(), sink]
    return x, draw(b, t, h, case.get("dv", d)).to(dtype)


def options(case):
    chosen = {name: case[name] for name in ("window", "log_tolerance", "adaptive_threshold") if name in case}
    chosen |= {"sm_scale": case.get("scale"), "return_lse": True, "head_first": case.get("head_first", False)}
    for name, key in (("cu_seqlens", "ends"), ("seq_start", "starts")):
        chosen |= {name: torch.tensor(case[key])} if key in case else {}
    return chosen


def compute(x, d_out, case, **more):
    """Output, log sums, and gradients of all operands."""
    turn = lambda a: a.transpose(1, 2) if case.get("head_first") and a is not None else a
    leaves = [None if a is None else a.detach().clone().requires_grad_() for a in x]
    q, k, v, gates, sink = leaves
    o, lse = foxlm.forgetting_attention(*map(turn, (q, k, v, gates)), sink_bias=sink, **options(case), **more)
    o, lse = turn(o), turn(lse)
    wanted = [a for a in leaves if a is not None]
    return [o.detach(), lse, *torch.autograd.grad(o, wanted, d_out)]


def cuts(case, size):
    return case.get("cuts", {}).get(size) or [case.get("t", 600) // size] * size


def sharded(rank, group, case, dtype=torch.float32):
    size = group.size()
    x, d_out = make(case, dtype)
    cut = lambda a: None if a is None else a.split(cuts(case, size), 1)[rank]
    context.traffic(reset=True)
    found = compute([*map(cut, x[:4]), x[4]], cut(d_out), case, group=group)
    return [a.float().numpy() if dtype != torch.float64 else a.numpy() for a in found], tuple(context.traffic())


def joined(ranks, size, case, dtype=torch.float32):
    """The results of all ranks as those of one, and the traffic of all."""
    results, traffic = zip(*ranks.run(size, sharded, case, dtype))
    whole = [torch.cat([torch.from_numpy(a) for a in x], 1) for x in list(zip(*results))[: 6 if gated(case) else 5]]
    if case.get("sink"):
        whole.append(torch.stack([torch.from_numpy(x[-1]) for x in results]).sum(0))
    return whole, [sum(x) for x in zip(*traffic)]


def gated(case):
    return case.get("gate", 0.0) is not None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_whole_op(ranks, name, size):
    case = CASES[name]
    want = compute(*make(case), case)
    got, _ = joined(ranks, size, case)
    assert len(got) == len(want)
    for what, a, b in zip(("o", "lse", "dq", "dk", "dv", "dg", "dsink"), got, want):
        seen = b.isfinite()
        assert torch.equal(seen, a.isfinite()), what
        assert max(errors(a[seen], b[seen])) < 1e-5, what


@pytest.mark.parametrize("name", ["spread", "packed", "everything"])
def test_bfloat16_error_matches_whole_op(ranks, name):
    case = CASES[name]
    exact = compute(*make(case), case)
    x, d_out = make(case)
    rounded = [a.bfloat16() for a in x[:3]] + x[3:], d_out.bfloat16()
    # The error of rounding and of the op on the whole sequence, from the same rounded operands in float32.
    exact = compute([a.float() for a in rounded[0][:3]] + x[3:], rounded[1].float(), case)
    rough = compute(*rounded, case)
    got, _ = joined(ranks, 4, case, torch.bfloat16)
    for what, a, b, c in zip(("o", "lse", "dq", "dk", "dv", "dg"), got, rough, exact):
        assert errors(a, c)[0] <= 2 * errors(b.float(), c)[0] + 1e-6, what


@pytest.mark.parametrize("name", ["plain", "packed", "pruned"])
def test_float64_is_exact(ranks, name):
    case = CASES[name]
    want = compute(*make(case, torch.float64), case)
    for a, b in zip(joined(ranks, 2, case, torch.float64)[0], want):
        assert max(errors(a, b)) < 1e-12


def frozen(rank, group, needed):
    """Gradients where only some operands have them."""
    x, d_out = make(CASES["remembering"])
    leaves = [a.chunk(group.size(), 1)[rank].clone().requires_grad_(n in needed) for n, a in enumerate(x[:4])]
    o = foxlm.forgetting_attention(*leaves, group=group)
    o.backward(d_out.chunk(group.size(), 1)[rank])
    return [None if a.grad is None else a.grad.numpy() for a in leaves]


@pytest.mark.parametrize("needed", [[0], [2], [1, 3]])
def test_operands_without_gradients(ranks, needed):
    want = compute(*make(CASES["remembering"]), {})[2:]
    for n, parts in enumerate(zip(*ranks.run(2, frozen, needed))):
        if n in needed:
            whole = torch.cat([torch.from_numpy(x) for x in parts], 1)
            assert max(errors(whole, want[n])) < 1e-5
        else:
            assert parts == (None, None)


def chunks(rank, group):
    x = torch.arange(7)[None]
    found = [context.chunk(x, group).tolist()[0], context.chunk(x[0], group, 0).tolist()]
    try:
        context.chunk(x[:, :1], group)
    except ValueError as error:
        return *found, str(error)


def test_chunks_are_contiguous(ranks):
    for want, found in zip(([0, 1, 2, 3], [4, 5, 6]), ranks.run(2, chunks)):
        assert found == (want, want, "1 entries cannot be cut into 2 chunks; every rank needs one or more")


def test_same_bits_every_time(ranks):
    case = {**CASES["grouped heads"], "gate": 6.0}
    first, again = (joined(ranks, 4, case, torch.bfloat16)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_gradients_are_added_in_rank_order():
    from foxlm._group_exchange import Exchange
    from foxlm._group_plan import Plan, Sequences
    from foxlm._group_wire import Pending, pack

    class Wire:
        rank, size = 0, 4

    k = torch.ones(1, 2, 1, 1)
    exchange = Exchange(Wire, Plan(Sequences(1, [2] * 4, None, None), 0, 1, 1, None), [k, k])
    row = lambda x: pack([torch.full((2, 1), x), torch.full((2, 1), x)])
    # As if the messages had come in another order; in float32 only the order of the ranks gives 5.
    exchange.pending = Pending([], {}, {3: row(5.0), 1: row(1e9), 2: row(-1e9)})
    for found in exchange.add_gradients([k, k], [0, 1]):
        assert found.flatten().tolist() == [5.0, 5.0]


def test_strong_forgetting_sends_few_bytes(ranks):
    case = {"b": 1, "t": 8192, "gate": 0.0, "log_tolerance": -10.0}
    _, (sent, full) = joined(ranks, 4, case)
    assert full == sum(n * 2048 * (2 * 4 * 16 + 4) * 4 for n in (1, 2, 3))
    assert 0 < sent < 0.15 * full
    _, (all_sent, all_full) = joined(ranks, 4, {**CASES["no gates"], "b": 1})
    assert all_sent == all_full


def plain_on_one_rank(rank, group):
    x, d_out = make({})
    return [a.numpy() for a in compute(x, d_out, {}, group=group)]


def test_group_of_one_rank(ranks):
    (got,) = ranks.run(1, plain_on_one_rank)
    for a, b in zip(got, compute(*make({}), {})):
        assert np.array_equal(a, b.numpy())


def wrong(rank, group, change):
    """A call in which the last rank differs."""
    x, _ = make({"t": 100})
    more = {}
    if rank == group.size() - 1:
        if change == "dtype":
            x[1] = x[1].bfloat16()
        elif change == "heads":
            x[1:3] = [a[:, :, :2] for a in x[1:3]]
        elif change == "gates":
            x[3] = None
        elif change == "window":
            more["window"] = 7
        elif change == "shape":
            x[2] = x[2][:, :50]
        elif change == "empty":
            x = [None if a is None else a[:, :0] for a in x]
        elif change == "gradient":
            x[2].requires_grad_()
        elif change == "positive":
            x[3] = x[3] + 2
        elif change == "sink":
            more["sink_bias"] = torch.zeros(3)
    if change == "length":
        x = [None if a is None else a[:1] for a in x]
        more["cu_seqlens"] = torch.tensor([0, 100])
    if change == "starts":
        more["seq_start"] = torch.tensor([rank, rank])
    if change == "bidirectional":
        more["causal"] = False
    q, k, v, gates, _ = x
    foxlm.forgetting_attention(q, k, v, gates, group=group, **more)


@pytest.mark.parametrize(
    "change, first, last",
    [
        ("dtype", "the type of k is bfloat16 on rank 1, but float32 on rank 0; ranks of a group must agree", None),
        ("heads", "the number of key heads is 2 on rank 1, but 4 on rank 0", None),
        ("gates", "the type of log_fgate is missing on rank 1, but float32 on rank 0", None),
        ("window", "window is 7 on rank 1, but None on rank 0", None),
        ("shape", "rank 1 of the group refused its arguments", "they must have as many keys and heads"),
        ("empty", "rank 1 of the group refused its arguments", "every rank of the group needs one or more"),
        ("gradient", "the set of operands with gradients is 010", None),
        ("positive", "at most on rank 1; logs of gates must not be above 0", None),
        ("sink", "rank 1 of the group refused its arguments", "sink_bias has shape [3], expected [4]"),
        ("length", "and end at 200, the tokens of all ranks (100 + 100)", None),
        ("starts", "seq_start on rank 1 differs from that on rank 0", None),
        ("bidirectional", "ranks send keys to later ranks only, so use causal=True", None),
    ],
)
def test_mistake_is_an_error_on_all_ranks(ranks, change, first, last):
    outcomes = ranks.outcomes(2, wrong, change)
    for (succeeded, found), sentence in zip(outcomes, (first, last or first)):
        assert not succeeded and found[0] == "ValueError" and sentence in found[1], found
        assert "\n" not in found[1]


def compiled(rank, group):
    x, _ = make({"t": 128})
    q, k, v, gates = (a.chunk(2, 1)[rank] for a in x[:4])
    call = lambda q, k, v, gates: foxlm.forgetting_attention(q * 2, k, v, gates, group=group).sin()
    torch._dynamo.reset()
    same = torch.equal(torch.compile(call, backend="eager")(q, k, v, gates), call(q, k, v, gates))
    torch._dynamo.reset()
    try:
        torch.compile(call, backend="eager", fullgraph=True)(q, k, v, gates)
    except Exception as error:
        return same, type(error).__name__
    return same, None


def test_compile_breaks_the_graph(ranks):
    for same, error in ranks.run(2, compiled):
        assert same and error == "Unsupported"


def test_group_must_be_a_process_group():
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="group is a str; it must be a process group, or a DeviceMesh"):
        foxlm.forgetting_attention(x, x, x, group="world")
    with pytest.raises(ValueError, match="group is given with arrays of NumPy"):
        foxlm.forgetting_attention(x.numpy(), x.numpy(), x.numpy(), group="world")
