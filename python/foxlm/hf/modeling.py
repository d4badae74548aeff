"""FoX as models of the library `transformers`: blocks in a row, and a head."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .. import _checks
from . import context
from .cache import FoxCache, adopt, static_places
from .configuration import GATHERED, FlaFoxConfig, FoxConfig, FoxTransformerConfig
from .layers import FoxAttention, FoxBlock, RMSNorm, gate_biases
from .rows import arrange, arrange_static, require

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self


class FoxPreTrainedModel(PreTrainedModel):
    """Initialization and what the library asks about a model."""

    config_class = FoxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoxBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _input_embed_layer = "embeddings"
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config, *arguments, **kwargs):
        super().__init__(config, *arguments, **kwargs)
        _name_adapter_targets(config.model_type)

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        """foxlm's own op unless "sdpa" is asked for, which computes the same by PyTorch alone. Others know no gates."""
        chosen = super().get_correct_attn_implementation(requested_attention or "eager", is_init_check)
        if chosen not in ("eager", "sdpa"):
            raise ValueError(f'attn_implementation is "{chosen}", which has no forget gates; use "eager" or "sdpa"')
        return chosen

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if hasattr(module, "gate_config"):
                _start(module.bias, gate_biases(module.gate_config))
            elif module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, FoxAttention) and module.config.fgate_type in ("bias_only", "fixed"):
            _start(module.fgate_bias, gate_biases(module.config))


def _name_adapter_targets(model_type):
    """Adds the default targets of LoRA, which PEFT keeps by model type, where PEFT is imported."""
    if "peft" in sys.modules:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as targets

        # The matrices inside shifted projections are called `linear`.
        targets.setdefault(model_type, ["q_proj", "linear", "o_proj"])


