"""Our Hugging Face classes as a case of transformers' ModelTesterMixin; a copy runs in its tests/.

tests/suites/test_transformers.py starts it.
"""

import unittest
from typing import Any

import torch
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers.models.auto import modeling_auto

from nsa.model import hf
from nsa.model.hf_config import NSAConfig

try:
    from tests.test_training_mixin import TrainingTesterMixin
except ImportError:  # older versions have none

    class TrainingTesterMixin:  # type: ignore[no-redef]
        pass


SPEC = {
    **{"block_len": 4, "block_stride": 2, "select_len": 4, "select_top": 4},
    **{"init_blocks": 1, "local_blocks": 1, "window": 4},
}
SHAPE = {
    **{"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# The mixin finds out by a class's name which labels it takes.
modeling_auto.MODEL_MAPPING_NAMES["nsa"] = "NSAModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nsa"] = "NSAForCausalLM"


class Tester:
    """The sizes that the mixin reads, and its inputs."""

    base_model_class, causal_lm_class = hf.NSAModel, hf.NSAForCausalLM
    batch_size, seq_length, vocab_size = 13, 7, SHAPE["vocab_size"]
    hidden_size, intermediate_size = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    num_hidden_layers, num_attention_heads, num_key_value_heads = 2, 2, 2
    num_labels, type_sequence_label_size, pad_token_id, is_training = 3, 16, 0, True

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def get_config(self) -> NSAConfig:
        return NSAConfig(attention={"spec": SPEC}, **SHAPE)

    def prepare_config_and_inputs_for_common(self) -> tuple[NSAConfig, dict[str, Any]]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class NSATest(ModelTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (hf.NSAModel, hf.NSAForCausalLM)
    has_attentions = False
    test_generation_tester_mixin_inheritance = None  # the archive has no tests of generation

    def setUp(self) -> None:
        self.model_tester = Tester(self)
        self.config_tester = ConfigTester(
            self, config_class=NSAConfig, hidden_size=32, has_text_modality=False
        )

    def test_config(self) -> None:
        self.config_tester.run_common_tests()
