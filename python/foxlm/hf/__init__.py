"""FoX as a Hugging Face model. Importing this registers it with `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and
the classes of the heads:

- `forgetting_transformer-project_fox`, `transformer-project_fox`: checkpoints of the official repository, FoX and
  Transformer, LLaMA and Pro;
- `forgetting_transformer`: checkpoints of flash-linear-attention. Where that library has registered its own classes
  they stay, and `FlaFoxForCausalLM.from_pretrained` reads such a checkpoint;
- `fox_encoder`: encoders of fox, with `AutoModelForMaskedLM`.
"""

from .._extras import require

require("transformers", "transformers", "foxlm.hf")
require("torch", "transformers", "foxlm.hf")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from .cache import FoxCache  # noqa: E402
from .configuration import FlaFoxConfig, FoxConfig, FoxTransformerConfig  # noqa: E402
from .encoder import FoxEncoderConfig, FoxEncoderModel, FoxForMaskedLM  # noqa: E402
from .heads import (  # noqa: E402
    FlaFoxForQuestionAnswering,
    FlaFoxForSequenceClassification,
    FlaFoxForTokenClassification,
    FoxForQuestionAnswering,
    FoxForSequenceClassification,
    FoxForTokenClassification,
    FoxTransformerForQuestionAnswering,
    FoxTransformerForSequenceClassification,
    FoxTransformerForTokenClassification,
)
from .modeling import (  # noqa: E402
    FlaFoxForCausalLM,
    FlaFoxModel,
    FoxForCausalLM,
    FoxModel,
    FoxTransformerForCausalLM,
    FoxTransformerModel,
)
from .remote_code import write_remote_code  # noqa: E402


def _register(config, *kinds):
    """Registers classes, unless another library has registered this model type already."""
    if config.model_type in CONFIG_MAPPING and CONFIG_MAPPING[config.model_type] is not config:
        return
    AutoConfig.register(config.model_type, config, exist_ok=True)
    autos = (
        AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification,
        AutoModelForQuestionAnswering,
    )  # fmt: skip
    for auto, kind in zip(autos, kinds):
        auto.register(config, kind, exist_ok=True)


_register(
    FoxConfig, FoxModel, FoxForCausalLM, FoxForSequenceClassification, FoxForTokenClassification,
    FoxForQuestionAnswering,
)  # fmt: skip
_register(
    FoxTransformerConfig, FoxTransformerModel, FoxTransformerForCausalLM, FoxTransformerForSequenceClassification,
    FoxTransformerForTokenClassification, FoxTransformerForQuestionAnswering,
)  # fmt: skip
_register(
    FlaFoxConfig, FlaFoxModel, FlaFoxForCausalLM, FlaFoxForSequenceClassification, FlaFoxForTokenClassification,
    FlaFoxForQuestionAnswering,
)  # fmt: skip
AutoConfig.register(FoxEncoderConfig.model_type, FoxEncoderConfig, exist_ok=True)
AutoModel.register(FoxEncoderConfig, FoxEncoderModel, exist_ok=True)
AutoModelForMaskedLM.register(FoxEncoderConfig, FoxForMaskedLM, exist_ok=True)

__all__ = [
    "FlaFoxConfig",
    "FlaFoxForCausalLM",
    "FlaFoxForQuestionAnswering",
    "FlaFoxForSequenceClassification",
    "FlaFoxForTokenClassification",
    "FlaFoxModel",
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
    "FoxTransformerForQuestionAnswering",
    "FoxTransformerForSequenceClassification",
    "FoxTransformerForTokenClassification",
    "FoxTransformerModel",
    "write_remote_code",
]
