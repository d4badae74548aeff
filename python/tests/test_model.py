"""Language models on fox's own engine, against the reference dumps. Needs NumPy alone."""

import os

import numpy as np
import pytest

import foxlm
from fixtures import error, folder, tensors

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


def test_streaming_gives_the_model_s_own_log_probabilities(fox_pro):
    prompt = [1, 2, 3, 4, 5]
    stream = fox_pro.stream(prompt, 6)
    pairs = list(stream)
    ids = prompt + [token for token, _ in pairs]
    np.testing.assert_allclose([p for _, p in pairs], fox_pro.logprobs(ids)[4:], atol=1e-5)
    assert list(stream) == []
    first, _ = pairs[0]
    assert fox_pro.generate(prompt, 6, stop_ids=[first]) == []


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


def test_complaints(fox_pro, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        foxlm.Model.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="config.json"):
        foxlm.Model.load(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="id 64 at position 1 is not from 0 to 63"):
        fox_pro.logits([1, 64])
    with pytest.raises(ValueError, match=r"ids have shape \[0\]"):
        fox_pro.logits([])
    with pytest.raises(ValueError, match="temperature must be 0 or more, not -1"):
        fox_pro.generate([1], 3, temperature=-1.0)
    with pytest.raises(ValueError, match="layer 2; the model has 2 attention layers"):
        fox_pro.attention([1, 2], 2)
    with pytest.raises(ValueError, match="bf16 needs a GPU"):
        foxlm.Model.load(folder("fox_pro"), device="cpu", dtype="bfloat16")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_is_told_to_load_its_own(fox_pro):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fox_pro.logits([1, 2])
            words = "no complaint"
        except RuntimeError as error_:
            words = str(error_)
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == "this model was loaded before a fork; load it in the process that uses it"
    os.close(read)
