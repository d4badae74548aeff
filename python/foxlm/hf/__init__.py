"""FoX as a Hugging Face model. Importing this registers it with `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and
the classes of the heads:

- `forgetting_transformer-project_fox`, `transformer-project_fox`: checkpoints of the official repository, FoX and
  Transformer, LLaMA and Pro;
- `forgetting_transformer`: checkpoints of flash-linear-attention. Where that library has registered its own classes
  they stay, and `FlaFoxForCausalLM.from_pretrained` reads such a checkpoint;
- `fox_encoder`: encoders of fox, with `AutoModelForMaskedLM`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .cache import FoxCache
from .configuration import FlaFoxConfig, FoxConfig, FoxTransformerConfig
from .encoder import FoxEncoderConfig, FoxEncoderModel, FoxForMaskedLM
from .heads import (
    FLA_HEADS,
    HEADS,
    TRANSFORMER_HEADS,
    FoxForQuestionAnswering,
    FoxForSequenceClassification,
    FoxForTokenClassification,
)
from .modeling import (
    FlaFoxForCausalLM,
    FlaFoxModel,
    FoxForCausalLM,
    FoxModel,
    FoxTransformerForCausalLM,
    FoxTransformerModel,
)


def _register(config, model, *heads):
    """Registers classes, unless another library has registered this model type already."""
    if config.model_type in CONFIG_MAPPING and CONFIG_MAPPING[config.model_type] is not config:
        return
    AutoConfig.register(config.model_type, config, exist_ok=True)
    autos = (
        AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification,
        AutoModelForQuestionAnswering,
    )  # fmt: skip
    for auto, kind in zip(autos, (model, *heads)):
        auto.register(config, kind, exist_ok=True)


_register(FoxConfig, FoxModel, FoxForCausalLM, *HEADS)
_register(FoxTransformerConfig, FoxTransformerModel, FoxTransformerForCausalLM, *TRANSFORMER_HEADS)
_register(FlaFoxConfig, FlaFoxModel, FlaFoxForCausalLM, *FLA_HEADS)
AutoConfig.register(FoxEncoderConfig.model_type, FoxEncoderConfig, exist_ok=True)
AutoModel.register(FoxEncoderConfig, FoxEncoderModel, exist_ok=True)
AutoModelForMaskedLM.register(FoxEncoderConfig, FoxForMaskedLM, exist_ok=True)

__all__ = [
    "FlaFoxConfig",
    "FlaFoxForCausalLM",
    "FoxCache",
    "FoxConfig",
    "FoxEncoderConfig",
    "FoxEncoderModel",
    "FoxForCausalLM",
    "FoxForMaskedLM",
    "FoxForQuestionAnswering",
    "FoxForSequenceClassification",
    "FoxForTokenClassification",
    "FoxModel",
    "FoxTransformerConfig",
    "FoxTransformerForCausalLM",
]
