"""Package definition of dap-transformers.

Each module has one name, in a checkout and installed. The model files and the commands of the paper
are top-level modules. All other code is the package `dap_transformers`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
#: Files that ship with every checkpoint. They import each other by relative imports.
MODEL = [
    "configuration_dap",
    "encoder_dap",
    "states_dap",
    "heads_dap",
    "objectives_dap",
    "losses_dap",
    "modules_dap",
    "modeling_dap",
]
#: Commands of the paper. The other commands are in `dap_transformers.commands`.
COMMANDS = ["train_dap", "eval_retrieval", "run_xnli"]
#: Names of the installed commands, which `dap_transformers.commands` defines.
CONSOLE = [
    "train-dap",
    "eval-retrieval",
    "run-xnli",
    "mine-bitext",
    "align-words",
    "prepare-data",
    "push-to-hub",
]

EXTRAS = {
    "eval": ["matplotlib>=3.8"],
    "app": ["gradio>=6.31"],
    "lora": ["peft>=0.18"],
    "st": ["sentence-transformers>=6.2"],
    "sentences": ["sentencex>=1.0.32", "pysubs2>=1.8"],
    "faiss": ["faiss-cpu>=1.10"],
    "data": ["polars>=1.30"],
    "onnx": ["onnx>=1.18", "onnxscript>=0.6.2", "onnxruntime>=1.22"],
    "ray": ["ray>=2.50"],
    "sentencepiece": ["sentencepiece>=0.2", "protobuf>=4"],
    "gpu": ["liger-kernel>=0.6; sys_platform == 'linux'"],
    "quickstart": ["matplotlib>=3.8"],
    "release": ["build>=1.2", "ipykernel>=6", "mypy>=2", "nbclient>=0.10"],
}
EXTRAS["dev"] = ["build>=1.2", "setuptools>=77", "pytest>=8", "pytest-xdist>=3.6", "ruff==0.17.6"]
for each in ("quickstart", "app", "lora", "st", "sentences", "faiss", "data", "onnx", "ray"):
    EXTRAS["dev"] += EXTRAS[each]


def version() -> str:
    """Return the version that `dap_transformers/__init__.py` states."""
    text = (ROOT / "dap_transformers" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.M)[1]


setup(
    name="dap-transformers",
    version=version(),
    description="Cross-lingual sentence embeddings from any encoder (DAP, ACL 2023)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The dap-transformers authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    py_modules=[*MODEL, *COMMANDS],
    packages=find_packages(include=["dap_transformers", "dap_transformers.*"]),
    package_data={
        "dap_transformers": ["py.typed", "configs/*.yaml", "configs/*/*.yaml"],
        "dap_transformers.prepare": ["data_card.md"],
        "dap_transformers.publishing": ["model_card.md"],
    },
    install_requires=[
        "torch>=2.9",
        "transformers>=5.17",
        "accelerate>=1.12",
        "datasets>=4.4",
        "evaluate>=0.4.6",
        "safetensors>=0.8",
        "huggingface-hub>=1.31",
        "jinja2>=3.1",
        "numpy>=1.26",
        "pyarrow>=21",
        "pyyaml>=6",
        "tabulate>=0.8.9",
        "regex>=2025.10.22",
        "tqdm>=4.66.3",
        "xxhash>=3.4",
        "python-xz>=0.4",
        "filelock>=3.10",
        "polib>=1.2",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            f"{name}=dap_transformers.commands:{name.replace('-', '_')}_main" for name in CONSOLE
        ]
    },
    project_urls={
        "Paper": "https://aclanthology.org/2023.acl-long.191",
        "Code of the paper": "https://github.com/ChillingDream/DAP",
    },
    keywords=[
        "sentence embeddings",
        "cross-lingual",
        "multilingual",
        "translation ranking",
        "bitext mining",
        "word alignment",
        "transformers",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
    ],
)
