"""Tools around a Hugging Face model: PEFT and the command line of lm-eval."""

import json
import os
import subprocess
import sys

import pytest
from conftest import need

torch = need("torch")
transformers = need("transformers")

import foxlm.hf as hf  # noqa: E402

SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}


def model():
    torch.manual_seed(0)
    return hf.FoxForCausalLM(hf.FoxConfig.pro(**SIZES, pad_token_id=0))


@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "linear", "o_proj"]])
def test_lora_learns_and_merges(targets):
    peft = need("peft")
    tuned = peft.get_peft_model(model(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4))
    ids = torch.arange(40).view(2, 20)
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(8):
        loss = tuned(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    want = tuned.eval()(input_ids=ids).logits
    torch.testing.assert_close(tuned.merge_and_unload()(ids).logits, want, atol=1e-3, rtol=1e-3)


def test_prefix_tuning_changes_and_learns():
    peft = need("peft")
    plain = model().eval()
    ids = torch.arange(24).view(2, 12)
    before = plain(ids).logits
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(plain, config).train()
    loss = tuned(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    grads = [p.grad for p in tuned.parameters() if p.requires_grad]
    assert grads and all(g is not None and g.abs().max() > 0 for g in grads)
    out = tuned.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert out.shape == before.shape and (out - before).abs().max() > 1e-4
    tokens = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 15)


@pytest.mark.parametrize("launcher", ["foxlm.lm_eval", "lm_eval"])
def test_lm_eval_reads_a_saved_model(launcher, tmp_path):
    need("lm_eval")
    tokenizers = need("tokenizers")
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(n): n for n in range(256)}, unk_token="?"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="\n", pad_token="\x00")
    folder, tasks, out = tmp_path / "model", tmp_path / "tasks", tmp_path / "out"
    net = model()
    net.save_pretrained(folder)
    fast.save_pretrained(folder)
    tasks.mkdir()
    (tasks / "data.jsonl").write_text("".join(json.dumps({"text": f"the {n}th line"}) + "\n" for n in range(3)))
    task = {
        "task": "lines", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tasks / "data.jsonl")}},
        "output_type": "loglikelihood_rolling", "test_split": "test", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    (tasks / "lines.yaml").write_text(json.dumps(task))
    # Without foxlm's launcher the files beside the checkpoint find the classes.
    alone = launcher == "lm_eval"
    if alone:
        hf.write_remote_code(folder)
    given = f"pretrained={folder}" + (",trust_remote_code=True" if alone else "")
    command = [sys.executable, "-m", launcher, "--model", "hf", "--model_args", given]
    command += ["--tasks", "lines", "--include_path", tasks, "--device", "cpu", "--output_path", out]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HOME": str(tmp_path)})
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(next(out.rglob("results*.json")).read_text())["results"]["lines"]
    bits = 0.0
    for n in range(3):
        ids = torch.tensor([[10, *map(ord, f"the {n}th line")]])
        bits += net.eval()(ids, labels=ids).loss.item() * (ids.shape[1] - 1) / 0.6931471805599453
    assert found["bits_per_byte,none"] == pytest.approx(bits / sum(len(f"the {n}th line") for n in range(3)), rel=1e-3)
