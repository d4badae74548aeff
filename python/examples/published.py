"""The published FoX model with fox's attention: python examples/published.py

Needs the package `forgetting_transformer` (github.com/zhixuan-lin/forgetting-transformer) with its dependencies, and a GPU, on
which its own kernels run. Trains the same model twice for a few steps, before and after the swap, and prints losses and speed.
"""

import importlib
import sys
import time

import foxlm


def swap():
    """Puts foxlm's op in the place of the published one, in every module of the package that holds it."""
    published = importlib.import_module("forgetting_transformer.ops.forgetting_attention").forgetting_attention
    for name, module in list(sys.modules.items()):
        if name.startswith("forgetting_transformer") and getattr(module, "forgetting_attention", None) is published:
            module.forgetting_attention = foxlm.forgetting_attention


def train(steps=20, length=16384, **fields):
    """Losses of some training steps on random tokens, and tokens per second without the first steps."""
    import torch
    from forgetting_transformer.model import ForgettingTransformerConfig, ForgettingTransformerForCausalLM

    torch.manual_seed(0)
    config = ForgettingTransformerConfig(
        vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_heads=12, hidden_ratio=3.5, qk_norm=True,
        use_output_gate=True, use_output_norm=True, use_k_shift=True, use_v_shift=True, **fields,
    )  # fmt: skip
    model = ForgettingTransformerForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    ids = torch.randint(50304, (steps, 2, length + 1), device="cuda")
    losses, start = [], None
    for step in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids[step, :, :-1], labels=ids[step, :, 1:]).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 4:
            start = time.perf_counter()
    return losses, 2 * length * (steps - 5) / (time.perf_counter() - start)


def main():
    try:
        importlib.import_module("forgetting_transformer.ops.forgetting_attention")
    except ImportError as error:
        sys.exit(f"the published package is not installed ({error}); see github.com/zhixuan-lin/forgetting-transformer")
    for tolerance in (None, -10.0):
        before, slow = train(log_pruning_tolerance=tolerance)
        original = importlib.import_module("forgetting_transformer.ops.forgetting_attention").forgetting_attention
        swap()
        after, fast = train(log_pruning_tolerance=tolerance)
        worst = max(abs(a - b) for a, b in zip(before, after))
        print(f"pruning {tolerance}: {slow:,.0f} -> {fast:,.0f} tokens/s ({fast / slow:.2f}x), losses differ by at most {worst:.1e}")
        for name, module in list(sys.modules.items()):
            if name.startswith("forgetting_transformer") and hasattr(module, "forgetting_attention"):
                module.forgetting_attention = original


if __name__ == "__main__":
    main()
