"""Encoders as Hugging Face models."""

import pytest
from conftest import need

torch = need("torch")
transformers = need("transformers")

from foxlm.hf import FoxEncoderConfig, FoxEncoderModel, FoxForMaskedLM  # noqa: E402

SIZES = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48,
         "mask_token_id": 32, "initializer_range": 0.2}  # fmt: skip


def model(**fields):
    torch.manual_seed(0)
    return FoxForMaskedLM(FoxEncoderConfig.pro(**SIZES, **fields)).eval()


def tokens(length=70):
    return (torch.arange(length) ** 2 * 3 % 31)[None]


@pytest.mark.parametrize("fields", [{}, {"fgate_type": "none", "use_rope": True}])
def test_attention_is_that_of_the_definition(fields):
    attn = model(**fields).model.layers[0].attn
    x = torch.randn(1, 70, 32)
    positions = torch.arange(70)[None]
    got, _ = attn(x, positions=positions)

    def dense(q, k, v, log_gates, **options):
        assert options["causal"] is False
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        if log_gates is not None:
            c = log_gates.transpose(1, 2).cumsum(-1)
            scores = scores - (c[..., :, None] - c[..., None, :]).abs()
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    import foxlm.hf.layers as layers

    attention, layers.forgetting_attention = layers.forgetting_attention, dense
    try:
        want, _ = attn(x, positions=positions)
    finally:
        layers.forgetting_attention = attention
    assert (got - want).abs().max() < 1e-4


def test_later_tokens_change_earlier_logits():
    encoder, ids = model(), tokens()
    changed = ids.clone()
    changed[0, 60] = 32
    before, after = encoder(ids).logits, encoder(changed).logits
    assert (before[0, 58] - after[0, 58]).abs().max() > 1e-4


def test_padding_is_not_read():
    encoder, ids = model(), tokens(20)
    padded = torch.nn.functional.pad(ids, (0, 5), value=7)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 5))
    got = encoder(padded, attention_mask=mask).logits[:, :20]
    assert (got - encoder(ids).logits).abs().max() < 1e-4


def test_loss_is_that_of_labelled_tokens_and_trains():
    encoder, ids = model().train(), tokens()
    labels = torch.full_like(ids, -100)
    labels[0, ::7] = ids[0, ::7]
    masked = ids.masked_fill(labels != -100, 32)
    out = encoder(masked, labels=labels)
    rows = out.logits[0, ::7].log_softmax(-1)
    want = -rows.gather(-1, ids[0, ::7, None]).mean()
    assert (out.loss - want).abs() < 1e-5
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_auto_classes_load_what_was_saved(tmp_path):
    encoder = model()
    encoder.save_pretrained(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert isinstance(again, FoxForMaskedLM) and again.config.mask_token_id == 32
    assert torch.equal(again(tokens()).logits, encoder(tokens()).logits)
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert isinstance(body, FoxEncoderModel)


def test_rejects_what_encoders_do_not_have():
    encoder = model()
    with pytest.raises(ValueError, match="has no cache"):
        encoder(tokens(), use_cache=True)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        encoder(tokens(), output_attentions=True)
    with pytest.raises(ValueError, match="use_sink is True; encoders are supported with False only"):
        FoxEncoderConfig(use_sink=True)
