"""The published FoX model with fox's attention: python examples/published.py

Needs the package `forgetting_transformer` (github.com/zhixuan-lin/forgetting-transformer) with its dependencies, and a
GPU, on which its own kernels run. Trains the same model twice for a few steps, before and after the swap, and prints
losses and speed.
"""

import importlib
import sys
import time

import foxlm


def put(old, new):
    """Puts an op in the place of another, in every module of the published package that holds it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("forgetting_transformer") and getattr(module, "forgetting_attention", None) is old:
            module.forgetting_attention = new


SIZES = {
    # Batch, steps, shape. Fifty steps of the larger model take minutes.
    "125M": (2, 50, {"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 12}),
    "760M": (1, 16, {"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 24}),
}


def train(size, length=16384, **fields):
    """Losses of some training steps of FoX (Pro) on random tokens, and tokens per second without the first steps."""
    import torch
    from forgetting_transformer.model import ForgettingTransformerConfig, ForgettingTransformerForCausalLM

    torch.manual_seed(0)
    batch, steps, shape = SIZES[size]
    config = ForgettingTransformerConfig(
        vocab_size=50304, hidden_ratio=3.5, qk_norm=True, use_output_gate=True, use_output_norm=True, use_k_shift=True,
        use_v_shift=True, **shape, **fields,
    )  # fmt: skip
    with torch.device("cuda"):
        model = ForgettingTransformerForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    ids = torch.randint(50304, (steps, batch, length + 1), device="cuda")
    losses, start = [], None
    for step in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids[step, :, :-1], labels=ids[step, :, 1:].contiguous()).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step == 4:
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    speed = batch * length * (steps - 5) / (time.perf_counter() - start)
    losses = [loss.item() for loss in losses]
    # The optimizer's state and the weights make room for the next model.
    del model, optimizer, loss
    torch.cuda.empty_cache()
    return losses, speed


def compare(size, tolerance):
    """The same steps with the published op and with foxlm's, in turns: the better speeds of two, and how far the losses
    are apart."""
    op = importlib.import_module("forgetting_transformer.ops.forgetting_attention").forgetting_attention
    slow = fast = 0
    for _ in range(2):
        before, speed = train(size, log_pruning_tolerance=tolerance)
        slow = max(slow, speed)
        put(op, foxlm.forgetting_attention)
        try:
            after, speed = train(size, log_pruning_tolerance=tolerance)
        finally:
            put(foxlm.forgetting_attention, op)
        fast = max(fast, speed)
    worst = max(abs(a - b) for a, b in zip(before, after))
    print(f"{size}, pruning {tolerance}: {slow:,.0f} -> {fast:,.0f} tokens/s ({fast / slow:.2f}x)")
    print(f"losses of {len(before)} steps at most {worst:.1e} apart, {before[-1]:.4f} and {after[-1]:.4f} at the end",
          flush=True)  # fmt: skip


def main():
    try:
        importlib.import_module("forgetting_transformer.model")
    except ImportError as error:
        sys.exit(f"the published package is not installed ({error}); see github.com/zhixuan-lin/forgetting-transformer")
    for size in SIZES:
        for tolerance in (None, -10.0):
            compare(size, tolerance)


if __name__ == "__main__":
    main()
