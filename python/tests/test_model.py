"""Language models on fox's own engine, against the reference dumps. Needs NumPy alone."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

import foxlm
from fixtures import ROOT, error, folder, tensors

FAMILIES = ["fox_llama", "fox_pro", "fla_fox", "transformer_pro", "delta_net", "hgrn2", "mamba2"]


@pytest.fixture(scope="module")
def fox_pro():
    return foxlm.Model.load(folder("fox_pro"), device="cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_values_of_every_family(name):
    path = folder(name)
    model, dump = foxlm.Model.load(path, device="cpu"), tensors(path / "io.safetensors")
    ids, labels = dump["input_ids"], dump["labels"]
    assert error(model.logits(ids[0]), dump["logits"][0]) < 5e-6
    whole = np.concatenate([ids, labels[:, -1:]], 1)
    assert (whole[:, 1:] == labels).all()
    assert error(-model.logprobs(whole), dump["loss"]) < 2e-6
    assert model.loss(whole) == pytest.approx(float(dump["mean_loss"][0]), rel=1e-6)
    for row in dump["greedy"]:
        assert model.generate(row[:9], 12) == row[9:].tolist()


def test_streamed_log_probabilities_match_the_model(fox_pro):
    prompt = [1, 2, 3, 4, 5]
    stream = fox_pro.stream(prompt, 6)
    pairs = list(stream)
    ids = prompt + [token for token, _ in pairs]
    np.testing.assert_allclose([p for _, p in pairs], fox_pro.logprobs(ids)[4:], atol=1e-5)
    assert list(stream) == []
    first, _ = pairs[0]
    assert fox_pro.generate(prompt, 6, stop_ids=[first]) == []


def test_batched_answers_equal_single_ones(fox_pro):
    prompts = [[1, 2, 3], np.array([4, 5]), [6] * 40, [7]]
    options = {"temperature": 1.0, "seed": 3}
    alone = [fox_pro.generate(prompt, 9, **options) for prompt in prompts]
    assert fox_pro.generate_batch(prompts, 9, **options) == alone
    assert fox_pro.generate_batch([]) == []
    with pytest.raises(TypeError, match="prompts is a str; it must be a list of prompts"):
        fox_pro.generate_batch("abc")


def test_text_in_gives_text_out():
    path = ROOT.parent / "models" / "books-16m"
    if not path.is_dir():
        pytest.skip(f"{path} is not there: the model is part of the repository, not of the package")
    model = foxlm.Model.load(path, device="cpu")
    assert model.tokenizer.name == "bytes" and model.tokenizer.encode("\u00e9a") == [255, 195, 169, 97]
    # A character of two bytes, of which the first belongs to the prompt.
    assert model.tokenizer.decode([169, 97], after=[195]) == "\u00e9a"
    assert model.tokenizer.decode([97, 98]) == "ab" and model.tokenizer.decode([]) == ""
    texts = ["It was the best of ", "The "]
    answers = model.generate_batch(texts, 8)
    assert answers == [model.generate(text, 8) for text in texts]
    ids = [model.generate(model.tokenizer.encode(text), 8) for text in texts]
    assert answers == [bytes(found).decode() for found in ids]


def test_tokenizers_by_name(tmp_path):
    words = foxlm.Tokenizer.load("gpt2")
    assert words.encode("Hello world", add_bos=False) == [15496, 995] and words.bos_id == 50256
    assert repr(words) == "Tokenizer(gpt2, 50257 ids)"
    with pytest.raises(ValueError, match="id 50257 at position 0 is not from 0 to 50256"):
        words.decode([50257])
    with pytest.raises(ValueError, match="not a usable tokenizer"):
        foxlm.Tokenizer.load(tmp_path)


def test_sampling_follows_its_seed(fox_pro):
    draw = lambda seed: fox_pro.generate([1, 2, 3], 20, temperature=2.0, top_k=20, top_p=0.95, seed=seed)
    assert draw(1) == draw(1) and draw(1) != draw(2)


def test_gates_and_attention(fox_pro):
    ids = tensors(folder("fox_pro") / "io.safetensors")["input_ids"][0]
    gates = fox_pro.gates(ids)
    assert len(gates) == fox_pro.num_layers == 2
    assert all(g.shape == (2, 70) and ((g > 0) & (g < 1)).all() for g in gates)
    weights = fox_pro.attention(ids, 1)
    assert weights.shape == (2, 70, 70)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (np.triu(weights, 1) == 0).all()
    transformer = foxlm.Model.load(folder("transformer_pro"), device="cpu")
    assert transformer.gates(ids) == [None, None]
    # A layer of Mamba and one of attention without gates.
    hybrid = foxlm.Model.load(folder("samba"), device="cpu")
    assert hybrid.gates(ids[:5] % 48) == [None, None] and hybrid.attention(ids[:5] % 48, 1).shape == (2, 5, 5)
    with pytest.raises(ValueError, match="layer 0 has no attention"):
        hybrid.attention(ids[:5] % 48, 0)


def test_gates_follow_from_the_weights_of_the_model(fox_pro):
    ids = tensors(folder("fox_pro") / "io.safetensors")["input_ids"][0]
    part = tensors(folder("fox_pro") / "model.safetensors")
    x = part["model.embeddings.weight"][ids].astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * part["model.layers.0.attn_norm.weight"]
    z = x @ part["model.layers.0.attn.fgate_proj.weight"].T + part["model.layers.0.attn.fgate_proj.bias"]
    np.testing.assert_allclose(fox_pro.gates(ids)[0], 1 / (1 + np.exp(-z.T)), rtol=1e-5)


@pytest.mark.parametrize("name", ["fox_pro", "hf_mistral_window"])
def test_attention_weights_are_those_of_the_op(name):
    model = foxlm.Model.load(folder(name), device="cpu")
    ids = tensors(folder(name) / "io.safetensors")["input_ids"][0]
    q, k, gates, (heads, kv_heads, dim, scale, window) = model._core.attention_operands(ids.tolist(), 1)
    shaped = lambda x, *shape: np.asarray(x, np.float32).reshape(1, len(ids), *shape)
    # With unit vectors as values the output is the weights.
    units = np.broadcast_to(np.eye(len(ids), dtype=np.float32)[None, :, None], (1, len(ids), kv_heads, len(ids)))
    q, k, gates = shaped(q, heads, dim), shaped(k, kv_heads, dim), None if gates is None else shaped(gates, heads)
    o = foxlm.forgetting_attention(q, k, units, gates, sm_scale=scale, window=window)
    np.testing.assert_allclose(model.attention(ids, 1), o[0].swapaxes(0, 1), atol=1e-5)


def test_errors(fox_pro, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        foxlm.Model.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="config.json"):
        foxlm.Model.load(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="id 64 at position 1 is not from 0 to 63"):
        fox_pro.logits([1, 64])
    with pytest.raises(ValueError, match="id 64 at position 3 of row 1 is not from 0 to 63"):
        fox_pro.logprobs([[1, 2, 3, 4], [5, 6, 7, 64]])
    with pytest.raises(ValueError, match=r"ids have shape \[0\]"):
        fox_pro.logits([])
    with pytest.raises(ValueError, match="temperature must be 0 or more, not -1"):
        fox_pro.generate([1], 3, temperature=-1.0)
    with pytest.raises(ValueError, match="layer 2; the model has 2 layers"):
        fox_pro.attention([1, 2], 2)
    with pytest.raises(ValueError, match="bf16 needs a GPU"):
        foxlm.Model.load(folder("fox_pro"), device="cpu", dtype="bfloat16")
    with pytest.raises(ValueError, match="device cudax; use cpu, cuda or cuda:N"):
        foxlm.Model.load(folder("fox_pro"), device="cudax")
    for name, value in (("max_tokens", -1), ("top_k", -1), ("seed", 2**64)):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be from 0 to"):
            fox_pro.generate([1], **{name: value})
    with pytest.raises(TypeError, match="max_tokens is 1.5; it must be an integer"):
        fox_pro.generate([1], 1.5)
    with pytest.raises(ValueError, match="layer is -1; it must be from 0"):
        fox_pro.attention([1, 2], -1)
    small = foxlm.Model.load(folder("fox_pro"), device="cpu", cache_bytes=100)
    with pytest.raises(ValueError, match="but the engine has 100; increase cache_bytes"):
        small.generate([1], 2)


def engines():
    """Engines of this process that have a thread."""
    names = [open(f"/proc/self/task/{n}/comm").read() for n in os.listdir("/proc/self/task")]
    return names.count("fox-infer\n")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list threads")
def test_unfinished_stream_is_cancelled_on_drop():
    gc.collect()
    before = engines()
    model = foxlm.Model.load(folder("fox_pro"), device="cpu")
    # Too many tokens to finish during the test.
    stream = model.stream([1, 2, 3], 65000)
    first = next(stream)
    del model
    assert engines() == before + 1
    assert next(stream) != first
    del stream
    assert engines() == before


FORKED = """
import os, sys, foxlm
folder = sys.argv[1]
model = foxlm.Model.load(folder, device="cpu")
model.logits([1, 2])
stream = model.stream([1, 2, 3], 5)
if os.fork() == 0:
    for use in (lambda: model.logits([1, 2]), lambda: next(stream), lambda: foxlm.Model.load(folder, device="cpu")):
        try:
            use()
        except RuntimeError as error:
            print(error)
    del model, stream
    print("left", flush=True)
else:
    assert os.wait()[1] == 0
    assert len(list(stream)) == 5
"""

LATE = """
import os, sys, numpy, foxlm
x = numpy.ones((1, 300, 2, 8), numpy.float32)
foxlm.forgetting_attention(x, x, x)
if os.fork() == 0:
    print(foxlm.Model.load(sys.argv[1], device="cpu").logits([1, 2]).shape, flush=True)
else:
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_is_refused():
    run = lambda code: subprocess.run(
        [sys.executable, "-c", code, folder("fox_pro")], capture_output=True, text=True, timeout=300
    )
    done, own = run(FORKED), "this model was loaded before a fork; load it in the process that uses it, and only there"
    load = (
        "a model was loaded before this process was forked, and the threads of models stayed there; "
        "load models after forks only, or start processes with spawn"
    )
    assert done.stdout == f"{own}\n{own}\n{load}\nleft\n" and done.returncode == 0, done.stderr
    assert "panicked" not in done.stderr
    # A process that had no model before it was forked may load one afterwards.
    assert run(LATE).stdout == "(2, 64)\n"
