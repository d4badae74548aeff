"""Everything that foxlm promises on a GPU, in one call: python bench/h200.py (--help for its options)

Correctness first: values and gradients of every feature against a naive version in float64, layouts, streams,
compilation, CUDA graphs, memory. Then the host's time of a call, and speeds beside PyTorch's attention, the published
kernel and flash-linear-attention where they can be imported (`--published` adds a folder to the import path), beside
`fox bench attention` (`--fox`), and of the published model before and after the swap. A check that fails is named and
makes the exit status 1; the others still run. `--only` picks parts by name.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback

import torch
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "tests"), os.path.join(HERE, "..", "examples")]

import foxlm  # noqa: E402
import test_attention_torch as attention  # noqa: E402
import test_scans_torch as scans  # noqa: E402

FAILED = []


def section(f):
    """Runs a part; a failure is reported and does not end the others."""
    print(f"\n== {f.__doc__.splitlines()[0]}", flush=True)
    try:
        f()
    except Exception:
        FAILED.append(f.__name__)
        traceback.print_exc()


def check(name, holds, detail=""):
    if not holds:
        FAILED.append(name)
    print(f"{'ok  ' if holds else 'FAIL'} {name} {detail}", flush=True)


def values():
    """Values and gradients against float64: bf16 error at most twice that of a naive bf16 version, float32 below
    2e-5"""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for name, case in attention.CASES.items():
            for head_first in (False, True):
                x = attention.make(**case, dtype=dtype, device="cuda")
                if head_first:
                    if case.get("hk", 3) != case.get("h", 3):
                        continue
                    x = [None if a is None else a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                         for a in x]  # fmt: skip
                low = torch.bfloat16 if dtype == torch.bfloat16 else dtype
                rounded = lambda *a, **c: attention.naive(*a, dtype=low, **c)
                try:
                    # Of few numbers one draw says little: squares of the errors of three are compared.
                    squares = {}
                    for _ in range(3):
                        d_out = torch.randn(*x[0].shape[:3], x[2].shape[3], device="cuda").to(dtype)
                        got, want, rough = (
                            attention.run(f, x, case, d_out) for f in (attention.ours, attention.naive, rounded)
                        )
                        for i, (a, b, c) in enumerate(zip(got, want, rough)):
                            for kind in (0, 1):
                                error, allowed = attention.errors(a, b)[kind], attention.errors(c, b)[kind]
                                allowed = 2e-5 if dtype == torch.float32 else 2 * allowed
                                known = squares.setdefault((i, kind), [0.0, 0.0])
                                known[0], known[1] = known[0] + error**2, known[1] + allowed**2
                    worst = max((error / allowed) ** 0.5 for error, allowed in squares.values())
                    check(
                        f"{name}, {str(dtype)[6:]}, {'head' if head_first else 'time'} first",
                        worst <= 1,
                        f"{worst:.2f} of what is allowed",
                    )
                except Exception as error:
                    check(f"{name}, {str(dtype)[6:]}, {'head' if head_first else 'time'} first", False, repr(error))


def recurrences():
    """Scans against float64, with gradients of states"""
    for make in scans.KINDS:
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            x, ours, naive = make()
            try:
                x = [a.detach().cuda().to(dtype).requires_grad_() for a in x]
                (o, last), (want, end) = ours(*x), naive(*x)
                # The gradient of a few numbers is a sum that may nearly cancel; its relative error is large then: the
                # median of five draws counts. What is wrong is wrong in all of them.
                draws = []
                for _ in range(5):
                    w = torch.randn(o.shape, device="cuda")
                    got, right = (o * w.to(o.dtype)).sum(), (want * w.to(want.dtype)).sum()
                    if last is not None:
                        w = torch.randn(last.shape, device="cuda")
                        got, right = got + (last * w).sum(), right + (end * w).sum()
                    ours_d = torch.autograd.grad(got, x, retain_graph=True)
                    naive_d = torch.autograd.grad(right, x, retain_graph=True)
                    draws.append([scans.error(a, b) for a, b in zip(ours_d, naive_d)])
                # Sums over all tokens that give few numbers cancel a hundredfold: they are checked in float32 alone.
                kept = [n for n, a in enumerate(x) if dtype == torch.float32 or a.numel() >= 16]
                medians = [sorted(errors)[2] for errors in zip(*draws)]
                worst = max(scans.error(o, want), *(medians[n] for n in kept))
                check(f"{make.__name__}, {str(dtype)[6:]}", worst < limit, f"{worst:.1e}")
            except Exception as error:
                check(f"{make.__name__}, {str(dtype)[6:]}", False, repr(error))


def make(b, t, h, d, dtype=torch.bfloat16, head_first=False):
    """As in the peers' table: decay times from 8 to 1e5 tokens over the heads, plus noise."""
    torch.manual_seed(0)
    shape = (b, h, t, d) if head_first else (b, t, h, d)
    x = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]
    times = torch.logspace(torch.log10(torch.tensor(8.0)), 5, h, device="cuda")
    logits = -torch.log(torch.expm1(1 / times)) + torch.randn(b, t, h, device="cuda")
    g = F.logsigmoid(logits)
    return [a.requires_grad_() for a in x + [g.transpose(1, 2).contiguous() if head_first else g]]


