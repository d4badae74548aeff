"""The Hugging Face model against the reference dumps, and the ways in which transformers uses a model."""

import json

import numpy as np
import pytest
from conftest import need
from fixtures import error, folder, tensors

torch = need("torch")
transformers = need("transformers")

from torch._dynamo.testing import CompileCounter  # noqa: E402

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


@pytest.mark.parametrize("name", ["fox_pro", "transformer_llama_as_fox"])
def test_masks_with_holes_remove_tokens(name):
    model = load(name).eval()
    ids = torch.arange(1, 21).view(2, 10)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0, 1, 0], [1] * 10])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    seen = mask[0].bool()
    first = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    alone = [model(x, use_cache=True) for x in (ids[:1, seen], ids[1:])]
    for row, keep, want in ((0, seen, alone[0]), (1, mask[1].bool(), alone[1])):
        torch.testing.assert_close(first.logits[row, keep], want.logits[0], atol=1e-4, rtol=1e-4)
    # At a masked token stands what the last token before it gave: padding on the right can be continued.
    torch.testing.assert_close(first.logits[0, 9], first.logits[0, 8])
    more = torch.cat((mask, torch.ones(2, 2, dtype=mask.dtype)), 1)
    after = model(ids[:, :2], attention_mask=more, position_ids=(more.cumsum(1) - 1)[:, 10:],
                  past_key_values=first.past_key_values)  # fmt: skip
    for row, want in enumerate(alone):
        last = model(ids[row : row + 1, :2], past_key_values=want.past_key_values).logits[0]
        torch.testing.assert_close(after.logits[row], last, atol=1e-4, rtol=1e-4)
    # New tokens may be masked after cached ones, and the cache can be cropped.
    cache = model(ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6], use_cache=True).past_key_values
    cache.crop(-2)
    late = model(ids[:, 4:], attention_mask=mask, position_ids=positions[:, 4:], past_key_values=cache)
    torch.testing.assert_close(late.logits[0, [0, 1, 4]], alone[0].logits[0, 2:5], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(late.logits[1], alone[1].logits[0, 4:], atol=1e-4, rtol=1e-4)
    both = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(both.logits, first.logits, atol=1e-4, rtol=1e-4)
    weights = both.attentions[1][0]
    assert weights[:, seen][:, :, ~seen].abs().max() == 0
    torch.testing.assert_close(weights[:, seen].sum(-1), torch.ones(weights.shape[0], 5))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for given in (torch.tensor([[1] * 7 + [0] * 3, [1] * 10]), mask):
        out, kept = model.generate(ids, attention_mask=given, **options), given[0].bool()
        assert torch.equal(out[0, 10:], model.generate(ids[:1, kept], **options)[0, kept.sum() :])
        assert torch.equal(out[1:], model.generate(ids[1:], **options))


def test_rejects_unsupported_arguments():
    model = load("fox_pro").eval()
    ids = torch.arange(1, 13).view(2, 6)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1\], expected \[2, 7\]"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values is a tuple that cannot hold forget gates"):
        model(ids[:, :1], past_key_values=((),))
    quantized = type("QuantizedLayer", (transformers.cache_utils.DynamicLayer,), {})
    foreign = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    for given in (foreign, transformers.Cache(layers=[quantized(), quantized()])):
        with pytest.raises(ValueError, match="past_key_values is a .*Cache that cannot hold forget gates"):
            model(ids, past_key_values=given)
    with pytest.raises(ValueError, match="past_key_values has 5 layers, but the model 2; use a new cache"):
        model(ids, past_key_values=hf.FoxCache(5))
    for given in (cache, transformers.StaticCache(config=model.config, max_cache_len=8)):
        model(ids[:, :1], past_key_values=given)
        with pytest.raises(ValueError, match="past_key_values has 2 rows, but the input 1; use a new cache"):
            model(ids[:1, :1], past_key_values=given)
    cache.crop(-1)
    static = transformers.StaticCache(config=model.config, max_cache_len=4)
    with pytest.raises(ValueError, match="6 tokens do not fit a static cache of 4"):
        model(ids, past_key_values=static)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1, 6, 5\], expected \[2, 1, 6, 6\]"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask has four dimensions and a bias"):
        model(ids, attention_mask=torch.full((2, 1, 6, 6), -0.5))
    with pytest.raises(ValueError, match="attention_mask has four dimensions and is int64; pass bool, true for tokens"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.long).tril())
    with pytest.raises(ValueError, match="attention_mask is a dict; it must be a tensor of PyTorch"):
        model(ids, attention_mask={"full_attention": torch.ones(2, 6)})
    with pytest.raises(ValueError, match=r"input_ids have shape \[6\]; they must be \[batch, time\]"):
        model(ids[0])
    with pytest.raises(ValueError, match="model_kwargs. are not used by the model: .'temprature'."):
        model.generate(ids, max_new_tokens=1, temprature=1.0)
    prefix = torch.ones(6, 6, dtype=torch.bool).tril()
    prefix[0, 1] = True
    with pytest.raises(ValueError, match="attention_mask lets a token see later ones, but FoX is causal; mask them"):
        model(ids, attention_mask=prefix.expand(2, 1, 6, 6))
    static = transformers.StaticCache(config=model.config, max_cache_len=7)
    model(ids, past_key_values=static)
    with pytest.raises(ValueError, match="8 tokens do not fit a static cache of 7"):
        model(ids[:, :2], past_key_values=static)
    gap = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    gap[1, 0, 0, 5] = False
    with pytest.raises(ValueError, match="attention_mask has four dimensions and hides the last cached token"):
        model(ids[:, :1], attention_mask=gap, past_key_values=cache)
    with pytest.raises(TypeError, match="FoxModel.forward has no argument attention_msk"):
        model(ids, attention_msk=torch.ones(2, 6))
    with pytest.raises(ValueError, match="packed sequences with a cache; set use_cache=False"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 2, 6]), use_cache=True)
    with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 2, 5\] for input of shape \[1, 6\]"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 2, 5]))


