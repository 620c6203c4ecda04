"""Transformers' own common model tests pass on our three model classes.

The tests come from the source distribution of the installed Transformers on PyPI, which is kept in
`build/common_tests`. Tests of exporters and of text generation are left out, because they live in
other files. `FAILS` lists the tests that cannot hold, each with its reason.
"""

import copy
import importlib
import io
import logging
import subprocess
import sys
import tarfile
import unittest
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from conftest import REPOSITORY
from transformers import BertConfig

from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification, DAPModel

pytestmark = pytest.mark.release

FOLDER = REPOSITORY / "build" / "common_tests"
#: Files that the tests import, and the mixin in each that we replace by an empty class.
STUBS = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
PAIRS, LENGTH = 4, 7
#: First letters of a class's and test's name -> why the test cannot hold.
FAILS = {
    "DAPForPreTraining.test_batching_equivalence": "hidden states hold sources and targets",
    "DAPForPreTraining.test_eager_matches_sdpa_inference": "it makes inputs of one text only",
    "DAPForPreTraining.test_resize_tokens_embeddings": "it changes input_ids only",
}


@pytest.fixture(scope="module")
def common_tests() -> ModuleType:
    """Import the module of common tests. The first call downloads it."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = f"transformers-{transformers.__version__}"
    if not (FOLDER / f"{source}.tar.gz").exists():
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", FOLDER]
        package = f"transformers=={transformers.__version__}"
        subprocess.run([*pip, "download", *options, package], check=True)
        options = ["--no-deps", "--target", FOLDER]
        subprocess.run([*pip, "install", *options, "parameterized"], check=True)

    package = FOLDER / "hf_tests"
    for stub, mixin in STUBS.items():
        (package / stub).parent.mkdir(parents=True, exist_ok=True)
        (package / stub).write_text(f"class {mixin}:\n    pass\n")
    with tarfile.open(FOLDER / f"{source}.tar.gz") as archive:
        text = archive.extractfile(f"{source}/tests/test_modeling_common.py").read()
    (package / "test_modeling_common.py").write_bytes(text)

    sys.path.insert(0, str(FOLDER))
    transformers.logging.set_verbosity(100)  # above errors
    transformers.logging.disable_progress_bar()
    logging.getLogger("configuration_dap").setLevel("ERROR")
    return importlib.import_module("hf_tests.test_modeling_common")


@pytest.mark.parametrize("kind", [DAPModel, DAPForPreTraining, DAPForSequenceClassification])
def test_common_tests_of_transformers_hold(common_tests: ModuleType, kind: type) -> None:
    case = make_case(common_tests, kind)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TextTestRunner(io.StringIO()).run(tests)
    wrong = result.failures + result.errors
    unexpected = []
    for test, text in wrong:
        name = f"{kind.__name__}.{test._testMethodName}"
        if not name.startswith(tuple(FAILS)):
            unexpected.append(f"{name}\n{text}")
    assert result.testsRun > len(wrong) + len(result.skipped)
    assert not unexpected, "\n".join(unexpected)


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
            inputs = {}
            for side in ("source_", "target_") if model_class is DAPForPreTraining else ("",):
                ids = torch.randint(5, 99, (PAIRS, LENGTH))
                inputs |= {f"{side}input_ids": ids, f"{side}attention_mask": torch.ones_like(ids)}
            self.model_tester = SimpleNamespace(
                get_config=small_config,
                prepare_config_and_inputs_for_common=lambda: (small_config(), inputs),
                batch_size=PAIRS,
                seq_length=LENGTH,
                num_hidden_layers=2,
                hidden_size=32,
                num_attention_heads=4,
                is_training=model_class is not DAPModel,
            )

        def _prepare_for_class(self, inputs: dict, kind: type, return_labels: bool = False) -> dict:
            inputs = copy.deepcopy(inputs)
            if return_labels and kind is DAPForSequenceClassification:
                inputs["labels"] = torch.zeros(PAIRS, dtype=torch.long)
            return inputs

    Case.__name__ = model_class.__name__
    return Case