def machinery():
    """No copies, streams, compilation, graphs, memory"""
    f = foxlm.forgetting_attention
    for head_first in (False, True):
        x = [a.detach() for a in make(2, 2048, 12, 64, head_first=head_first)]
        f(*x, head_first=head_first)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = f(*x, head_first=head_first)
        used = torch.cuda.max_memory_allocated() - before
        check(
            f"{'head' if head_first else 'time'} first: PyTorch allocates the results alone",
            used < 1.2 * o.nbytes,
            f"{used >> 10} KiB",
        )
    x = make(2, 2048, 12, 64)
    want = f(*x).detach()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        got = f(*x)
        grads = torch.autograd.grad(got.float().square().sum(), x)
    side.synchronize()
    check("a second stream gives the same bits", torch.equal(got, want) and all(g.isfinite().all() for g in grads))
    g = lambda *a: f(a[0] * 2, *a[1:]).sin().float().sum()
    fast = torch.compile(g, fullgraph=True)
    a, b = torch.autograd.grad(fast(*x), x), torch.autograd.grad(g(*x), x)
    worst = max(((p.float() - q.float()).norm() / q.float().norm()).item() for p, q in zip(a, b))
    check("torch.compile(fullgraph=True)", worst < 1e-2, f"{worst:.1e}")
    static = [a.detach().clone() for a in x]
    with torch.cuda.stream(side):
        for _ in range(3):
            f(*static)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            o = f(*static)
        static[0].neg_()
        graph.replay()
        side.synchronize()
        got = o.clone()
        side.synchronize()
    check("a CUDA graph follows its inputs", torch.equal(got, f(*static)))
    leaves = [a.detach().requires_grad_() for a in x]
    step = lambda: f(*leaves, adaptive_threshold="auto").float().sum().backward()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    held, free = (torch.cuda.memory_allocated(), foxlm.cuda_memory()), torch.cuda.mem_get_info()[0]
    for _ in range(1000):
        step()
    torch.cuda.synchronize()
    now = (torch.cuda.memory_allocated(), foxlm.cuda_memory())
    grown = free - torch.cuda.mem_get_info()[0]
    check(
        "1,000 steps take no more memory",
        now == held and grown < 64 << 20,
        f"{grown >> 20} MiB, scratch {now[1] >> 20} MiB",
    )


