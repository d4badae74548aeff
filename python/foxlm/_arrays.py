"""Arrays of NumPy and tensors of PyTorch as the library takes them: address, type, shape, strides."""

from __future__ import annotations

import sys

import numpy as np

_NUMPY_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def is_tensor(x) -> bool:
    """Whether `x` is a tensor of PyTorch. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def describe_numpy(x: np.ndarray):
    """`(address, type, shape, strides in elements)` of an array; it must be held while this is used."""
    name = _NUMPY_TYPES.get(x.dtype.name, x.dtype.name)
    if any(stride % x.itemsize for stride in x.strides):
        raise ValueError("an array has elements that do not lie at multiples of their size; copy it first")
    return x.ctypes.data, name, x.shape, [stride // x.itemsize for stride in x.strides]
