"""The types of the package: a strict check of a script that uses it, and documentation of everything public."""

import importlib.util
import inspect
import subprocess
import sys
import textwrap

import foxlm
from conftest import need

SCRIPT = """
import numpy as np
import torch
from typing import assert_type

import foxlm
import foxlm.hf
from foxlm import Model, Tokenizer, chunk_kda, context, forgetting_attention

x = torch.randn(1, 8, 2, 16)
gates = torch.zeros(1, 8, 2)
assert_type(forgetting_attention(x, x, x, gates), torch.Tensor)
o, lse = forgetting_attention(x, x, x, return_lse=True)
assert_type(lse, torch.Tensor)
a = np.zeros((1, 8, 2, 16), np.float32)
print(forgetting_attention(a, a, a).mean())
y, state = chunk_kda(x, x, x, -x.abs(), gates, output_final_state=True)
assert_type(state, torch.Tensor | None)
assert_type(chunk_kda(x, x, x, -x.abs(), gates, return_intermediate_states=True, safe_gate=False)[2], torch.Tensor)
assert_type(foxlm.mamba_chunk_scan_combined(x, gates, gates[0, 0], x, x, 64, z=x), torch.Tensor)
final = foxlm.mamba_chunk_scan_combined(x, gates, gates[0, 0], x, x, return_final_states=True, dt_softplus=True)
assert_type(final, tuple[torch.Tensor, torch.Tensor])
print(foxlm.chunk_gla(x, x, x, -x.abs(), chunk_size=32)[0].sum(), foxlm.parallel_attn(x, x, x).sum())
assert_type(foxlm.parallel_path_attn(x, x, x, x, gates.abs())[1], torch.Tensor | None)
assert_type(foxlm.parallel_wall_attn(x, x, x, -x.abs(), window_size=4), torch.Tensor)


def sharded(group: torch.distributed.ProcessGroup, model: foxlm.hf.FoxForCausalLM) -> int:
    part = context.chunk(x, group)
    assert_type(forgetting_attention(part, part, part, group=group), torch.Tensor)
    model.context_parallel(group)
    return context.traffic(reset=True).sent


def load(folder: str) -> None:
    model = Model.load(folder, device="cpu")
    assert_type(model.generate("text", 8, temperature=0.5, seed=1), str)
    assert_type(model.generate([1, 2], stop_ids=[3]), list[int])
    assert_type(model.generate_batch(["a", "b"]), list[str])
    assert_type(model.generate_batch([[1], [2, 3]]), list[list[int]])
    assert_type(model.loss([[1, 2]]), float)
    assert_type(model.tokenizer, Tokenizer)
    for token, logprob in model.stream(torch.arange(3), 4):
        assert_type(token, int)
        assert_type(logprob, float)
    print(model.logprobs(np.arange(4)).sum(), model.gates([1])[0], model.attention([1, 2], 0).shape)


def make(folder: str) -> foxlm.hf.FoxForCausalLM:
    config = foxlm.hf.FoxConfig.pro(vocab_size=64, hidden_size=64, num_heads=2, gate_init="spread")
    assert_type(config, foxlm.hf.FoxConfig)
    assert_type(config.num_heads, int)
    foxlm.hf.write_remote_code(folder)
    return foxlm.hf.FoxForCausalLM(config)
"""
WRONG = {
    "foxlm.Model.load(5)": "Argument 1 to \"load\"",
    "foxlm.Model.load('x').generate('a', temprature=1.0)": "Unexpected keyword argument \"temprature\"",
    "foxlm.forgetting_attention(1, 2, 3)": "forgetting_attention",
    "foxlm.chunk_gla(x, x, x, x, chunk_sizes=32)": "Unexpected keyword argument \"chunk_sizes\"",
    "foxlm.hf.FoxConfig(hidden_size='wide')": "Argument \"hidden_size\"",
}


def check(tmp_path, code):
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", tmp_path / "script.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_strict_types_of_a_script(tmp_path):
    for module in ("mypy", "torch", "transformers"):
        need(module)
    done = check(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    done = check(tmp_path, "import foxlm\nimport foxlm.hf\nimport torch\nx = torch.ones(1)\n" + "\n".join(WRONG))
    for line, sentence in enumerate(WRONG.values(), 5):
        assert any(f"script.py:{line}:" in x and sentence in x for x in done.stdout.splitlines()), (line, done.stdout)


def public(module):
    for name in module.__all__:
        item = getattr(module, name)
        yield name, item
        if inspect.isclass(item):
            own = vars(item).items()
            yield from ((f"{name}.{key}", x) for key, x in own if inspect.isfunction(x) and key[0] != "_")


def test_everything_public_is_documented():
    modules = [foxlm]
    if importlib.util.find_spec("torch") is not None:
        modules.append(importlib.import_module("foxlm.context"))
    if importlib.util.find_spec("transformers") is not None:
        modules.append(importlib.import_module("foxlm.hf"))
    named = [x for module in modules for x in public(module) if not isinstance(x[1], str)]
    missing = [name for name, item in named if not inspect.getdoc(item)]
    assert not missing