NAMES = ["fox_pro", "fox_pro_rope", "transformer_llama_as_fox"]


@pytest.mark.parametrize("name", NAMES)
def test_static_caches_keep_the_logits(name):
    model = load(name).eval()
    ids = torch.randint(0, 64, (2, 14), generator=torch.Generator().manual_seed(2))
    holes = torch.ones_like(ids)
    holes[0, :3] = holes[1, 6] = 0
    for mask in (None, holes):
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        want = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True)
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        for _ in range(2):
            for a, e in ((0, 6), (6, 7), (7, 8), (8, 14)):
                cut = lambda x, a=a, e=e: None if x is None else x[:, a:e]
                given = None if mask is None else mask[:, :e]
                out = model(
                    cut(ids), attention_mask=given, position_ids=cut(positions), past_key_values=cache,
                    output_attentions=e < 14,
                )  # fmt: skip
                shown = slice(None) if mask is None else mask[:, a:e].bool()
                torch.testing.assert_close(out.logits[shown], want.logits[:, a:e][shown], atol=1e-5, rtol=1e-5)
                if e < 14:
                    found = torch.nn.functional.pad(want.attentions[1][:, :, a:e, :e], (0, 20 - e))
                    torch.testing.assert_close(out.attentions[1], found, atol=1e-5, rtol=1e-5)
            assert cache.get_seq_length() == 14 and out.past_key_values is cache
            # The same cache serves the next sequences.
            cache.reset()
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(ids) if mask is None else mask
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), model.generate(ids, **options))


def test_static_decoding_compiles_once():
    model = load("fox_pro").eval()
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    want, cache = model(ids).logits, transformers.StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :6], past_key_values=cache)
    counter = CompileCounter()
    call = lambda x, cache, mask: model(x, past_key_values=cache, attention_mask=mask).logits
    # As `generate` calls it on a GPU: with a mask of all places.
    for mask in (None, torch.ones(2, 16, dtype=torch.long)):
        step = torch.compile(call, fullgraph=True, backend=counter)
        for n in range(6, 12):
            torch.testing.assert_close(step(ids[:, n : n + 1], cache, mask), want[:, n : n + 1], atol=1e-5, rtol=1e-5)
        cache.reset()
        model(ids[:, :6], past_key_values=cache)
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", NAMES)
def test_sdpa_gives_the_same_logits_and_gradients(name):
    model = load(name)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(4))
    mask = torch.tensor([[0, 0] + [1] * 10, [1] * 5 + [0] + [1] * 6])
    packed = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    assert model.config._attn_implementation == "eager"
    for options in ({}, {"attention_mask": mask}, {"position_ids": packed}):
        found = []
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            logits = model(ids, **options).logits
            if "attention_mask" in options:
                logits = logits[mask.bool()]
            grads = torch.autograd.grad(logits.square().sum(), [p for p in model.parameters() if p.requires_grad])
            found.append((logits, *grads))
        for eager, sdpa in zip(*found):
            torch.testing.assert_close(sdpa, eager, atol=1e-4, rtol=1e-3)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match='attn_implementation is "other", which has no forget gates'):
        transformers.AttentionInterface.register("other", lambda *_, **__: None)
        model.set_attn_implementation("other")


