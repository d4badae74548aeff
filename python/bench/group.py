"""Forgetting attention over a sharded sequence: errors against the op on the whole sequence, bytes sent, and time.

  python python/bench/group.py [--ranks 2] [--device cuda|cpu] [--backend nccl|gloo] [--length 16384]

Ranks that have to share a GPU get a different NCCL_HOSTID each, without which NCCL refuses them; they are connected by
sockets then, so that times are no measure of NVLink. gloo with tensors on a GPU copies through the host.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import foxlm  # noqa: E402
from foxlm import context  # noqa: E402

HEADS, WIDTH = 12, 64


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend")
    parser.add_argument("--length", type=int, default=16384)
    args = parser.parse_args()
    args.backend = args.backend or ("nccl" if args.device == "cuda" else "gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        args.port = free.getsockname()[1]
    multiprocessing.spawn(rank_main, (args,), args.ranks)


def rank_main(rank, args):
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if args.ranks > torch.cuda.device_count():
            os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        torch.set_num_threads(1)
        foxlm.set_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    address = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group(args.backend, init_method=address, rank=rank, world_size=args.ranks)
    check(rank, args.ranks, device)
    for gates in ("strong", "spread"):
        measure(rank, args, device, gates)
    dist.destroy_process_group()


def gathered(x, ranks):
    """An object of every rank."""
    every = [None] * ranks
    dist.all_gather_object(every, x)
    return every


def check(rank, ranks, device):
    """Every case of the tests in float32 and bfloat16; exits with an error if one is off."""
    import test_group as tests

    failed = []
    for name, case in tests.CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            operands, d_out = tests.make(case, dtype)
            on = lambda x, kind=None: None if x is None else x.to(device, kind)
            whole = [on(x) for x in operands], on(d_out)
            lengths = case.get("cuts", {}).get(ranks) or [x.shape[1] for x in d_out.tensor_split(ranks, 1)]
            cut = lambda x: None if x is None else x.split(lengths, 1)[rank]
            want = tests.compute(*whole, case)
            wide = [on(x, None if n > 2 else torch.float32) for n, x in enumerate(operands)], on(d_out, torch.float32)
            exact = want if dtype == torch.float32 else tests.compute(*wide, case)
            parts = [*map(cut, whole[0][:4]), whole[0][4]]
            got = tests.compute(parts, cut(whole[1]), case, group=dist.group.WORLD)
            worst = 0.0
            for n, (a, b, c) in enumerate(zip(got, want, exact)):
                if n == 6:
                    a = sum(x.to(device) for x in gathered(a.cpu(), ranks))
                else:
                    b, c = cut(b), cut(c)
                seen = c.isfinite()
                error = lambda x: float((x[seen].double() - c[seen].double()).norm() / c[seen].double().norm())
                # float32: of the result itself; bfloat16: relative to the error of the op on the whole sequence.
                worst = max(worst, error(a) / (1e-4 if dtype == torch.float32 else 2 * error(b) + 1e-5))
            worst = max(gathered(worst, ranks))
            failed += [name] if not worst <= 1 else []
            if rank == 0 and not worst <= 1:
                print(f"{name}, {dtype}: {worst:.2f} times the error that is allowed", flush=True)
    if rank == 0:
        count = 2 * len(tests.CASES)
        print(f"{count - len(failed)} of {count} checks passed on {ranks} ranks", flush=True)
    if failed:
        sys.exit(1)


def measure(rank, args, device, kind):
    """Forward and backward of a whole sequence on one rank, and of its chunks on all."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, args.length, HEADS, *shape, generator=generator)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    x = [draw(WIDTH).to(device, dtype) for _ in range(3)]
    # Memories of about one token in all heads, or log-spaced from 1 token to the whole sequence.
    memory = torch.logspace(0, 0 if kind == "strong" else 1, HEADS, base=args.length)
    bias = -torch.log(torch.expm1(1 / memory))
    x.append(torch.nn.functional.logsigmoid(draw() + bias).to(device))

    def step(operands, group):
        leaves = [a.detach().requires_grad_() for a in operands]
        o = foxlm.forgetting_attention(*leaves, log_tolerance=-10.0, group=group)
        o.backward(o.detach())

    def milliseconds(operands, group, active):
        times = []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            if active:
                step(operands, group)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        return sorted(times)[2]

    alone = milliseconds(x, None, rank == 0)
    context.traffic(reset=True)
    parts = [context.chunk(a, dist.group.WORLD) for a in x]
    together = max(gathered(milliseconds(parts, dist.group.WORLD, True), args.ranks))
    sent, full = map(sum, zip(*gathered(tuple(context.traffic()), args.ranks)))
    if rank == 0:
        print(
            f"{kind} gates, {args.length} tokens, {HEADS} heads of {WIDTH}, {args.ranks} ranks ({args.backend}): "
            f"{together:.1f} ms sharded, {alone:.1f} ms whole on one rank, {100 * sent / full:.1f}% of a full exchange",
            flush=True,
        )


if __name__ == "__main__":
    main()
