"""Sequences that are sharded over the ranks of a process group: how to cut them, and what travels.

`foxlm.forgetting_attention(..., group=group)` computes attention over such a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _checks
from ._extras import require

require("torch", "torch", "foxlm.context")

from ._group import Traffic, size, traffic  # noqa: E402
from ._group_wire import process_group  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Traffic", "chunk", "traffic"]


def chunk(x: Tensor, group: ProcessGroup | DeviceMesh, dim: int = 1) -> Tensor:
    """The contiguous chunk of `x` that belongs to this rank: the chunks of all ranks, in their order, are `x`.

    Args:
        x: a tensor that all ranks have, with at least as many entries along `dim` as there are ranks. The first chunks
            are one longer where the length is not a multiple of the number of ranks.
        group: the process group, or a `DeviceMesh` of one dimension.
        dim: the axis of time.
    """
    import torch.distributed as dist

    _checks.tensors(x=x)
    ranks, rank = size(group), dist.get_rank(process_group(group))
    if x.shape[dim] < ranks:
        raise ValueError(f"{x.shape[dim]} entries cannot be cut into {ranks} chunks; every rank needs one or more")
    return x.tensor_split(ranks, dim)[rank]