@pytest.mark.parametrize("name", NAMES)
def test_masks_with_a_row_for_each_token(name):
    model = load(name).eval()
    ids = torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(5))
    # Three tokens, and three continuations of them that do not see each other.
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[3:, 3:] = torch.eye(3, dtype=torch.bool)
    positions = torch.tensor([[0, 1, 2, 3, 3, 3]])
    for given in (mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
        logits = model(ids, attention_mask=given[None, None], position_ids=positions).logits
        for n in (3, 4, 5):
            alone = model(ids[:, [0, 1, 2, n]]).logits
            torch.testing.assert_close(logits[:, n], alone[:, 3], atol=1e-5, rtol=1e-5)
    # The continuations after cached tokens, in a cache of 8 places, and in one that grows.
    static = transformers.StaticCache(config=model.config, max_cache_len=8)
    for cache, places in ((static, 8), (transformers.DynamicCache(), 6)):
        model(ids[:, :3], past_key_values=cache)
        rows = torch.nn.functional.pad(mask[3:], (0, places - 6))[None, None]
        after = model(ids[:, 3:], attention_mask=rows, position_ids=positions[:, 3:], past_key_values=cache).logits
        torch.testing.assert_close(after, logits[:, 3:], atol=1e-5, rtol=1e-5)


def test_continuous_batching_is_refused():
    model = load("fox_pro").eval()
    for call in (model.generate_batch, model.init_continuous_batching, model.continuous_batching_context_manager):
        with pytest.raises(NotImplementedError, match="FoxForCausalLM has no continuous batching here"):
            call([[1, 2, 3]])


@pytest.mark.parametrize("name", ["fox_pro", "fox_pro_rope", "fla_fox"])
def test_packed_sequences_do_not_see_each_other(name):
    model = load(name).eval()
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    parts = [(0, 0, 5), (0, 5, 12), (1, 0, 12)]
    want = {part: model(ids[part[0] : part[0] + 1, part[1] : part[2]]).logits[0] for part in parts}
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    one = {"cu_seqlens": torch.tensor([0, 5, 12])}
    flash = {"cu_seq_lens_q": one["cu_seqlens"], "cu_seq_lens_k": one["cu_seqlens"], "max_length_q": 7,
             "max_length_k": 7}  # fmt: skip
    calls = [
        (ids, {"position_ids": positions}), (ids[:1], {"position_ids": positions[:1]}), (ids[:1], one),
        (ids[:1], flash), (ids, {"seq_idx": (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)}),
        (ids[:1], one | {"position_ids": positions[:1], "output_attentions": True}),
    ]  # fmt: skip
    for given, options in calls:
        out = model(given, **options)
        for row, a, b in parts[: 2 if len(given) == 1 else 3]:
            torch.testing.assert_close(out.logits[row, a:b], want[row, a, b], atol=1e-4, rtol=1e-4)
        assert out.past_key_values is None
    assert out.attentions[0][0, :, 5:, :5].abs().max() == 0


def test_attention_weights_give_the_output():
    model = load("fox_pro").eval()
    seen = {}
    attn = model.model.layers[1].attn
    attn.v_proj.register_forward_hook(lambda *_: None)
    original = attn._project
    attn._project = lambda proj, *rest: seen.setdefault(id(proj), original(proj, *rest))
    heads = []
    attn.output_norm.register_forward_pre_hook(lambda _, x: heads.append(x[0]))
    out = model(torch.arange(1, 9)[None], output_attentions=True)
    v = seen[id(attn.v_proj)][0].unflatten(-1, (-1, attn.head_dim))
    mixed = torch.einsum("bhij,bjhd->bihd", out.attentions[1], v).flatten(-2)
    torch.testing.assert_close(mixed, heads[0], atol=1e-5, rtol=1e-5)


def test_caches_of_the_library_are_filled():
    model = load("fox_pro").eval()
    ids = torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(1))
    want = model(ids).logits
    for cache in (transformers.DynamicCache(), transformers.DynamicCache(config=model.config)):
        out = model(ids[:, :70], past_key_values=cache)
        assert out.past_key_values is cache and cache.get_seq_length() == 70 and len(cache) == 2
        torch.testing.assert_close(model(ids[:, 70:], past_key_values=cache).logits, want[:, 70:], atol=1e-4, rtol=1e-4)
        cache.crop(-60)
        assert cache.get_seq_length() == 30
        torch.testing.assert_close(model(ids[:, 30:], past_key_values=cache).logits, want[:, 30:], atol=1e-4, rtol=1e-4)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.crop(-1)
        again = model(ids[:1, 89:].expand(2, 1), past_key_values=cache).logits
        torch.testing.assert_close(again[0], again[1])
    with pytest.raises(ValueError, match="cannot remove 80 tokens from the cache"):
        cache.crop(-80)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["fox_pro", "fox_llama"])
