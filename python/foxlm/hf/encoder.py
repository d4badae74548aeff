"""Encoders (`fox_encoder`): FoX and Transformer with attention in both directions, and a head for masked tokens."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import MaskedLMOutput

from .configuration import FoxConfig
from .layers import QK_NORM_EPS, FoxAttention
from .modeling import FoxModel, FoxPreTrainedModel, _as_dict

# Fields of the files that only the engine computes with other values than these.
_FIXED = {
    "attention_weights": "softmax", "use_sink": False, "head_dim": None, "qk_norm_eps": QK_NORM_EPS,
    "rope_scaling": None, "rope_strength": 1.0,
}  # fmt: skip


class FoxEncoderConfig(FoxConfig):
    """An encoder; `FoxEncoderConfig.pro(...)` is that of the recipes `fox-encoder-SIZE`.

    Args:
        mask_token_id: the token that stands for one to predict.
        fields: those of `FoxConfig`.
    """

    model_type = "fox_encoder"

    def __init__(self, mask_token_id: int | None = None, **fields: Any) -> None:
        for name, only in _FIXED.items():
            value = fields.pop(name, only)
            if value != only:
                raise ValueError(f"{name} is {value!r}; encoders are supported with {only!r} only")
        fields["use_cache"] = False
        super().__init__(**fields)
        self.mask_token_id = mask_token_id


class FoxEncoderAttention(FoxAttention):
    """The layer of `FoxModel` with a bias of `-|c_i - c_j|` over the keys of the whole sequence."""

    def _pruning(self, keys: int):
        return {"causal": False, **super()._pruning(keys)}

    def forward(self, x, *args, output_attentions=False, **options):
        if output_attentions:
            raise ValueError("output_attentions is not supported in encoders; `fox inspect` draws their attention")
        if options.get("pairs") is not None:
            raise ValueError("attention_mask has four dimensions, which is not supported in encoders; give one of two")
        return super().forward(x, *args, **options)


class FoxEncoderModel(FoxModel):
    """Embedding, blocks, final norm."""

    config_class = FoxEncoderConfig
    _supports_sdpa = False

    def __init__(self, config: FoxEncoderConfig):
        super().__init__(config)
        for layer, block in enumerate(self.layers):
            block.attn = FoxEncoderAttention(config, layer)
        self.post_init()

    def forward(self, *args, past_key_values=None, use_cache=None, **options):
        """As `FoxModel.forward`, without a cache."""
        if past_key_values is not None or use_cache:
            raise ValueError("an encoder reads whole sequences and has no cache; leave out past_key_values and use_cache")
        return super().forward(*args, **options)


class FoxForMaskedLM(FoxPreTrainedModel):
    """An encoder with an output projection. `labels` `[B, T]` are not shifted; -100 marks positions without a loss."""

    config_class = FoxEncoderConfig
    _supports_sdpa = False
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: FoxEncoderConfig):
        super().__init__(config)
        self.model = FoxEncoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, return_dict=None, **options):
        """As the model without a head."""
        out = self.model(input_ids=input_ids, return_dict=True, **options)
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten().to(logits.device))
        result = MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return result if _as_dict(self.config, return_dict) else result.to_tuple()
