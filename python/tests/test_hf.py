"""The Hugging Face model against the reference dumps, and the ways in which transformers uses a model."""

import json

import numpy as np
import pytest
from conftest import need
from fixtures import error, folder, tensors

torch = need("torch")
transformers = need("transformers")

import foxlm.hf as hf  # noqa: E402

DUMPS = [
    "fla_fox", "fox_llama", "fox_llama_qknorm", "fox_llama_qknorm_ogate", "fox_llama_rope", "fox_llama_silu_ogate",
    "fox_pro", "fox_pro_bias_only", "fox_pro_fixed_alibi", "fox_pro_left_padded", "fox_pro_no_fgate",
    "fox_pro_no_kvshift", "fox_pro_no_ogate", "fox_pro_no_onorm", "fox_pro_no_qknorm", "fox_pro_rope",
    "fox_pro_shared_qknorm", "transformer_llama_as_fox", "transformer_pro",
]  # fmt: skip


def load(name):
    return transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)


@pytest.mark.parametrize("name", DUMPS)
def test_logits_and_gradients_equal_the_dump(name):
    model, dump = load(name), tensors(folder(name) / "io.safetensors")
    ids, labels = (torch.from_numpy(dump[key]).long() for key in ("input_ids", "labels"))
    mask = None if "attention_mask" not in dump else torch.from_numpy(dump["attention_mask"])
    logits = model(ids, attention_mask=mask).logits
    assert error(logits.detach(), dump["logits"]) < 5e-6
    if mask is not None:
        labels = labels.masked_fill(mask == 0, -100)
    loss = model(ids, attention_mask=mask, shift_labels=labels).loss
    assert loss.item() == pytest.approx(float(dump["mean_loss"][0]), rel=2e-6)
    loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    wanted = {key[5:]: value for key, value in dump.items() if key.startswith("grad.")}
    assert wanted.keys() == grads.keys()
    for key, value in wanted.items():
        assert error(grads[key], value) < 2e-5, key


@pytest.mark.parametrize("name", ["fox_pro", "fox_llama", "transformer_llama"])
def test_training_follows_the_reference_run(name):
    path = folder(name, "training")
    run, dump = json.loads((path / "run.json").read_text()), tensors(path / "run.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    # Weight decay on matrices only.
    groups = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": run["weight_decay"]}, {"params": groups[1], "weight_decay": 0.0}],
        betas=run["betas"], eps=run["eps"],
    )  # fmt: skip
    losses = []
    for ids, labels, lr in zip(dump["input_ids"], dump["labels"], dump["lr"].tolist()):
        loss = model(torch.from_numpy(ids).long(), shift_labels=torch.from_numpy(labels).long()).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run["clip"])
        assert norm.item() == pytest.approx(dump["grad_norm"][len(losses)], rel=5e-3)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, dump["loss"], rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in DUMPS if name != "fox_pro_left_padded"])
def test_generate_with_a_cache_gives_the_greedy_tokens(name):
    model, dump = load(name).eval(), tensors(folder(name) / "io.safetensors")
    greedy = torch.from_numpy(dump["greedy"]).long()
    for use_cache in (True, False):
        out = model.generate(
            greedy[:, :9],
            attention_mask=torch.ones_like(greedy[:, :9]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=use_cache,
        )
        assert torch.equal(out, greedy), use_cache


@pytest.mark.parametrize("name", ["fox_pro", "fox_pro_rope", "transformer_llama_as_fox"])
def test_chunked_prefill_and_left_padding_keep_the_logits(name):
    model, dump = load(name).eval(), tensors(folder(name) / "io.safetensors")
    ids = torch.from_numpy(dump["input_ids"]).long()
    cache, logits = None, []
    for chunk in ids.split([40, 1, 1, 20, 8], 1):
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits.detach())
    assert cache.get_seq_length() == 70
    assert error(torch.cat(logits, 1), dump["logits"]) < 5e-6
    padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), ids), 1)
    mask = torch.cat((torch.zeros(2, 5, dtype=torch.long), torch.ones_like(ids)), 1)
    first = model(padded[:, :50], attention_mask=mask[:, :50], use_cache=True)
    rest = model(padded[:, 50:], attention_mask=mask, past_key_values=first.past_key_values)
    logits = torch.cat((first.logits[:, 5:], rest.logits), 1)
    assert error(logits.detach(), dump["logits"]) < 5e-6


