"""FoX (Pro) with sequences sharded over ranks (context parallelism) and weights sharded by FSDP2, on CPU ranks or GPUs:

    torchrun --nproc-per-node 2 examples/context_parallel.py [STEPS]

Two ranks share each sequence; with 4, 6, ... ranks there are more sequences. Trains on the source of Python's standard
library.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from foxlm import context
from foxlm.hf import FoxConfig, FoxForCausalLM

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
LENGTH, SHARED_BY = 2048, 2


def main():
    gpu = torch.cuda.is_available()
    kind = "cuda" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks % SHARED_BY:
        sys.exit(f"{ranks} ranks cannot share sequences {SHARED_BY} by {SHARED_BY}; start a multiple with torchrun")
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = init_device_mesh(kind, (ranks // SHARED_BY, SHARED_BY), mesh_dim_names=("data", "context"))
    # The same weights on all ranks, before they are sharded.
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}
    config = FoxConfig.pro(**sizes, gate_init=[1, 16], log_pruning_tolerance=-10.0)
    model = FoxForCausalLM(config).to(kind)
    model.context_parallel(mesh["context"])
    everyone = init_device_mesh(kind, (ranks,))
    for block in model.model.layers:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    folder = os.path.dirname(os.__file__)
    files = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    text = b"".join(open(os.path.join(folder, name), "rb").read() for name in files)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # Ranks that share a sequence draw the same one.
    draw = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    for step in range(1, STEPS + 1):
        start = int(torch.randint(len(data) - LENGTH, (), generator=draw))
        row = data[start : start + LENGTH].long()[None].to(kind)
        chunk = context.chunk(row, mesh["context"])
        loss = model(chunk, labels=chunk).loss
        optimizer.zero_grad()
        # FSDP averages gradients over all ranks.
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step in (1, STEPS):
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:4}  loss {mean.item() / ranks:.3f} nats per byte", flush=True)
    counts = torch.tensor(context.traffic(), dtype=torch.float64, device=kind)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"ranks sent {100 * counts[0] / counts[1]:.1f}% of the bytes of a full exchange of keys and values")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
