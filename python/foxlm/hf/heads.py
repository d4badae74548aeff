"""Heads for classification, by the generic ones of the library `transformers`."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .configuration import FlaFoxConfig, FoxTransformerConfig
from .modeling import FoxPreTrainedModel


class FoxForSequenceClassification(GenericForSequenceClassification, FoxPreTrainedModel):
    """FoX with one label for each sequence, from its last token that is not padding."""


class FoxForTokenClassification(GenericForTokenClassification, FoxPreTrainedModel):
    """FoX with a label for each token."""


class FoxForQuestionAnswering(GenericForQuestionAnswering, FoxPreTrainedModel):
    """FoX with the first and last token of an answer."""

    base_model_prefix = "model"
    get_input_embeddings = FoxPreTrainedModel.get_input_embeddings
    set_input_embeddings = FoxPreTrainedModel.set_input_embeddings


class FoxTransformerForSequenceClassification(FoxForSequenceClassification):
    """The official Transformer with one label for each sequence."""

    config_class = FoxTransformerConfig


class FoxTransformerForTokenClassification(FoxForTokenClassification):
    """The official Transformer with a label for each token."""

    config_class = FoxTransformerConfig


class FoxTransformerForQuestionAnswering(FoxForQuestionAnswering):
    """The official Transformer with the first and last token of an answer."""

    config_class = FoxTransformerConfig


class FlaFoxForSequenceClassification(FoxForSequenceClassification):
    """FoX as flash-linear-attention stores it, with one label for each sequence."""

    config_class = FlaFoxConfig


class FlaFoxForTokenClassification(FoxForTokenClassification):
    """FoX as flash-linear-attention stores it, with a label for each token."""

    config_class = FlaFoxConfig


class FlaFoxForQuestionAnswering(FoxForQuestionAnswering):
    """FoX as flash-linear-attention stores it, with the first and last token of an answer."""

    config_class = FlaFoxConfig
