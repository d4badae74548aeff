"""Configurations of FoX models, with the field names of the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from transformers import PretrainedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

if TYPE_CHECKING:
    from typing_extensions import Self

# The style of a weight that all ranks hold, whose gradients are added up.
_SUMMED = "replicated_with_grad_allreduce"


# Styles for activations that all ranks hold before and after, under the names of this version of transformers.
if "colwise_gather_output" in ALL_PARALLEL_STYLES:
    GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
else:
    GATHERED, SPLIT = "colwise_rep", "rowwise_rep"


class FoxConfig(PretrainedConfig):
    """The official layout. `FoxConfig.pro(...)` and `FoxConfig.llama(...)` are the published architectures.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_heads: V, D, L, H; the head dim is D / H.
        hidden_ratio, intermediate_size, hidden_act: the gated MLP; its width is given, or two thirds of
            `hidden_ratio * D` rounded up to a multiple of 256.
        norm_eps: of the norms around blocks and of the output norm.
        fgate_type: "full" (depends on the input), "bias_only", "fixed" or "none".
        fgate_bias_init, decay_time_min, decay_time_max: memory lengths with which "bias_only" and "fixed" gates begin.
        use_rope, rope_base: rotary positions.
        use_output_gate, ogate_act, use_output_norm: after attention.
        qk_norm, qk_norm_share_param_across_head: norms of queries and keys, before rotation.
        use_k_shift, use_v_shift: data-dependent mixing with the previous token.
        log_pruning_tolerance: natural log of the softmax fraction that may be pruned; None disables pruning.
        num_kv_heads, window_size: grouped heads and sliding window, of the Transformer alone.
        gate_init: where "full" gates begin: "published" (they forget half at every token), "spread" (memory lengths
            log-spaced over the heads from 1 token to `max_position_embeddings`), or `[shortest, longest]` in tokens.
        use_l2warp: flash-linear-attention's penalty on the largest logits in training.
        elementwise_affine, attnres_block_size, attention_bias: only True, None and False; others are refused.
    """

    model_type = "forgetting_transformer-project_fox"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_attention_heads": "num_heads"}
    # Which modules FSDP2 shards, and whose weights stay whole after the forward.
    base_model_fsdp_plan = {
        "embeddings": "free_full_weight", "layers.*": "free_full_weight", "norm": "keep_full_weight",
    }  # fmt: skip
    layout = "official"
    positions_by_default = False
    gates_by_default = "full"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        num_hidden_layers: int = 24,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        hidden_ratio: float | None = 4,
        intermediate_size: int | None = None,
        hidden_act: Literal["swish", "silu", "sigmoid"] = "swish",
        norm_eps: float = 1e-6,
        fgate_type: Literal["full", "bias_only", "fixed", "none"] | None = None,
        fgate_bias_init: bool = False,
        decay_time_min: float | None = None,
        decay_time_max: float | None = None,
        use_rope: bool | None = None,
        rope_base: float = 500000.0,
        use_output_gate: bool = False,
        ogate_act: Literal["sigmoid", "silu"] = "sigmoid",
        use_output_norm: bool = False,
        qk_norm: bool = False,
        qk_norm_share_param_across_head: bool = False,
        qkv_bias: bool = False,
        use_k_shift: bool = False,
        use_v_shift: bool = False,
        log_pruning_tolerance: float | None = None,
        window_size: int | None = None,
        gate_init: Literal["published", "spread"] | Sequence[float] = "published",
        use_l2warp: bool = False,
        elementwise_affine: bool = True,
        attnres_block_size: None = None,
        attention_bias: bool = False,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.norm_eps = norm_eps
        self.fgate_type = self.gates_by_default if fgate_type is None else fgate_type
        self.fgate_bias_init = fgate_bias_init
        self.decay_time_min = decay_time_min
        self.decay_time_max = decay_time_max
        self.use_rope = self.positions_by_default if use_rope is None else use_rope
        self.rope_base = rope_base
        self.use_output_gate = use_output_gate
        self.ogate_act = ogate_act
        self.use_output_norm = use_output_norm
        self.qk_norm = qk_norm
        self.qk_norm_share_param_across_head = qk_norm_share_param_across_head
        self.qkv_bias = qkv_bias
        self.use_k_shift = use_k_shift
        self.use_v_shift = use_v_shift
        self.log_pruning_tolerance = log_pruning_tolerance
        self.window_size = window_size
        self.gate_init = gate_init
        self.use_l2warp = use_l2warp
        self.elementwise_affine = elementwise_affine
        self.attnres_block_size = attnres_block_size
        self.attention_bias = attention_bias
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(
            bos_token_id=bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings, **kwargs,
        )  # fmt: skip
        self.pad_token_id, self.tie_word_embeddings = pad_token_id, tie_word_embeddings
        self._check()

    def _check(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        choices = {
            "fgate_type": ("full", "bias_only", "fixed", "none"),
            "hidden_act": ("swish", "silu", "sigmoid"),
            "ogate_act": ("sigmoid", "silu"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; use one of {', '.join(allowed)}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}")
        if self.use_rope and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"a head dim of {self.hidden_size // self.num_heads} with use_rope; rotation needs pairs")
        if self.elementwise_affine is False:
            raise ValueError("elementwise_affine is False; norms without weights are not supported, set it to True")
        if self.attnres_block_size is not None:
            raise ValueError("attnres_block_size is set; attention residuals are not supported, set it to None")
        if self.attention_bias:
            raise ValueError("attention_bias is set; use qkv_bias for biases of queries, keys and values")
        self._check_gate_init()
        preset = self.fgate_type in ("bias_only", "fixed") and self.fgate_bias_init
        if preset and None in (self.decay_time_min, self.decay_time_max):
            raise ValueError("fgate_bias_init needs decay_time_min and decay_time_max")
        if self.use_output_norm and self.use_output_gate and self.ogate_act != "sigmoid":
            raise ValueError("an output norm goes with ogate_act sigmoid only")
        if self.kv_heads != self.num_heads and (self.use_k_shift or self.use_v_shift):
            raise ValueError("num_kv_heads with use_k_shift or use_v_shift; shifts need a key head for each head")

    def _check_gate_init(self) -> None:
        init = self.gate_init
        if isinstance(init, (list, tuple)):
            numbers = len(init) == 2 and all(isinstance(x, (int, float)) for x in init)
            if not numbers or not 0 < init[0] <= init[1] <= 1e30:
                raise ValueError(f"gate_init is {list(init)}; the lengths must be positive and ascending")
        elif init not in ("published", "spread"):
            raise ValueError(f'gate_init is {init!r}; use "published", "spread" or [shortest, longest] in tokens')
        if init != "published" and self.fgate_type != "full":
            gates = f'fgate_type is "{self.fgate_type}"; it applies to "full" gates'
            raise ValueError(f"gate_init is {init!r}, but {gates}")

    @property
    def decay_times(self) -> tuple[float, ...] | None:
        """Shortest and longest memory, in tokens, with which gates begin; None where their biases begin at 0."""
        if self.fgate_type == "full":
            if self.gate_init == "published":
                return None
            return (1, max(self.max_position_embeddings, 1)) if self.gate_init == "spread" else tuple(self.gate_init)
        return (self.decay_time_min, self.decay_time_max) if self.fgate_bias_init else None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def num_key_value_heads(self) -> int:
        """The library's name of `kv_heads`."""
        return self.kv_heads

    @num_key_value_heads.setter
    def num_key_value_heads(self, heads):
        self.num_kv_heads = heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        return 256 * -(-int(self.hidden_size * ratio * 2 / 3) // 256)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How the library shards the matrices over GPUs: by heads. Where norms or gate biases of all heads are one
        tensor, outputs are gathered, and every GPU computes the attention of all heads."""
        given: dict[str, str] | None = self.__dict__.get("base_model_tp_plan")
        if given is not None:
            return given
        shared = self.qk_norm_share_param_across_head and _SUMMED in ALL_PARALLEL_STYLES
        norms = self.use_output_norm or (self.qk_norm and not shared)
        by_head = self.fgate_type in ("full", "none") and not norms
        into, out = ("colwise", "rowwise") if by_head else (GATHERED, SPLIT)
        fla = self.layout == "fla"
        names = ["q_proj"]
        for name, shifted in (("k_proj", self.use_k_shift), ("v_proj", self.use_v_shift)):
            names += [f"{name}.linear", f"{name}.shift_proj"] if shifted else [name]
        names += [("f_proj" if fla else "fgate_proj")] if self.fgate_type == "full" else []
        names += [("g_proj" if fla else "ogate_proj")] if self.use_output_gate else []
        plan = {f"layers.*.attn.{name}": into for name in names} | {"layers.*.attn.o_proj": out}
        if by_head and self.qk_norm:
            plan |= {"layers.*.attn.q_norm": _SUMMED, "layers.*.attn.k_norm": _SUMMED}
        if self.tie_word_embeddings and "embedding_rowwise" in ALL_PARALLEL_STYLES:
            plan["embeddings"] = "embedding_rowwise"
        if fla:
            wide, narrow = {"gate_proj": "colwise", "up_proj": "colwise"}, "rowwise"
        else:  # Both projections are one matrix; transformers shards such pairs by halves for experts alone.
            wide, narrow = {"gate_proj": GATHERED}, SPLIT
        return plan | {f"layers.*.mlp.{name}": style for name, style in (wide | {"down_proj": narrow}).items()}

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan):
        # transformers itself adds tied embeddings, under its own name. Files of configurations do not have this key.
        names = {"embed_tokens": "embeddings"}
        plan = plan and {names.get(name, name): style for name, style in plan.items()}
        if plan != self.base_model_tp_plan:
            self.__dict__["base_model_tp_plan"] = plan

    @classmethod
    def llama(cls, **fields: Any) -> Self:
        """FoX (LLaMA): forget gates and nothing else."""
        return cls(**fields)

    @classmethod
    def pro(cls, **fields: Any) -> Self:
        """FoX (Pro): QK-norm, output gate and norm, shifts of keys and values."""
        pro = {name: True for name in ("qk_norm", "use_output_gate", "use_output_norm", "use_k_shift", "use_v_shift")}
        return cls(**({"hidden_ratio": 3.5} | pro | fields))


class FoxTransformerConfig(FoxConfig):
    """The official Transformer: rotary positions, no forget gates."""

    model_type = "transformer-project_fox"
    positions_by_default = True
    gates_by_default = "none"

    # Without an explicit __init__, a subclass gets one from the library that has none of the fields.
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)


class FlaFoxConfig(FoxConfig):
    """FoX as flash-linear-attention stores it. Its `window_size` bounds only FLA's decoding cache; here it is not
    used."""

    model_type = "forgetting_transformer"
    layout = "fla"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
