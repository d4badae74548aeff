"""Forgetting attention on the CPU beside PyTorch's own attention with a bias matrix: python bench/cpu.py

Checks the values first. Rounds alternate between the two; medians of processor time are printed, which other programs
on the machine disturb less than wall time.
"""

import os
import platform
import statistics
import time

import torch
from torch.nn import functional as F

import foxlm

HEADS, LENGTH, DIM, ROUNDS = 4, 4096, 64, 5


def fox(q, k, v, g):
    return foxlm.forgetting_attention(q, k, v, g, head_first=True)


def pruned(q, k, v, g):
    return foxlm.forgetting_attention(q, k, v, g, head_first=True, adaptive_threshold="auto")


def biased(q, k, v, g):
    """What one writes without a kernel: the decay as a matrix, with its gradient."""
    c = g.cumsum(-1)
    bias = (c[..., None] - c[..., None, :]).masked_fill(
        ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), float("-inf")
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def plain(q, k, v, g):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) + 0 * g[..., None]


def main():
    torch.manual_seed(0)
    x = [torch.randn(1, HEADS, LENGTH, DIM) for _ in range(3)] + [F.logsigmoid(torch.randn(1, HEADS, LENGTH) + 3)]
    x = [a.requires_grad_() for a in x]
    w = torch.randn(x[0].shape)
    functions = {"foxlm": fox, "foxlm, pruned": pruned, "SDPA with a bias matrix": biased, "SDPA without gates": plain}
    want, got = biased(*x), fox(*x)
    pairs = [(got, want), *zip(torch.autograd.grad(got, x, w), torch.autograd.grad(want, x, w))]
    worst = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    assert worst < 1e-4, worst
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"PyTorch {torch.__version__}, foxlm {foxlm.__version__}"
    )
    print(f"{HEADS} heads x {LENGTH} x {DIM}, float32; values and gradients agree to {worst:.1e}")
    times = {name: ([], []) for name in functions}
    for _ in range(ROUNDS):
        for name, f in functions.items():
            start = time.process_time()
            o = f(*x)
            middle = time.process_time()
            torch.autograd.grad(o, x, w)
            times[name][0].append(1e3 * (middle - start))
            times[name][1].append(1e3 * (time.process_time() - middle))
    medians = {name: [statistics.median(t) for t in pair] for name, pair in times.items()}
    for name, (forward, backward) in medians.items():
        factor = sum(medians["SDPA with a bias matrix"]) / (forward + backward)
        print(f"{name:24} forward {forward:7.0f} ms  backward {backward:7.0f} ms  {factor:5.2f}x the bias matrix")


if __name__ == "__main__":
    main()