def _start(parameter, values):
    """Sets a parameter, unless it was read from a checkpoint."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(values)


class FoxModel(FoxPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(FoxBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def context_parallel(self, group: ProcessGroup | DeviceMesh | None) -> Self:
        """Shards sequences over the ranks of a process group (or of a `DeviceMesh` of one dimension): afterwards every
        rank calls the model with its contiguous chunk of each row, see `foxlm.context.chunk`. None ends this."""
        self.context_group = group
        return self

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        cu_seqlens=None,
        **kwargs,
    ):
        """With a cache, gradient checkpointing is not used.

        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, D]`.
            attention_mask: `[B, past + T]`, 0 for tokens that are not there, anywhere: results are those of the row
                without them. At a masked token stands the result of the last token before it. Or `[B, 1, T, past + T]`,
                a row for each new token: true or 0 for the tokens it sees, and the gates of the others do not count.
                With a static cache also as wide as the cache.
            position_ids: `[B, T]`, for rotary positions. Without padding and cache a jump in them begins a new packed
                sequence, as everywhere in this library.
            cu_seqlens: 0 and the ends of packed sequences, with a batch of one row; also as `cu_seq_lens_q`, or as
                `seq_idx` `[B, T]`.
            past_key_values: a `FoxCache`, or a `DynamicCache` or `StaticCache`, which is filled.
            output_attentions: weights `[B, H, T, N]` of every layer; their memory grows with `T N`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        cu_seqlens, seq_idx = _packing(cu_seqlens, kwargs)
        _refuse(type(self).__name__, kwargs)
        _checks.tensors(attention_mask=attention_mask, position_ids=position_ids, seq_idx=seq_idx)
        if inputs_embeds is None and input_ids.ndim != 2:
            raise ValueError(f"input_ids have shape {list(input_ids.shape)}; they must be [batch, time]")
        h = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        batch, time = h.shape[:2]
        config = self.config
        chosen = use_cache is not None or past_key_values is not None
        use_cache = (config.use_cache and not self.training) if use_cache is None else use_cache
        group = context.group_of(self)
        if group is not None:
            given = {
                "past_key_values": past_key_values is not None, "use_cache": chosen and use_cache,
                "position_ids": position_ids is not None, "seq_idx": seq_idx is not None,
                "output_attentions": bool(config.output_attentions if output_attentions is None else output_attentions),
                "attention_mask": attention_mask is not None and not bool((attention_mask != 0).all()),
                'attn_implementation="sdpa"': config._attn_implementation == "sdpa",
            }  # fmt: skip
            rows, use_cache = context.arrange(group, h, cu_seqlens, _sharding_refuses(given)), False
            past_key_values = None
        cache = None if past_key_values is None else adopt(past_key_values, self, batch)
        if group is None:
            packing = cu_seqlens, seq_idx
            rows = self._arrange(attention_mask, position_ids, packing, batch, time, cache, h.device)
        if cache is None and use_cache:
            cache = FoxCache(len(self.layers))
        if rows.shared["cu_seqlens"] is not None and cache is not None:
            if chosen and use_cache:
                raise ValueError("packed sequences with a cache; set use_cache=False")
            cache = None
        wanted = config.output_attentions if output_attentions is None else output_attentions
        hidden, attentions = [h], []
        for layer in self.layers:
            with _checkpointed(layer, cache):
                h, weights = layer(h, **rows.shared, past_key_values=cache, output_attentions=wanted)
            hidden.append(rows.restore(h))
            attentions.append(weights)
        h = rows.restore(self.norm(h))
        kept = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = BaseModelOutputWithPast(
            last_hidden_state=h,
            past_key_values=cache,
            hidden_states=(*hidden[:-1], h) if kept else None,
            attentions=tuple(attentions) if wanted else None,
        )
        return out if _as_dict(config, return_dict) else out.to_tuple()

    def _arrange(self, attention_mask, position_ids, packing, batch, time, cache, device):
        """How the tokens of one call belong together, with or without a cache."""
        places, config = static_places(cache), self.config
        past = 0 if cache is None else cache.get_seq_length()
        filled = not cache.layers[0].empty if places else past > 0
        if places and filled:
            if any(x is not None for x in packing):
                raise ValueError("packed sequences (cu_seqlens or seq_idx) with padding or a cache; give one of them")
            # Not the tensor that the cache changes.
            return self._shifted(arrange_static(attention_mask, position_ids, batch, past + 0, time, places, device))
        if places:
            past = 0
            # As wide as the cache: the other places are empty.
            if attention_mask is not None and attention_mask.shape[-1] == places:
                attention_mask = attention_mask[..., :time]
        rows = arrange(attention_mask, position_ids, *packing, batch, past, time, device)
        return self._shifted(rows)

    def _shifted(self, rows):
        """The rows, if shifted keys have the token before each new one: a new one, or the last of the cache."""
        if rows.shared["pairs"] is not None and (self.config.use_k_shift or self.config.use_v_shift):
            words = "attention_mask has four dimensions and hides the last cached token; shifted keys need it"
            require((rows.shared["before"] >= 0).all(), words)
        return rows


def _sharding_refuses(given):
    """A sentence about the first argument that sequences on several ranks cannot have."""
    for name, is_given in given.items():
        if is_given:
            reason = "has zeros" if name == "attention_mask" else "is given"
            return (
                f"{name} {reason} with context_parallel; use cu_seqlens of the whole sequence for packed tokens, and "
                "context_parallel(None) to generate"
            )
    return None


def _checkpointed(layer, cache):
    """Calls a block without gradient checkpointing where there is a cache, which must not be filled twice."""
    return nullcontext() if cache is None or not layer.gradient_checkpointing else _plain(layer)


@contextmanager
def _plain(layer):
    layer.gradient_checkpointing = False
    try:
        yield
    finally:
        layer.gradient_checkpointing = True


def _as_dict(config, return_dict):
    return getattr(config, "return_dict", True) if return_dict is None else return_dict


# What the library passes and what does not change results: the cache knows its position, lengths follow from ends.
_WITHOUT_EFFECT = ("cache_position", "max_length_q", "max_length_k", "num_items_in_batch")


def _refuse(name, kwargs):
    for key in kwargs:
        if key not in _WITHOUT_EFFECT:
            raise TypeError(f"{name}.forward has no argument {key}")


def _packing(cu_seqlens, kwargs):
    """Ends of packed sequences under any of their names, and `seq_idx`."""
    others = {name: kwargs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    _checks.tensors(cu_seqlens=cu_seqlens, **others)
    given = [x for x in (cu_seqlens, *others.values()) if x is not None]
    if any(not torch.equal(given[0].cpu().long(), x.cpu().long()) for x in given[1:]):
        raise ValueError("cu_seqlens, cu_seq_lens_q and cu_seq_lens_k differ; queries and keys are the same tokens")
    seq_idx = kwargs.pop("seq_idx", None)
    return (given[0], None) if given else (None, seq_idx)


class FoxForCausalLM(FoxPreTrainedModel, GenerationMixin):
    """FoX with an output projection. `labels` are shifted inside, as everywhere in this library; pass `shift_labels`
    for labels that are shifted already, as the official trainer's are."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    _tp_plan = {"lm_head": GATHERED}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    model_class = FoxModel

    def __init__(self, config: FoxConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """A masked token has the position of the last token before it, so that padding on the right is continued."""
        positions = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        return positions if mask is None or mask.ndim != 2 else (mask.long().cumsum(-1) - 1).clamp(min=0)

    @staticmethod
    def create_masks_for_generate(attention_mask=None, past_key_values=None, **_):
        """The mask of two dimensions for `generate` with a static cache, as wide as the cache: compiled once."""
        if attention_mask is None:
            return None
        places = past_key_values.layers[0].max_cache_len
        return F.pad(attention_mask, (0, max(places - attention_mask.shape[-1], 0)))

    def context_parallel(self, group: ProcessGroup | DeviceMesh | None) -> Self:
        """As `FoxModel.context_parallel`. `labels` are those of the chunk, and the loss is such that its mean over the
        ranks is that of the whole sequence: average gradients over the ranks, as DDP and FSDP do."""
        self.model.context_parallel(group)
        return self

    def init_continuous_batching(self, *_, **__):
        """Refused: the library's paged cache holds keys and values alone."""
        raise NotImplementedError(
            f"{type(self).__name__} has no continuous batching here, since the paged cache of transformers has no room "
            "for forget gates; use foxlm.Model, whose engine batches requests"
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """As the model without a head; `logits_to_keep` is how many last positions, or which, have their logits
        returned."""
        # Not an argument by name: `Trainer` would take it for a label that every batch must have.
        shift_labels, items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        h = out.last_hidden_state
        if isinstance(logits_to_keep, int):
            h = h[:, -logits_to_keep:] if logits_to_keep else h
        else:
            h = h[:, logits_to_keep]
        logits = self.lm_head(h)
        loss = None
        if labels is not None or shift_labels is not None:
            group = context.group_of(self.model)
            if group is None:
                loss = _loss(logits, labels, shift_labels, items)
            else:
                loss = context.loss(group, logits, labels, shift_labels, items)
            if self.config.use_l2warp and self.training:
                loss = _L2Warp.apply(loss, logits)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
        return result if _as_dict(self.config, return_dict) else result.to_tuple()


class _L2Warp(torch.autograd.Function):
    """The penalty of flash-linear-attention on the largest logit of every token: the loss stays, its gradient gets
    `1e-4 / (B T)` times that logit."""

    @staticmethod
    def forward(ctx, loss, logits):
        largest, at = logits.max(-1, keepdim=True)
        ctx.save_for_backward(largest * (1e-4 / (logits.shape[0] * logits.shape[1])), at)
        ctx.shape = logits.shape
        return loss.clone()

    @staticmethod
    def backward(ctx, d_loss):
        largest, at = ctx.saved_tensors
        d_logits = largest.new_zeros(ctx.shape).scatter_(-1, at, (largest * d_loss).to(largest.dtype))
        return d_loss, d_logits


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
