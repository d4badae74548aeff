"""Nanoseconds of Python in a plain call of forgetting attention on a GPU, measured without one: python bench/host.py

Tensors of the CPU take the direct path to a library object that launches nothing. What remains is the cost of checks, of
the look-up, and of the allocation of the result. Medians over rounds; the real call adds the launches.
"""

import statistics
import time

import torch

import foxlm
from foxlm import _cuda, _direct

ROUNDS, CALLS = 9, 20000


class Library:
    """The library's functions, and an object for attention that launches nothing."""

    def __init__(self, core):
        self.core = core

    def __getattr__(self, name):
        return getattr(self.core, name)

    def CudaAttention(self, *_):  # noqa: N802, it stands for a class
        return self

    def forward(self, *_):
        pass


def measure(f):
    """Nanoseconds of a call."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            f()
        rounds.append(1e9 * (time.perf_counter() - start) / CALLS)
    return statistics.median(rounds)


def main():
    _cuda._core, _cuda.load_nvrtc = Library(_cuda._core), lambda: None
    _direct._possible = True
    # Attributes of tensors and functions of PyTorch that cost what the real ones do.
    _direct._is_cuda, _direct._ordinal = torch.Tensor.is_contiguous, torch.Tensor.output_nr.__get__
    _direct._current, _direct._stream = torch._C._len_torch_dispatch_stack, id
    x = [torch.randn(1, 64, 1, 64, dtype=torch.bfloat16) for _ in range(3)] + [-torch.rand(1, 64, 1)]
    y = [a.clone().requires_grad_() for a in x]
    foxlm.forgetting_attention(*x)
    assert None not in _direct._kinds.values(), "calls do not take the direct path"
    print(f"PyTorch {torch.__version__}, foxlm {foxlm.__version__}")
    print(f"forward                              {measure(lambda: foxlm.forgetting_attention(*x)):7.0f} ns")
    print(f"forward that keeps for the backward  {measure(lambda: foxlm.forgetting_attention(*y)):7.0f} ns")


if __name__ == "__main__":
    main()
