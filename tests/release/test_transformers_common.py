"""Transformers' own common model tests pass on our model classes that read one text.

The tests come from the source distribution of the installed Transformers on PyPI, which is kept in
`build/common_tests`. Tests of exporters and of text generation are left out, because they live in
other files.
"""

import copy
import importlib
import io
import logging
import sys
import tarfile
import unittest
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from conftest import REPOSITORY
from forked import run_fresh
from transformers import BertConfig
from written import write

from modeling_dap import DAPConfig, DAPForSequenceClassification, DAPModel

pytestmark = pytest.mark.release

FOLDER = REPOSITORY / "build" / "common_tests"
#: Modules that the tests import, and the class of each that we replace by an empty one.
STUBS = {
    "hf_tests.exporters.test_export": "ExportTesterMixin",
    "hf_tests.generation.test_utils": "GenerationTesterMixin",
}
SENTENCES, LENGTH = 4, 7


@pytest.fixture(scope="module")
def common_tests() -> ModuleType:
    """Import the module of common tests. The first call downloads it."""
    source = f"transformers-{transformers.__version__}"
    package = FOLDER / f"{source}.tar.gz"
    if not package.exists():
        pip = [sys.executable, "-m", "pip"]
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", FOLDER]
        run_fresh(*pip, "download", *options, f"transformers=={transformers.__version__}")
        run_fresh(*pip, "install", "--no-deps", "--target", FOLDER, "parameterized")
    with tarfile.open(package) as archive:
        text = archive.extractfile(f"{source}/tests/test_modeling_common.py").read()
    write(FOLDER / "hf_tests/test_modeling_common.py", text)
    for module, name in STUBS.items():
        sys.modules[module] = SimpleNamespace(**{name: type(name, (), {})})

    sys.path.insert(0, str(FOLDER))
    transformers.logging.set_verbosity(100)  # above errors
    transformers.logging.disable_progress_bar()
    logging.getLogger("configuration_dap").setLevel("ERROR")
    return importlib.import_module("hf_tests.test_modeling_common")


@pytest.mark.parametrize("kind", [DAPModel, DAPForSequenceClassification])
def test_common_tests_of_transformers_hold(common_tests: ModuleType, kind: type) -> None:
    case = make_case(common_tests, kind)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TextTestRunner(io.StringIO()).run(tests)
    assert not result.failures + result.errors
    assert result.testsRun > len(result.skipped)


def small_config() -> DAPConfig:
    """Return the configuration of a BERT with two layers."""
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return DAPConfig(
        BertConfig(**shape, intermediate_size=37, max_position_embeddings=64), mask_token_id=3
    )


def make_case(common: ModuleType, model_class: type) -> type[unittest.TestCase]:
    """Return the test case of one model class. Each class needs its own, as inputs differ."""

    class Case(common.ModelTesterMixin, unittest.TestCase):
        all_model_classes = (model_class,)
        _is_composite = True

        def setUp(self) -> None:
            ids = torch.randint(5, 99, (SENTENCES, LENGTH))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            self.model_tester = SimpleNamespace(
                get_config=small_config,
                prepare_config_and_inputs_for_common=lambda: (small_config(), inputs),
                batch_size=SENTENCES,
                seq_length=LENGTH,
                num_hidden_layers=2,
                hidden_size=32,
                num_attention_heads=4,
                is_training=model_class is not DAPModel,
            )

        def _prepare_for_class(self, inputs: dict, kind: type, return_labels: bool = False) -> dict:
            inputs = copy.deepcopy(inputs)
            if return_labels and kind is DAPForSequenceClassification:
                inputs["labels"] = torch.zeros(SENTENCES, dtype=torch.long)
            return inputs

    Case.__name__ = model_class.__name__
    return Case
