"""Loading a Hugging Face model over several processes, and by files beside the checkpoint."""

import os
import socket
import subprocess
import sys

import pytest
from conftest import need

torch = need("torch")
transformers = need("transformers")

import foxlm.hf as hf  # noqa: E402

SHARDED = """
import inspect, os, sys, torch, transformers, foxlm.hf
from transformers.distributed import DistributedConfig
torch.set_num_threads(1)
config = {"tp_plan": "auto"}
if "tp_plan" in inspect.signature(DistributedConfig).parameters:
    config = {"distributed_config": DistributedConfig(**config, tp_size=2)}
whole, split = (
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **more)
    for more in ({}, config)
)
# Weights are distributed tensors, or plain tensors of this rank's part in transformers before 5.22.
own = lambda x: x.to_local() if hasattr(x, "to_local") else x
def part(x, shape):
    for dim, (size, here) in enumerate(zip(x.shape, shape)):
        x = x if size == here else x.chunk(size // here, dim)[int(os.environ["RANK"])]
    return x
assert own(split.model.layers[0].attn.q_proj.weight).shape == (16, 32)
ids = torch.arange(12)[None]
a, b = (model(ids, labels=ids) for model in (whole, split))
torch.testing.assert_close(b.logits, a.logits, atol=1e-5, rtol=1e-5)
a.loss.backward(), b.loss.backward()
for (name, p), q in zip(whole.named_parameters(), split.parameters()):
    grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
    torch.testing.assert_close(grad, part(p.grad, grad.shape), atol=1e-6, rtol=1e-4, msg=name)
options = {"max_new_tokens": 4, "do_sample": False}
assert torch.equal(split.generate(ids, **options), whole.generate(ids, **options))
print("equal")
"""


@pytest.mark.parametrize(
    "config",
    [
        hf.FoxConfig.pro(num_heads=4, hidden_size=32, intermediate_size=48, vocab_size=50, num_hidden_layers=1),
        hf.FoxConfig.pro(num_heads=4, hidden_size=32, intermediate_size=48, vocab_size=50, num_hidden_layers=1,
                         use_output_norm=False, qk_norm_share_param_across_head=True, tie_word_embeddings=True),
        hf.FlaFoxConfig(num_heads=4, num_kv_heads=2, hidden_size=32, intermediate_size=48, vocab_size=50,
                        num_hidden_layers=1),
    ],
)  # fmt: skip
def test_tensor_parallel_ranks_compute_the_model(config, tmp_path):
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 shards by another interface")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, tmp_path], env=os.environ | group | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for rank in "01"
    ]
    for rank in ranks:
        out, words = rank.communicate(timeout=120)
        assert out.strip().endswith("equal"), words[-2000:]


@pytest.mark.parametrize("config", [hf.FoxConfig.pro(num_heads=2), hf.FoxTransformerConfig(num_heads=2)])
def test_remote_code_finds_the_classes(config, tmp_path):
    config = type(config)(**(config.to_dict() | {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "a")
    hf.write_remote_code(tmp_path / "a")
    code = """
import sys, torch, transformers
ids = torch.arange(9)[None]
load = lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model = load(sys.argv[1])
model.save_pretrained(sys.argv[2])
again = load(sys.argv[2])
assert type(model).__module__.startswith("transformers_modules") and torch.equal(again(ids).logits, model(ids).logits)
if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 15):  # earlier ones ask again inside
    labels = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
    assert labels.score.weight.shape == (2, 32)
torch.save(again(ids).logits, sys.argv[3])
"""
    paths = [str(tmp_path / name) for name in ("a", "b", "logits")]
    env = os.environ | {"HF_HOME": str(tmp_path / "home")}
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    assert torch.equal(torch.load(paths[2]), model(torch.arange(9)[None]).logits)
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="config.json is not the configuration of a FoX model; its model_type must be"):
        hf.write_remote_code(tmp_path / "a")
