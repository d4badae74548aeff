"""The common tests of transformers for FoX; run by `peers.py`, which puts a checkout of transformers on the path."""

import unittest

from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from transformers.models.auto import modeling_auto
from transformers.testing_utils import require_torch

import foxlm.hf as hf

# The harness chooses labels by the names of the library's own classes.
for kind, name in (
    ("MODEL", "FoxModel"),
    ("MODEL_FOR_CAUSAL_LM", "FoxForCausalLM"),
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION", "FoxForSequenceClassification"),
    ("MODEL_FOR_TOKEN_CLASSIFICATION", "FoxForTokenClassification"),
    ("MODEL_FOR_QUESTION_ANSWERING", "FoxForQuestionAnswering"),
):
    getattr(modeling_auto, f"{kind}_MAPPING_NAMES")[hf.FoxConfig.model_type] = name

# Model types whose tests on several processes run.
for enabled in (
    test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES,
    test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES,
):
    if enabled is not None:
        enabled.add(hf.FoxConfig.model_type)


class LlamaLikeTester(CausalLMModelTester):
    """FoX (LLaMA) in the sizes of the common tests."""

    config_class = hf.FoxConfig
    base_model_class = hf.FoxModel
    causal_lm_class = hf.FoxForCausalLM
    sequence_classification_class = getattr(hf, "FoxForSequenceClassification", None)
    token_classification_class = getattr(hf, "FoxForTokenClassification", None)
    question_answering_class = getattr(hf, "FoxForQuestionAnswering", None)
    options = {}

    def get_config(self):
        return hf.FoxConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.max_position_embeddings,
            pad_token_id=self.pad_token_id,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            tie_word_embeddings=self.tie_word_embeddings,
            **self.options,
        )


class ProTester(LlamaLikeTester):
    """FoX (Pro)."""

    options = {name: True for name in ("qk_norm", "use_output_gate", "use_output_norm", "use_k_shift", "use_v_shift")}


@require_torch
class FoxLlamaTest(CausalLMModelTest, unittest.TestCase):
    model_tester_class = LlamaLikeTester


@require_torch
class FoxProTest(CausalLMModelTest, unittest.TestCase):
    model_tester_class = ProTester