def test_beams_sampling_and_padding_in_generate():
    model = load("fox_pro").eval()
    short, long = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 2, 3, 4, 5]])
    both = torch.cat((torch.nn.functional.pad(short, (2, 0)), long))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    out = model.generate(both, attention_mask=mask, **options)
    for row, alone in zip(out, (short, long)):
        assert torch.equal(row[5:], model.generate(alone, **options)[0, alone.shape[1] :])
    beams = model.generate(long, num_beams=3, **options)
    assert torch.equal(beams, model.generate(long, num_beams=3, use_cache=False, **options))


def test_rejects_unsupported_masks():
    model = load("fox_pro").eval()
    ids, mask = torch.arange(1, 13).view(2, 6), torch.ones(2, 6)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="attention_mask has zeros between ones; pad on the left"):
        model(ids, attention_mask=mask)
    # On the right, and in a row that is all padding, there are none.
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0] * 6])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[0, 1:4], model(ids[:1, 1:4]).logits[0])
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1\], expected \[2, 7\]"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values is a tuple; use the FoxCache that the model returned"):
        model(ids[:, :1], past_key_values=((),))
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(ids[:1], prompt_lookup_num_tokens=2, max_new_tokens=2)


def test_activation_checkpointing_keeps_the_cache():
    model = load("fox_pro").eval()
    ids = torch.arange(1, 7)[None]
    want, cache = model(ids).logits[:, 4:], model(ids[:, :4], use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    torch.testing.assert_close(model(ids[:, 4:], past_key_values=cache).logits, want)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_size": 12, "use_rope": True}, "a head dim of 3 with use_rope"),
        ({"fgate_type": "fixed", "fgate_bias_init": True}, "fgate_bias_init needs decay_time_min and decay_time_max"),
    ],
)
def test_rejects_invalid_configurations(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        hf.FoxConfig(**({"num_heads": 4, "hidden_size": 32} | fields))


def test_pruning_changes_little():
    model, dump = load("fox_pro"), tensors(folder("fox_pro") / "io.safetensors")
    ids = torch.from_numpy(np.tile(dump["input_ids"], (1, 4))).long()
    full = model(ids).logits
    for layer in model.model.layers:
        layer.attn.config.log_pruning_tolerance = -10.0
    assert error(model(ids).logits.detach(), full.detach()) < 1e-3


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    "config, kind",
    [
        (hf.FoxConfig.pro(num_heads=2, **SIZES), hf.FoxForCausalLM),
        (hf.FoxTransformerConfig(num_heads=4, num_kv_heads=2, window_size=7, **SIZES), hf.FoxTransformerForCausalLM),
        (
            hf.FlaFoxConfig(num_heads=4, num_kv_heads=2, qk_norm=True, use_output_gate=True, **SIZES),
            hf.FlaFoxForCausalLM,
        ),
    ],
)
def test_save_and_load_give_the_same_model(config, kind, tmp_path):
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is kind
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    import foxlm

    engine = foxlm.Model.load(tmp_path, device="cpu")
    assert error(engine.logits(ids[0]), model(ids).logits[0].detach()) < 5e-6


def test_fixed_gates_have_the_configured_memory():
    config = hf.FoxConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=4,
        fgate_type="fixed",
        fgate_bias_init=True,
        decay_time_min=2.0,
        decay_time_max=128.0,
    )
    bias = hf.FoxForCausalLM(config).model.layers[0].attn.fgate_bias
    times = -1 / torch.nn.functional.logsigmoid(bias)
    torch.testing.assert_close(times, torch.tensor([2.0, 8.0, 32.0, 128.0]))


def test_trainer(tmp_path):
    need("accelerate")
    config = hf.FoxConfig.pro(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    model = hf.FoxForCausalLM(config)
    rows = [{"input_ids": torch.arange(n, n + 24) % 20, "labels": torch.arange(n, n + 24) % 20} for n in range(40)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=30, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        logging_steps=30, save_strategy="no", use_cpu=True, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
    result = trainer.train()
    # Every token follows from the one before it: at first the loss is ln 20 = 3.0.
    assert result.training_loss < 2.0
    assert trainer.evaluate()["eval_loss"] < 0.5
    batch = torch.arange(24)[None] % 20
    assert model.eval()(batch, labels=batch).loss.item() < 0.5
