"""The Hugging Face model on sequences that are sharded over gloo ranks, against the model on whole sequences."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import need

torch = need("torch")
transformers = need("transformers")

import foxlm.hf as hf  # noqa: E402
from foxlm import context  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
CASES = {
    "Pro": {},
    "LLaMA with positions": {"kind": "llama", "use_rope": True},
    "Transformer": {"kind": "transformer", "num_kv_heads": 2, "window_size": 50},
    "pruned": {"log_pruning_tolerance": -20.0},
    "packed": {"ends": [0, 20, 110, 112, 240]},
    "checkpointed": {"checkpointing": True},
    "unequal chunks": {"cuts": {2: [100, 140], 4: [100, 1, 80, 59]}},
    "accumulated": {"items": 1000},
    "shifted labels": {"shifted": True},
}


def make(case):
    """The model, tokens and labels."""
    torch.manual_seed(0)
    outside = ("kind", "ends", "checkpointing", "cuts", "items", "shifted")
    fields = SIZES | {key: x for key, x in case.items() if key not in outside}
    if case.get("kind") == "transformer":
        model = hf.FoxTransformerForCausalLM(hf.FoxTransformerConfig(**fields))
    else:
        model = hf.FoxForCausalLM(getattr(hf.FoxConfig, case.get("kind", "pro"))(**fields))
    model.train()
    for name, p in model.named_parameters():
        # Gates that remember, so that keys travel far.
        torch.nn.init.normal_(p, 3.0 if "fgate_proj.bias" in name else 1.0 if p.ndim == 1 else 0.0, 0.2)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable()
    ids = torch.randint(50, (1 if "ends" in case else 2, 240))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.1, -100)
    return model, ids, labels


def compute(case, cut=lambda x: x, group=None):
    model, ids, labels = make(case)
    model.context_parallel(group)
    more = {"cu_seqlens": torch.tensor(case["ends"])} if "ends" in case else {}
    more |= {"num_items_in_batch": case["items"]} if "items" in case else {}
    out = model(cut(ids), **{"shift_labels" if case.get("shifted") else "labels": cut(labels)}, **more)
    out.loss.backward()
    return out.loss.item(), out.logits.detach().numpy(), [p.grad.numpy() for p in model.parameters()]


def sharded(rank, group, case):
    cuts = case.get("cuts", {}).get(group.size())
    cut = (lambda x: x.split(cuts, 1)[rank]) if cuts else lambda x: context.chunk(x, group)
    return compute(case, cut, group)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_of_whole_model(ranks, name, size):
    case = CASES[name]
    loss, logits, gradients = compute(case)
    losses, parts, found = zip(*ranks.run(size, sharded, case))
    assert sum(losses) / size == pytest.approx(loss, rel=1e-5)
    joined = torch.cat([torch.from_numpy(x) for x in parts], 1)
    torch.testing.assert_close(joined, torch.from_numpy(logits), atol=2e-5, rtol=1e-4)
    for want, *got in zip(gradients, *found):
        mean, want = torch.stack([torch.from_numpy(x) for x in got]).mean(0), torch.from_numpy(want)
        assert (mean - want).norm() <= 2e-5 * want.norm()


def wrong(rank, group, change):
    model, ids, labels = make({})
    model.context_parallel(group)
    if change == "generate":
        model.eval().generate(ids, max_new_tokens=2)
    more = {}
    if rank == 1:
        more = {
            "mask": {"attention_mask": torch.zeros(2, 240)},
            "positions": {"position_ids": torch.arange(240)[None]},
            "weights": {"output_attentions": True},
        }.get(change, {})
    if change == "packed":
        more = {"cu_seqlens": torch.tensor([0, 240])}
    model(ids[:1] if change == "packed" or (change == "rows" and rank == 1) else ids, **more)


@pytest.mark.parametrize(
    "change, rank, sentence",
    [
        ("mask", 1, "attention_mask has zeros with context_parallel; use cu_seqlens of the whole sequence"),
        ("mask", 0, "rank 1 of the group refused its arguments"),
        ("positions", 1, "position_ids is given with context_parallel"),
        ("weights", 1, "output_attentions is given with context_parallel"),
        ("rows", 0, "rank 1 has a batch of 1, but rank 0 one of 2; rows must be the same"),
        ("packed", 0, "for 1 rows of 480 tokens on all ranks"),
        ("generate", 0, "is given with context_parallel; use cu_seqlens of the whole sequence for packed tokens, and "
                        "context_parallel(None) to generate"),
    ],
)  # fmt: skip
def test_mistake_is_an_error_on_all_ranks(ranks, change, rank, sentence):
    outcomes = ranks.outcomes(2, wrong, change)
    assert all(not succeeded and found[0] == "ValueError" for succeeded, found in outcomes), outcomes
    assert sentence in outcomes[rank][1][1]


def test_example_trains_with_fsdp():
    example = Path(__file__).resolve().parents[1] / "examples" / "context_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example, "12"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert losses[-1] < losses[0] - 0.5, run.stdout
    assert 0 < float(re.search(r"([0-9.]+)% of the bytes", run.stdout)[1]) < 60, run.stdout