def call_times(f):
    """Microseconds of a call on the host, and until the device is done too, medians over rounds that are too short to
    fill the queue of launches."""
    host, device = [], []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            f()
        host.append(2e4 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        device.append(2e4 * (time.perf_counter() - start))
    return sorted(host)[20], sorted(device)[20]


def overhead():
    """Microseconds of a call on the host, and with the device, 1 x 64 x 1 x 64"""
    from foxlm import _cuda, _direct, _torch

    y = make(1, 64, 1, 64)
    x, w = [a.detach() for a in y], torch.randn_like(y[0])
    f = foxlm.forgetting_attention
    place, options = _cuda._place(x[0]), (0.125, True, None, None)
    core = _cuda.Call(*x[:3], None, None, *options).core
    at = [a.data_ptr() for a in x]
    o, lse = _torch.results(*x[:3])
    made = [torch.empty_like(a) for a in x]
    saved = o.data_ptr(), lse.data_ptr(), w.data_ptr(), *[a.data_ptr() for a in made]
    launches = lambda: core.forward(*place, *at, 0, o.data_ptr(), lse.data_ptr())
    launches_back = lambda: core.backward(*place, *at, 0, *saved)
    operands = (*x, None, None, None, *options)
    _direct._kinds.clear()
    kept = f(*y)
    (kind,) = _direct._kinds.values()
    check("plain calls take the short way", kind is not None)
    sdpa = lambda x: F.scaled_dot_product_attention(*[a.transpose(1, 2) for a in x[:3]], is_causal=True)
    rows = {
        "launches of a forward": launches,
        "launches of a backward": launches_back,
        "forward": lambda: f(*x),
        "forward, the registered op": lambda: torch.ops.foxlm.attention.default(*operands),
        "forward that keeps for the backward": lambda: f(*y),
        "backward": lambda: torch.autograd.grad(kept, y, w, retain_graph=True),
        "backward, without autograd": torch.no_grad()(lambda: kind.backward(w, *x[:3], o, lse, x[3], None)),
        "forward and backward": lambda: torch.autograd.grad(f(*y), y, w),
        "SDPA forward": lambda: sdpa(x),
        "SDPA forward and backward": lambda: torch.autograd.grad(sdpa(y), y[:3], w.transpose(1, 2)),
    }
    times = {}
    for name, g in rows.items():
        times[name], device = call_times(g)
        print(f"     {name:36} {times[name]:7.1f} {device:7.1f}", flush=True)
    above = times["forward"] - times["launches of a forward"]
    check("a forward costs less than 15 us above its launches", above < 15, f"{above:.1f}")


def clock(f):
    """Milliseconds of the device, median over five rounds."""
    rounds, count = [], 1
    for n in range(7):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(count):
            f()
        b.record()
        torch.cuda.synchronize()
        rounds.append(a.elapsed_time(b) / count)
        if n == 1:  # the first compiled the kernels
            count = max(1, min(10, int(20 / rounds[1])))
    return sorted(rounds[2:])[2]


def peers():
    """Implementations to compare with, all time first: name to function."""
    sdpa = lambda q, k, v, g: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    found = {
        "foxlm": foxlm.forgetting_attention,
        "foxlm, pruned": lambda *x: foxlm.forgetting_attention(*x, adaptive_threshold="auto"),
        "SDPA without gates": sdpa,
    }
    try:
        from forgetting_transformer.ops.forgetting_attention import forgetting_attention as published

        found["published"] = published
        found["published, pruned"] = lambda *x: published(*x, adaptive_threshold="auto")
    except Exception as error:
        print(f"     the published kernel cannot be imported: {error}")
    try:
        from fla.ops.forgetting_attn import parallel_forgetting_attn as fla

        found["flash-linear-attention"] = lambda *x: fla(*x)
    except Exception as error:
        print(f"     flash-linear-attention cannot be imported: {error}")
    return found


def both(f, x, needed, w):
    """Milliseconds of a forward and of a backward."""
    detached = [a.detach() for a in x]
    forward = clock(lambda: f(*detached))
    o = f(*x)
    return forward, clock(lambda: torch.autograd.grad(o, needed, w, retain_graph=True))


def speeds():
    """Attention, milliseconds and TFLOP/s (causal: forward 2 B H T^2 d, backward 2.5 times that)"""
    start, found = time.monotonic(), peers()
    shapes = [(4 if t <= 4096 else 1, t, 24 * 64 // d, d) for t in ARGUMENTS.lengths for d in (64, 128)]
    for b, t, h, d in shapes[: 2 if ARGUMENTS.quick else None]:
        x = make(b, t, h, d)
        flops = 2 * b * h * t * t * d
        w = torch.randn_like(x[0])
        times = {}
        for name, f in found.items():
            line = f"B{b} H{h} T{t} d{d}  {name:24}"
            if time.monotonic() - start > ARGUMENTS.seconds:
                print(f"{line} not measured: {ARGUMENTS.seconds} s are over")
                continue
            try:
                forward, backward = times[name] = both(f, x, x if "without" not in name else x[:3], w)
                rates = f"{flops / forward / 1e9:5.0f} / {2.5 * flops / backward / 1e9:5.0f} TFLOP/s"
                print(f"{line} {forward:8.3f} + {backward:8.3f} ms   {rates}", flush=True)
            except Exception as error:
                print(f"{line} failed: {type(error).__name__}: {str(error)[:100]}")
        for ours, theirs in (
            ("foxlm", "published"),
            ("foxlm", "flash-linear-attention"),
            ("foxlm", "SDPA without gates"),
            ("foxlm, pruned", "published, pruned"),
        ):
            if ours in times and theirs in times:
                ratio = sum(times[theirs]) / sum(times[ours])
                print(f"     {ours}: {ratio:.2f}x as fast as {theirs}, forward and backward", flush=True)


def as_fox():
    """Through Python and by `fox bench attention`, milliseconds: within 3%"""
    if not ARGUMENTS.fox:
        print("     not run: --fox names no executable")
        return
    for t, h, d, pruning in ((16384, 24, 64, False), (16384, 12, 128, False), (16384, 24, 64, True)):
        command = [ARGUMENTS.fox, *"bench attention --device cuda --repeat 3 --json".split()]
        command += ["--seq", str(t), "--heads", str(h), "--head-dim", str(d), *(["--acp=-10"] if pruning else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            check(" ".join(command[1:]), False, done.stderr.strip())
            continue
        theirs = json.loads(done.stdout)
        x = make(1, t, h, d)
        # The gates of the command, which decide what is pruned.
        times = torch.logspace(torch.log10(torch.tensor(8.0)), 5, h, device="cuda")
        with torch.no_grad():
            x[3].copy_(-(1 + torch.randn(1, t, h, device="cuda") / 2).abs() / times)
        option = {"log_tolerance": -10.0} if pruning else {}
        forward, backward = both(lambda *x: foxlm.forgetting_attention(*x, **option), x, x, torch.randn_like(x[0]))
        for name, own, other in (("forward", forward, theirs["fwd_ms"]), ("backward", backward, theirs["bwd_ms"])):
            what = f"{name}, H{h} T{t} d{d}{', pruned' if pruning else ''}"
            check(what, own < 1.03 * other, f"{own:.3f} ms, fox bench attention {other:.3f}: {own / other:.3f}")


def model():
    """The published model's own training step, before and after the swap, T 16384"""
    try:
        import forgetting_transformer.model  # noqa: F401
    except Exception as error:
        print(f"     not run: the published package cannot be imported ({error})")
        return
    import published

    published.main()


PARTS = (values, recurrences, machinery, overhead, as_fox, speeds, model)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", action="append", default=[], help="folder to import other packages from")
    parser.add_argument("--fox", help="the fox binary, for its own figures")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, no training")
    parser.add_argument("--only", action="append", help=f"only this part: {', '.join(p.__name__ for p in PARTS)}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536], help="of what speeds measures")
    parser.add_argument("--seconds", type=float, default=100, help="after these, further speeds are left out")
    ARGUMENTS = parser.parse_args()
    sys.path[:0] = ARGUMENTS.published
    if not torch.cuda.is_available():
        sys.exit("no GPU that PyTorch can use; this script is for one")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "foxlm", foxlm.__version__)
    unknown = set(ARGUMENTS.only or []) - {part.__name__ for part in PARTS}
    if unknown:
        sys.exit(f"there is no part {unknown.pop()}; --help lists them")
    wanted = ARGUMENTS.only or [part.__name__ for part in PARTS if not (ARGUMENTS.quick and part is model)]
    for part in PARTS:
        if part.__name__ in wanted:
            section(part)
    print(f"\n{len(FAILED)} failed{': ' + ', '.join(FAILED) if FAILED else ''}")
    sys.exit(1 if FAILED else 0)
