"""Tensors between the ranks of a process group: small all-gathers, and point-to-point messages of bytes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

# Tensors of a message begin at multiples of this, so that a message can be viewed as any type.
_ALIGNMENT = 16


def process_group(group):
    """The process group itself; a `DeviceMesh` of one dimension is taken, too."""
    return group.get_group() if hasattr(group, "get_group") else group


class Wire:
    """A process group, and the device from which its backend sends: tensors on another device are copied there."""

    def __init__(self, group, device):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # gloo sends from the host alone.
        self.device = device if device.type == "cuda" and _is_nccl(group, device) else torch.device("cpu")

    def gather(self, x):
        """`x` `[n]` of every rank, on the host: `[ranks, n]`."""
        x = x.to(self.device).contiguous()
        every = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(every, x, group=self.group)
        return torch.stack(every).cpu()

    def post(self, sends, receives):
        """Starts the transfer of messages to ranks (`sends`: rank to bytes) and from ranks (`receives`: rank to
        length); empty ones do not travel."""
        peer = lambda rank: dist.get_global_rank(self.group, rank)
        sends = {rank: x.to(self.device) for rank, x in sends.items() if x.numel()}
        room = {rank: torch.empty(n, dtype=torch.uint8, device=self.device) for rank, n in receives.items() if n}
        ops = [dist.P2POp(dist.isend, x, peer(rank), self.group) for rank, x in sends.items()]
        ops += [dist.P2POp(dist.irecv, x, peer(rank), self.group) for rank, x in room.items()]
        return Pending(dist.batch_isend_irecv(ops) if ops else [], sends, room)


class Pending:
    """Messages under way."""

    def __init__(self, works, sends, room):
        self.works, self.sends, self.room = works, sends, room

    def wait(self):
        """The received messages, by rank. On NCCL the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.works, self.sends = [], {}
        return self.room


def _is_nccl(group, device):
    try:
        return group._get_backend(device).name() == "nccl"
    except (AttributeError, RuntimeError):
        return "nccl" in str(dist.get_backend(group))


def _padded(size):
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def message_size(parts):
    """Bytes of a message with tensors of these shapes and types."""
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts)


def pack(tensors):
    """One message of bytes."""
    parts = []
    for x in tensors:
        raw = x.detach().contiguous().view(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(_padded(raw.numel()) - raw.numel())]
    return torch.cat(parts)


def unpack(message, parts, device):
    """The tensors of a message, by their shapes and types."""
    made, at, message = [], 0, message.to(device)
    for shape, dtype in parts:
        size = math.prod(shape) * dtype.itemsize
        made.append(message[at : at + size].view(dtype).view(shape))
        at += _padded(size)
    return made
