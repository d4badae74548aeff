"""FoX as a Hugging Face model. Importing this registers it with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`:

- `forgetting_transformer-project_fox`, `transformer-project_fox`: checkpoints of the official repository, FoX and
  Transformer, LLaMA and Pro;
- `forgetting_transformer`: checkpoints of flash-linear-attention.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import FoxCache
from .configuration import FlaFoxConfig, FoxConfig, FoxTransformerConfig
from .modeling import (
    FlaFoxForCausalLM,
    FlaFoxModel,
    FoxForCausalLM,
    FoxModel,
    FoxTransformerForCausalLM,
    FoxTransformerModel,
)

for _config, _model, _head in (
    (FoxConfig, FoxModel, FoxForCausalLM),
    (FoxTransformerConfig, FoxTransformerModel, FoxTransformerForCausalLM),
    (FlaFoxConfig, FlaFoxModel, FlaFoxForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _head, exist_ok=True)

__all__ = [
    "FlaFoxConfig",
    "FlaFoxForCausalLM",
    "FoxCache",
    "FoxConfig",
    "FoxForCausalLM",
    "FoxModel",
    "FoxTransformerConfig",
    "FoxTransformerForCausalLM",
]
