"""A training step of FoX (LLaMA) in plain PyTorch, the peer of `fox bench train`.

    python bench/peer_pytorch.py --seq 512 --batch 8

Same shapes, same optimizer; attention is scaled_dot_product_attention with the decay as a bias
matrix, which is what PyTorch offers on a CPU for a gate that needs a gradient. Prints tokens/s.
"""

import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        linear = lambda n, m: nn.Linear(n, m, bias=False)
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate = nn.Linear(width, heads)
        self.up, self.down = linear(width, 2 * inner), linear(inner, width)

    def forward(self, h, mask):
        batch, time_, width = h.shape
        x = self.norm1(h)
        split = lambda y: y.view(batch, time_, self.heads, -1).transpose(1, 2)
        c = F.logsigmoid(self.gate(x)).cumsum(1).transpose(1, 2)
        bias = (c[..., :, None] - c[..., None, :]).masked_fill(mask, float("-inf"))
        o = F.scaled_dot_product_attention(
            split(self.q(x)), split(self.k(x)), split(self.v(x)), attn_mask=bias
        )
        h = h + self.o(o.transpose(1, 2).reshape(batch, time_, width))
        g, u = self.up(self.norm2(h)).chunk(2, -1)
        return h + self.down(F.silu(g) * u)


class Model(nn.Module):
    def __init__(self, vocab, width, layers, heads, inner):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))


def main():
    parser = argparse.ArgumentParser()
    for name, default in dict(
        d_model=256, layers=4, heads=4, mlp=768, seq=512, batch=8, vocab=256, repeat=5
    ).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(args.vocab, args.d_model, args.layers, args.heads, args.mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(args.vocab, (args.batch, args.seq + 1))
    times = []
    for _ in range(args.repeat + 1):
        start = time.perf_counter()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[1:])
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads: {step * 1e3:.1f} ms per step, "
        f"{args.batch * args.seq / step:.0f} tokens/s, last loss {loss.item():.4f}"
    )


if __name__ == "__main__":
    main()
