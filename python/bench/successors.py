"""PaTH, Wall and Kimi Delta Attention on a GPU: python bench/successors.py (--help for its options)

Values and gradients against float64 first, then milliseconds of a forward with its backward beside
flash-linear-attention in the same process (`--fla` adds a folder to the import path). Every row runs in a separate
process, which is ended after `--limit` seconds: a failure or slow tuning costs one row. Every op is warmed up before it
is timed, because Triton tunes its kernels in the first calls (`triton_tuning.py` shortens that); rounds alternate, and
medians count. Results are printed as they come. A check that fails is named and makes the exit status 1.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")

import torch
from torch.nn import functional as F

import h200
import triton_tuning
import foxlm  # noqa: E402, h200 adds the folder of the tests
import test_transitions as transitions  # noqa: E402


def values():
    """PaTH and Wall against float64: float32 within 1e-4, bfloat16 within 4e-2, float16 as float32 with its rounding"""
    for name, make in transitions.CASES.items():
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)):
            x, ours, naive = make()
            x = [a.detach().cuda().to(dtype).requires_grad_() for a in x]
            try:
                o, want = ours(*x), naive(*x)
                w = torch.randn(o.shape, device="cuda").to(dtype)
                got = torch.autograd.grad(o, x, w, retain_graph=True)
                again = torch.autograd.grad(o, x, w)
                right = torch.autograd.grad(want, x, w.double(), allow_unused=True)
                # The first token of a sequence has no effect on others; a gradient of 0 has no relative error.
                pairs = [(a, b) for a, b in zip(got, right) if b is not None and b.norm() > 0]
                worst = max(transitions.error(o, want), *(transitions.error(a, b) for a, b in pairs))
                h200.check(f"{name}, {str(dtype)[6:]}", worst < limit, f"{worst:.1e}")
                same = all(torch.equal(a, b) for a, b in zip(got, again))
                h200.check(f"{name}, {str(dtype)[6:]}: a second backward gives the same bits", same)
            except Exception as error:
                h200.check(f"{name}, {str(dtype)[6:]}", False, repr(error))


def draw(*shapes, dtype=torch.bfloat16):
    return [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]


def path(time, heads, width, gated=True):
    torch.manual_seed(0)
    q, k, v = draw(*[(1, time, heads, width)] * 3)
    w = F.normalize(draw((1, time, heads, width), dtype=torch.float32)[0], dim=-1)
    beta = 2 * torch.rand(1, time, heads, device="cuda")
    times = torch.logspace(torch.log10(torch.tensor(8.0)), 5, heads, device="cuda")
    return [q, k, v, w, beta, *([(-1 / times).expand(1, time, heads).contiguous()] if gated else [])]


def wall(time, heads, width, rate):
    torch.manual_seed(0)
    q, k, v = draw(*[(1, time, heads, width)] * 3)
    return [q, k, v, -2 * rate * torch.rand(1, time, heads, width, device="cuda")]


def kda(time, heads, width):
    torch.manual_seed(0)
    q, k, v = draw(*[(1, time, heads, width)] * 3)
    g = F.logsigmoid(torch.randn(1, time, heads, width, device="cuda") + 4)
    return [q, F.normalize(k, dim=-1), v, g, torch.rand(1, time, heads, device="cuda")]


def rows(time):
    """Name, operands, foxlm's op, how many times as fast as FLA's it must be (None: not promised), FLA's module."""
    first = lambda f: lambda *x: f(*x)[0]
    ours = first(foxlm.parallel_path_attn), foxlm.parallel_wall_attn, first(foxlm.chunk_kda)
    return [
        ("PaTH-FoX, 12 x 64", lambda: path(time, 12, 64), ours[0], 2.0, "path_attn"),
        ("PaTH-FoX, 6 x 128", lambda: path(time, 6, 128), ours[0], 2.0, "path_attn"),
        ("PaTH, 12 x 64", lambda: path(time, 12, 64, False), ours[0], None, "path_attn"),
        ("KDA, 8 x 128", lambda: kda(time, 8, 128), ours[2], 1.5, "kda"),
        ("Wall, 0.0003 nats, 16 x 64", lambda: wall(time, 16, 64, 0.0003), ours[1], 2.0, "wall_attn"),
        ("Wall, 0.0003 nats, 8 x 128", lambda: wall(time, 8, 128, 0.0003), ours[1], 2.0, "wall_attn"),
        ("Wall, 2 nats, 16 x 64", lambda: wall(time, 16, 64, 2.0), ours[1], 2.0, "wall_attn"),
    ]


