"""Transformers' own common model tests on our three classes: how many pass, and why the others cannot hold.

    python -m benchmarks.common_tests

The tests are those of the installed Transformers, from its source distribution on PyPI, which stays in `FOLDER`; those
of exporters and of text generation, which come from other files, are left out. The status is 1 if a test fails that
is not among `FAILS`.
"""

import copy
import importlib
import io
import logging
import subprocess
import sys
import tarfile
import unittest
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import BertConfig

from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification, DAPModel

FOLDER = Path(__file__).resolve().parent.parent / "build" / "common_tests"
#: What the tests import from other files -> the mixin of tests there that is not run.
STUBS = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
PAIRS, LENGTH = 4, 7
#: Beginning of a class's and test's name -> why it cannot hold.
FAILS = {
    "DAPForPreTraining.test_batching_equivalence": "hidden states have sources and targets in one batch",
    "DAPForPreTraining.test_eager_matches_sdpa_inference": "it makes inputs of one text, some padded on the left",
    "DAPForPreTraining.test_resize_tokens_embeddings": "it changes input_ids, where there are two texts",
}


def common_tests() -> Any:
    """The module of the common tests, downloaded unless it is there, with what it imports."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = f"transformers-{transformers.__version__}"
    if not (FOLDER / f"{source}.tar.gz").exists():
        download = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", FOLDER]
        subprocess.run(
            [*pip, "download", *download, f"transformers=={transformers.__version__}"], check=True
        )
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", FOLDER, "parameterized"], check=True
        )
    package = FOLDER / "hf_tests"
    for stub, mixin in STUBS.items():
        (package / stub).parent.mkdir(parents=True, exist_ok=True)
        (package / stub).write_text(f"class {mixin}:\n    pass\n")
    with tarfile.open(FOLDER / f"{source}.tar.gz") as archive:
        text = archive.extractfile(f"{source}/tests/test_modeling_common.py").read()
    (package / "test_modeling_common.py").write_bytes(text)
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("hf_tests.test_modeling_common")


def small_config() -> DAPConfig:
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return DAPConfig(
        BertConfig(**shape, intermediate_size=37, max_position_embeddings=64), mask_token_id=3
    )


def side(prefix: str = "") -> dict[str, torch.Tensor]:
    """Token ids (B, S) and mask (B, S) of a side."""
    ids = torch.randint(5, 99, (PAIRS, LENGTH))
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": torch.ones_like(ids)}


def test_case(common: Any, model_class: type) -> type[unittest.TestCase]:
    """The common tests of one model class, as their inputs differ."""

    class Case(common.ModelTesterMixin, unittest.TestCase):
        all_model_classes, _is_composite = (model_class,), True

        def setUp(self) -> None:
            shape = {
                "batch_size": PAIRS,
                "seq_length": LENGTH,
                "num_hidden_layers": 2,
                "hidden_size": 32,
            }
            shape |= {"num_attention_heads": 4, "is_training": model_class is not DAPModel}
            inputs = (
                side("source_") | side("target_") if model_class is DAPForPreTraining else side()
            )
            given = {"prepare_config_and_inputs_for_common": lambda: (small_config(), inputs)}
            self.model_tester = SimpleNamespace(get_config=small_config, **given, **shape)

        def _prepare_for_class(self, inputs: dict, kind: type, return_labels: bool = False) -> dict:
            labelled = return_labels and kind is DAPForSequenceClassification
            return copy.deepcopy(inputs) | (
                {"labels": torch.zeros(PAIRS, dtype=torch.long)} if labelled else {}
            )

    Case.__name__ = model_class.__name__
    return Case


def run(case: type[unittest.TestCase]) -> int:
    """Run a class's tests and print what became of them; the number that failed without a known reason."""
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TextTestRunner(io.StringIO()).run(tests)
    wrong, skipped = result.failures + result.errors, len({test.id() for test, _ in result.skipped})
    known, unexpected = Counter(), []
    for test, text in wrong:
        name = f"{case.__name__}.{test._testMethodName}"
        if start := next((start for start in FAILS if name.startswith(start)), None):
            known[start] += 1
        else:
            unexpected.append(f"  NOT EXPECTED: {name}\n{text}")
    print(f"{case.__name__}: {result.testsRun} tests, {result.testsRun - len(wrong) - skipped} passed, "
          f"{skipped} do not apply, {len(wrong)} failed")  # fmt: skip
    for line in [
        *(f"  {count} x {start}: {FAILS[start]}" for start, count in known.items()),
        *unexpected,
    ]:
        print(line)
    return len(unexpected)


def main() -> None:
    transformers.logging.set_verbosity(100)  # above errors
    transformers.logging.disable_progress_bar()
    logging.getLogger("configuration_dap").setLevel("ERROR")
    common, classes = common_tests(), (DAPModel, DAPForPreTraining, DAPForSequenceClassification)
    sys.exit(sum(run(test_case(common, model_class)) for model_class in classes) > 0)


if __name__ == "__main__":
    main()