def test_assisted_decoding_gives_the_greedy_tokens(name):
    model, helper = load(name).eval(), load("fox_pro_rope").eval()
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "use_cache": True}
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), want)
    assert torch.equal(model.generate(ids, assistant_model=helper, **options), want)
    assert torch.equal(model.generate(ids, assistant_model=model, **options), want)


def test_compiles_whole_with_a_mask():
    model = load("fox_pro").eval()
    ids, mask = torch.arange(1, 13).view(2, 6), torch.tensor([[0, 1, 1, 1, 0, 1], [1] * 6])
    loss = lambda ids, mask: model(ids, attention_mask=mask, use_cache=False, labels=ids).loss
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(ids, mask), list(model.parameters())) for f in (fast, loss))):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_exports_with_a_mask_for_all_lengths():
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = load("fox_pro").eval()

        def forward(self, ids, mask):
            return self.model(ids, attention_mask=mask, use_cache=False).logits

    module, time = Logits(), torch.export.Dim("time", min=3, max=512)
    ids, mask = torch.arange(1, 13).view(2, 6), torch.tensor([[0, 1, 1, 1, 0, 1], [1] * 6])
    exported = torch.export.export(module, (ids, mask), dynamic_shapes=({1: time}, {1: time})).module()
    ids, mask = torch.cat((ids, ids + 20), 1), torch.cat((mask, mask), 1)
    seen = mask.bool()
    torch.testing.assert_close(exported(ids, mask)[seen], module(ids, mask)[seen], atol=1e-5, rtol=1e-5)


def test_compiled_models_refuse_what_eager_ones_refuse():
    model = load("fox_pro").eval()
    ids, causal = torch.arange(1, 13).view(2, 6), torch.ones(2, 1, 6, 6).tril()
    fast = torch.compile(lambda x, **given: model(x, use_cache=False, **given).logits, fullgraph=True,
                         backend="aot_eager")  # fmt: skip
    hidden = torch.where(causal.bool(), 0.0, -torch.inf)
    torch.testing.assert_close(fast(ids, attention_mask=hidden), model(ids).logits, atol=1e-5, rtol=1e-5)
    packed = {"attention_mask": torch.ones_like(ids), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    later = {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool)}
    for given, words in (
        ({"attention_mask": hidden - 0.5}, "attention_mask has four dimensions and a bias"),
        (later, "attention_mask lets a token see later ones"),
        (packed, "position_ids of packed tokens in a compiled model; pass cu_seqlens"),
    ):
        with pytest.raises(RuntimeError, match=words):
            fast(ids, **given)


