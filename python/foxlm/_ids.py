"""Token ids as callers give them: lists, arrays of NumPy, tensors of PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, Union

import numpy as np

from ._arrays import is_tensor

if TYPE_CHECKING:
    import torch

Ids = Union[Sequence[int], "np.ndarray[Any, Any]", "torch.Tensor"]
"""Ids of one sequence `[T]`."""
IdBatch = Union[Sequence[Sequence[int]], "np.ndarray[Any, Any]", "torch.Tensor"]
"""Ids of sequences of the same length `[B, T]`."""


def flat(ids: Ids | IdBatch, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids as an array; an error names the first that does not exist, and where it is."""
    found: Any = ids.cpu().numpy() if is_tensor(ids) else ids
    found = np.asarray(found)
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"ids are {found.dtype}; they must be integers")
    wrong = np.argwhere((found < 0) | (found >= vocab_size)) if found.size else ()
    if len(wrong):
        *row, position = wrong[0].tolist()
        where = f"position {position}" + (f" of row {row[0]}" if row else "")
        raise ValueError(f"id {found[tuple(wrong[0])]} at {where} is not from 0 to {vocab_size - 1}")
    return found.astype(np.int64)


def sequence(ids: Ids, vocab_size: int) -> list[int]:
    """Ids of one sequence."""
    found = flat(ids, vocab_size)
    if found.ndim != 1 or found.size == 0:
        raise ValueError(f"ids have shape {list(found.shape)}; they must be one sequence of at least one id")
    listed: list[int] = found.tolist()
    return listed


def count(name: str, value: SupportsIndex, most: int = 2**63 - 1, least: int = 0) -> int:
    """An integer from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; it must be from {least} to {most}")
    return number
