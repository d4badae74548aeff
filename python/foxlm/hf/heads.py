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

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value


def _for(config, name, head):
    return type(head)(f"{name}{head.__name__.removeprefix('Fox')}", (head,), {"config_class": config})


HEADS = (FoxForSequenceClassification, FoxForTokenClassification, FoxForQuestionAnswering)
TRANSFORMER_HEADS = tuple(_for(FoxTransformerConfig, "FoxTransformer", head) for head in HEADS)
FLA_HEADS = tuple(_for(FlaFoxConfig, "FlaFox", head) for head in HEADS)
