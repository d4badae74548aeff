"""Everything that foxlm promises on a GPU, in one call: python bench/h200.py (--help for its options)

Correctness first: values and gradients of every feature against a naive version in float64, layouts, streams,
compilation, CUDA graphs, memory. Then speeds, beside PyTorch's attention, the published kernel and
flash-linear-attention where they can be imported (`--published` adds a folder to the import path), beside `fox bench
attention` (`--fox`), and of the published model before and after the swap. A check that fails is named and makes the
exit status 1; the others still run.
"""

import argparse
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
                d_out = torch.randn(*x[0].shape[:3], x[2].shape[3], device="cuda").to(dtype)
                try:
                    got, want = (
                        attention.run(attention.ours, x, case, d_out),
                        attention.run(attention.naive, x, case, d_out),
                    )
                    low = torch.bfloat16 if dtype == torch.bfloat16 else dtype
                    rough = attention.run(lambda *a, **c: attention.naive(*a, dtype=low, **c), x, case, d_out)
                    worst = 0.0
                    for a, b, c in zip(got, want, rough):
                        for error, allowed in zip(attention.errors(a, b), attention.errors(c, b)):
                            worst = max(worst, error / (2e-5 if dtype == torch.float32 else 2 * allowed))
                    check(
                        f"{name}, {str(dtype)[6:]}, {'head' if head_first else 'time'} first",
                        worst <= 1,
                        f"{worst:.2f} of what is allowed",
                    )
                except Exception as error:
                    check(f"{name}, {str(dtype)[6:]}, {'head' if head_first else 'time'} first", False, repr(error))


def recurrences():
    """Scans against float64"""
    for make in (scans.delta_rule, scans.gated_delta_rule, scans.gla, scans.hgrn2, scans.simple_gla, scans.mamba):
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            x, ours, naive = make()
            try:
                x = [a.detach().cuda().to(dtype).requires_grad_() for a in x]
                o, want = ours(*x)[0], naive(*x)[0]
                w = torch.randn(o.shape, device="cuda")
                pairs = [
                    (o, want),
                    *zip(torch.autograd.grad(o, x, w.to(o.dtype)), torch.autograd.grad(want, x, w.to(want.dtype))),
                ]
                worst = max(scans.error(a, b) for a, b in pairs)
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
    for name, y in (
        ("forward", [a.detach() for a in make(1, 64, 1, 64)]),
        ("forward and backward", make(1, 64, 1, 64)),
    ):

        def call():
            o = f(*y)
            if o.requires_grad:
                torch.autograd.grad(o, y, o.detach())

        for _ in range(100):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            call()
        each = 1e3 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        print(f"     host time of a call, {name}: {each:.1f} us (bar: 15 for a forward)")


def clock(f, count=20):
    """Milliseconds, median over rounds."""
    for _ in range(3):
        f()
    rounds = []
    for _ in range(5):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(max(count // 5, 1)):
            f()
        b.record()
        torch.cuda.synchronize()
        rounds.append(a.elapsed_time(b) / max(count // 5, 1))
    return sorted(rounds)[2]


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


def speeds():
    """Attention, milliseconds and TFLOP/s (causal: forward 2 B H T^2 d, backward 2.5 times that)"""
    found = peers()
    shapes = [(4, 4096, 24, 64), (2, 16384, 12, 64), (1, 16384, 24, 64), (1, 16384, 12, 128), (1, 65536, 24, 64)]
    for b, t, h, d in shapes[: 2 if ARGUMENTS.quick else None]:
        x = make(b, t, h, d)
        flops = 2 * b * h * t * t * d
        w = torch.randn_like(x[0])
        for name, f in found.items():
            try:
                forward = clock(lambda: f(*[a.detach() for a in x]))
                o = f(*x)
                needed = x if "without" not in name else x[:3]
                backward = clock(lambda: torch.autograd.grad(o, needed, w, retain_graph=True))
                rates = f"{flops / forward / 1e9:5.0f} / {2.5 * flops / backward / 1e9:5.0f} TFLOP/s"
                print(f"B{b} H{h} T{t} d{d}  {name:24} {forward:8.3f} + {backward:8.3f} ms   {rates}", flush=True)
                o = None
            except Exception as error:
                print(f"B{b} H{h} T{t} d{d}  {name:24} failed: {type(error).__name__}: {str(error)[:100]}")
    if ARGUMENTS.fox:
        subprocess.run([ARGUMENTS.fox, "bench", "attention", "--device", "cuda"], check=False)


def model():
    """The published model's own training step, before and after the swap, T 16384"""
    try:
        import forgetting_transformer.model  # noqa: F401
    except Exception as error:
        print(f"     not run: the published package cannot be imported ({error})")
        return
    import published

    published.main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", action="append", default=[], help="folder to import other packages from")
    parser.add_argument("--fox", help="the fox binary, for its own figures")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, no training")
    ARGUMENTS = parser.parse_args()
    sys.path[:0] = ARGUMENTS.published
    if not torch.cuda.is_available():
        sys.exit("no GPU that PyTorch can use; this script is for one")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "foxlm", foxlm.__version__)
    for part in (values, recurrences, machinery, speeds, *([] if ARGUMENTS.quick else [model])):
        section(part)
    print(f"\n{len(FAILED)} failed{': ' + ', '.join(FAILED) if FAILED else ''}")
    sys.exit(1 if FAILED else 0)
