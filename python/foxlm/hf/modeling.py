"""FoX as models of the library `transformers`: blocks in a row, and a head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .cache import FoxCache
from .configuration import FlaFoxConfig, FoxConfig, FoxTransformerConfig
from .layers import FoxAttention, FoxBlock, RMSNorm


class FoxPreTrainedModel(PreTrainedModel):
    """Initialization and what the library asks about a model."""

    config_class = FoxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoxBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    # Shifted keys need the token before: what is remembered cannot be cut back, as assisted generation would have it.
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, FoxAttention) and module.config.fgate_type in ("bias_only", "fixed"):
            if not getattr(module.fgate_bias, "_is_hf_initialized", False):
                biases = module.decay_biases() if module.config.fgate_bias_init else torch.zeros(1)
                module.fgate_bias.copy_(biases.expand_as(module.fgate_bias))


class FoxModel(FoxPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(FoxBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def set_input_embeddings(self, value):
        self.embeddings = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        past_key_values=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        **_,
    ):
        """`input_ids` `[B, T]`; `attention_mask` `[B, past + T]`, 0 for padding on the left (on the right it has no
        effect: later tokens are not seen). With a cache, gradient checkpointing is not used."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        h = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        cache = past_key_values
        if not isinstance(cache, FoxCache):
            if isinstance(cache, tuple) or (cache is not None and cache.get_seq_length() > 0):
                raise ValueError(
                    f"past_key_values is a {type(cache).__name__}; use the FoxCache that the model returned"
                )
            cache = FoxCache(len(self.layers)) if use_cache else None
        past = 0 if cache is None else cache.get_seq_length()
        mask, seq_start = _padding(attention_mask, h.shape[0], past + h.shape[1])
        hidden = [h]
        for layer in self.layers:
            if self.gradient_checkpointing and self.training and cache is None:
                h = self._gradient_checkpointing_func(layer.__call__, h, mask, seq_start, None)
            else:
                h = layer(h, mask, seq_start, cache)
            hidden.append(h)
        h = self.norm(h)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = BaseModelOutputWithPast(
            last_hidden_state=h, past_key_values=cache, hidden_states=(*hidden[:-1], h) if wanted else None
        )
        return out if return_dict in (None, True) else out.to_tuple()


def _padding(attention_mask, batch, time):
    """The mask, and the first token of every sequence that is not padding; None where nothing is padded on the left."""
    if attention_mask is None:
        return None, None
    if list(attention_mask.shape) != [batch, time]:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, expected {[batch, time]}: all tokens, cached and new")
    seen = attention_mask != 0
    seq_start = (seen.cumsum(1) == 0).sum(1)
    # Where a token is seen, so are all from the first on.
    holes = seen & (seen.cumsum(1) != torch.arange(1, time + 1, device=seen.device) - seq_start[:, None])
    padded, torn = torch.stack((seq_start.any(), holes.any())).tolist()
    if torn:
        raise ValueError("attention_mask has zeros between ones; pad on the left")
    if not padded:
        return None, None
    first = torch.arange(time, device=seen.device)
    return first[None] >= seq_start[:, None], seq_start


class FoxForCausalLM(FoxPreTrainedModel, GenerationMixin):
    """FoX with an output projection. `labels` are shifted inside, as everywhere in this library; pass `shift_labels`
    for labels that are shifted already, as the official trainer's are."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    model_class = FoxModel

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        out = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            past_key_values,
            use_cache,
            output_hidden_states=output_hidden_states,
        )
        h = out.last_hidden_state
        if isinstance(logits_to_keep, int):
            h = h[:, -logits_to_keep:] if logits_to_keep else h
        else:
            h = h[:, logits_to_keep]
        logits = self.lm_head(h)
        loss = None
        # Not an argument by name: `Trainer` would take it for a label that every batch must have.
        shift_labels = kwargs.get("shift_labels")
        if labels is not None or shift_labels is not None:
            loss = _loss(logits, labels, shift_labels, kwargs.get("num_items_in_batch"))
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result if return_dict in (None, True) else result.to_tuple()


def _loss(logits, labels, shift_labels, items):
    """Mean cross-entropy in float32, over the labels that are not -100, or over `items` of an accumulated batch."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    flat, targets = logits.float().flatten(0, 1), shift_labels.flatten().to(logits.device)
    if items is None:
        return F.cross_entropy(flat, targets)
    return F.cross_entropy(flat, targets, reduction="sum") / items


class FoxTransformerModel(FoxModel):
    """The official Transformer's blocks."""

    config_class = FoxTransformerConfig


class FoxTransformerForCausalLM(FoxForCausalLM):
    """The official Transformer."""

    config_class = FoxTransformerConfig
    model_class = FoxTransformerModel


class FlaFoxModel(FoxModel):
    """The blocks as flash-linear-attention stores them."""

    config_class = FlaFoxConfig


class FlaFoxForCausalLM(FoxForCausalLM):
    """FoX as flash-linear-attention stores it."""

    config_class = FlaFoxConfig
    model_class = FlaFoxModel