def theirs(module):
    """The op of flash-linear-attention, or None where it cannot be imported."""
    names = {"path_attn": "parallel_path_attn", "kda": "chunk_kda", "wall_attn": "parallel_wall_attn"}
    try:
        op = getattr(__import__(f"fla.ops.{module}", fromlist=["op"]), names[module])
    except Exception as error:
        print(f"     flash-linear-attention cannot be imported: {error}")
        return None
    return op if module == "wall_attn" else lambda *x: op(*x)[0]


def speeds():
    """Milliseconds of forward and backward together, medians of rounds that alternate"""
    for number, (name, _, _, _, module) in enumerate(rows(ARGUMENTS.time)):
        if ARGUMENTS.op not in (None, module):
            continue
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--row", str(number)]
        try:
            status = subprocess.run(command, timeout=ARGUMENTS.limit).returncode
            problem = f"its process ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            problem = f"not done within {ARGUMENTS.limit:g} s; --limit allows more"
        if problem:
            h200.check(name, False, problem)


def speed(name, make, op, bar, module):
    """One row, in this process"""
    x = [a.requires_grad_() for a in make()]
    w = torch.randn_like(x[0])
    step = {"foxlm": lambda: torch.autograd.grad(op(*x), x, w)}
    other = None if ARGUMENTS.alone else theirs(module)
    if other is not None:
        triton_tuning.install(ARGUMENTS.configs)
        step["flash-linear-attention"] = lambda: torch.autograd.grad(other(*x), x, w)
    found, finite = {}, {}
    for side, f in step.items():
        start = time.time()
        try:
            finite[side] = all(bool(grad.isfinite().all()) for grad in f())
            f(), f()
            found[side] = [h200.clock(f)]
        except Exception as error:
            print(f"{name:28} {side}: failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        ready = time.time() - start
        print(f"{name:28} {side:24} {found[side][0]:9.3f} ms at first, after {ready:.0f} s", flush=True)
    for _ in range(3):
        for side, times in found.items():
            times.append(h200.clock(step[side]))
    # The first was not beside the other.
    medians = {side: statistics.median(times[1:]) for side, times in found.items()}
    for side, ms in medians.items():
        word = "finite" if finite[side] else "NaN or infinite gradients"
        print(f"{name:28} {side:24} {ms:9.3f} ms  {word}", flush=True)
    h200.check(f"{name}: gradients are finite", finite.get("foxlm", False))
    if len(medians) == 2:
        ratio = medians["flash-linear-attention"] / medians["foxlm"]
        needed = "" if bar is None else f", {bar} is needed"
        h200.check(f"{name}: speed beside FLA", bar is None or ratio >= bar, f"{ratio:.2f} times{needed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla", help="folder to import flash-linear-attention from")
    parser.add_argument("--time", type=int, default=16384, help="tokens of a sequence")
    parser.add_argument("--only", choices=("values", "speeds"), help="one part alone")
    parser.add_argument("--op", choices=("path_attn", "kda", "wall_attn"), help="speeds of one op alone")
    parser.add_argument("--row", type=int, metavar="N", help="row N alone, from 0, in this process")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a row")
    parser.add_argument("--alone", action="store_true", help="foxlm without flash-linear-attention")
    parser.add_argument(
        "--configs", type=int, help="the first configurations of each of FLA's kernels, instead of all; unfair to it"
    )
    ARGUMENTS = parser.parse_args()
    sys.path[:0] = [ARGUMENTS.fla] if ARGUMENTS.fla else []
    if not torch.cuda.is_available():
        sys.exit("no GPU that PyTorch can use; this script is for one")
    if ARGUMENTS.row is not None:
        if not 0 <= ARGUMENTS.row < len(rows(ARGUMENTS.time)):
            parser.error(f"--row {ARGUMENTS.row}: the rows are 0 to {len(rows(ARGUMENTS.time)) - 1}")
        speed(*rows(ARGUMENTS.time)[ARGUMENTS.row])
        sys.exit(1 if h200.FAILED else 0)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "foxlm", foxlm.__version__)
    for part in (values, speeds):
        if ARGUMENTS.only in (None, part.__name__):
            h200.section(part)
    print(f"\n{len(h200.FAILED)} failed{': ' + ', '.join(h200.FAILED) if h200.FAILED else ''}")
    sys.exit(1 if h200.FAILED else 0)