def test_l2warp_adds_to_the_gradient_of_the_largest_logit():
    torch.manual_seed(0)
    config = hf.FlaFoxConfig(num_heads=2, use_l2warp=True, **SIZES)
    model = hf.FlaFoxForCausalLM(config).train()
    ids = torch.arange(8)[None]
    grads = []
    for on in (True, False):
        model.config.use_l2warp = on
        out = model(ids, labels=ids)
        (grad,) = torch.autograd.grad(3 * out.loss, out.logits)
        grads.append(grad)
    largest, at = out.logits.max(-1, keepdim=True)
    want = torch.zeros_like(grads[0]).scatter(-1, at, 3 * largest * 1e-4 / 8)
    torch.testing.assert_close(grads[0] - grads[1], want, atol=1e-7, rtol=1e-3)


def test_gates_start_as_the_engine_starts_them():
    start = lambda **more: hf.FoxForCausalLM(
        hf.FoxConfig(num_heads=4, max_position_embeddings=512, **SIZES, **more)
    ).model.layers[1].attn.fgate_proj.bias
    times = lambda bias: -1 / torch.nn.functional.logsigmoid(bias.detach())
    assert start().abs().max() == 0
    torch.testing.assert_close(times(start(gate_init="spread")), torch.tensor([1.0, 8.0, 64.0, 512.0]))
    torch.testing.assert_close(times(start(gate_init=[2, 16])), torch.tensor([2.0, 4.0, 8.0, 16.0]))


def test_loaded_gates_are_kept(tmp_path):
    config = hf.FoxConfig(num_heads=4, gate_init="spread", **SIZES)
    model = hf.FoxForCausalLM(config)
    model.model.layers[0].attn.fgate_proj.bias.data.fill_(0.25)
    model.save_pretrained(tmp_path)
    again = hf.FoxForCausalLM.from_pretrained(tmp_path)
    assert again.config.gate_init == "spread"
    assert (again.model.layers[0].attn.fgate_proj.bias == 0.25).all()


def test_activation_checkpointing_keeps_gradients_and_the_cache():
    model = load("fox_pro").train()
    ids = torch.arange(1, 7)[None]
    gradients = lambda: torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(torch.equal(*pair) for pair in zip(plain, gradients()))
    model.gradient_checkpointing_disable()
    model.eval()
    want, cache = model(ids).logits[:, 4:], model(ids[:, :4], use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    torch.testing.assert_close(model(ids[:, 4:], past_key_values=cache).logits, want)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_size": 12, "use_rope": True}, "a head dim of 3 with use_rope"),
        ({"fgate_type": "fixed", "fgate_bias_init": True}, "fgate_bias_init needs decay_time_min and decay_time_max"),
        ({"gate_init": "spred"}, 'gate_init is \'spred\'; use "published", "spread"'),
        ({"gate_init": [8, 2]}, r"gate_init is \[8, 2\]; the lengths must be positive and ascending"),
        ({"gate_init": "spread", "fgate_type": "none"}, 'it applies to "full" gates'),
        ({"attnres_block_size": 2}, "attnres_block_size is set; attention residuals are not supported"),
        ({"elementwise_affine": False}, "elementwise_affine is False"),
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


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_train_and_load(kind, tmp_path):
    auto = getattr(transformers, f"AutoModelFor{kind}")
    config = hf.FoxConfig.pro(num_heads=2, num_labels=3, pad_token_id=0, **SIZES)
    model = auto.from_config(config)
    ids, mask = torch.arange(1, 13).view(2, 6), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    labels = {"SequenceClassification": torch.tensor([0, 2]), "TokenClassification": torch.zeros(2, 6).long()}
    given = {"labels": labels[kind]} if kind in labels else {"start_positions": torch.tensor([0, 1]),
                                                             "end_positions": torch.tensor([2, 2])}  # fmt: skip
    model(ids, attention_mask=mask, **given).loss.backward()
    model.eval().save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert torch.equal(again(ids, attention_mask=mask)[0], model(ids, attention_mask=mask)[0])


def test_registered_classes_of_others_stay():
    class Theirs(transformers.PretrainedConfig):
        model_type = "foxlm-test-type"

    transformers.AutoConfig.register("foxlm-test-type", Theirs, exist_ok=True)
    ours = type("Ours", (hf.FoxConfig,), {"model_type": "foxlm-test-type"})
    hf._register(ours, hf.FoxModel, hf.FoxForCausalLM)
    assert type(transformers.AutoConfig.for_model("foxlm-test-type")) is Theirs


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
