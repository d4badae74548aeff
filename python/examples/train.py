"""A small FoX in PyTorch, trained on the source of Python's standard library: python examples/train.py [STEPS]

Runs on the CPU or, if there is one, on a GPU.
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

from foxlm import forgetting_attention

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 2, 256, 8
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HEADS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, h):
        x = self.norm1(h)
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).chunk(3, 2)
        log_gates = F.logsigmoid(self.gate(x).float())
        h = h + self.out(forgetting_attention(q, k, v, log_gates).flatten(2))
        return h + self.mlp(self.norm2(h))


def batch(data, generator):
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[s : s + LENGTH + 1] for s in starts]).long().to(DEVICE)
    return rows[:, :-1], rows[:, 1:]


def main():
    torch.manual_seed(0)
    files = sorted(f for f in os.listdir(os.path.dirname(os.__file__)) if f.endswith(".py"))
    text = b"".join(open(os.path.join(os.path.dirname(os.__file__), f), "rb").read() for f in files)
    data, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *[Block() for _ in range(LAYERS)], nn.RMSNorm(WIDTH),
                          nn.Linear(WIDTH, 256)).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        x, y = batch(data, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step in (1, STEPS):
            print(f"step {step:4}  loss {loss.item():.3f} nats per byte", flush=True)


if __name__ == "__main__":
    main()
