"""Package definition of dap-transformers.

A checkout and a wheel have different layouts (`BuildPackage`):

- In a checkout, the files beside this one and the folder `dap` are imported by their own names.
- A wheel holds all of them in one package, `dap_transformers`. Names such as `dap` and
  `prepare_data` belong to other projects, too.
"""

import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
#: Name of the package in a wheel. In a checkout, `dap_transformers.py` gives the same names.
PACKAGE = "dap_transformers"
#: Files that ship with every checkpoint. They import each other by relative imports.
MODEL = [
    "configuration_dap",
    "encoder_dap",
    "states_dap",
    "heads_dap",
    "objectives_dap",
    "losses_dap",
    "modeling_dap",
]
COMMANDS = [
    "train_dap",
    "eval_retrieval",
    "mine_bitext",
    "align_words",
    "run_xnli",
    "prepare_data",
    "push_to_hub",
]

EXTRAS = {
    "eval": ["matplotlib>=3.8"],
    "app": ["gradio>=6.31"],
    "lora": ["peft>=0.18"],
    "st": ["sentence-transformers>=6.2"],
    "faiss": ["faiss-cpu>=1.10"],
    "data": ["polars>=1.30"],
    "opus": ["polars>=1.30", "opustools>=1.9"],
    "onnx": ["onnx>=1.18", "onnxscript>=0.6.2", "onnxruntime>=1.22"],
    "ray": ["ray>=2.50"],
    "sentencepiece": ["sentencepiece>=0.2", "protobuf>=4"],
    "gpu": ["liger-kernel>=0.6; sys_platform == 'linux'"],
    "quickstart": ["matplotlib>=3.8"],
    "slow": ["build>=1.2", "ipykernel>=6", "mypy>=2", "nbclient>=0.10", "opustools>=1.9"],
}
EXTRAS["dev"] = [
    *EXTRAS["quickstart"],
    *EXTRAS["app"],
    *EXTRAS["lora"],
    *EXTRAS["st"],
    *EXTRAS["faiss"],
    *EXTRAS["data"],
    *EXTRAS["onnx"],
    *EXTRAS["ray"],
    "build>=1.2",
    "setuptools>=77",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "ruff==0.17.6",
]


class BuildPackage(build_py):
    """Build the wheel's layout: everything that is installed lies in one package.

    The modules of `dap` and the commands import each other by absolute imports, which are changed
    here. The files of `MODEL` are copied unchanged, because their relative imports work anywhere.
    """

    def run(self) -> None:
        """Build all modules in a temporary folder, and move them into the package."""
        if self.editable_mode:  # the checkout itself is imported
            return
        build_folder = Path(self.build_lib)
        package = build_folder / PACKAGE
        shutil.rmtree(build_folder, ignore_errors=True)  # what an earlier build left

        with TemporaryDirectory() as temporary:
            self.build_lib = temporary
            super().run()
            shutil.copytree(Path(temporary, "dap"), package)
            for name in MODEL + COMMANDS:
                shutil.copy(Path(temporary, f"{name}.py"), package)
            self.build_lib = str(build_folder)
        shutil.copytree(ROOT / "configs", package / "configs")

        for file in package.rglob("*.py"):
            if file.stem not in MODEL:
                source = file.read_text(encoding="utf-8")
                file.write_text(with_package_name(source), encoding="utf-8")


class DescribePackage(egg_info):
    """Write the metadata of a wheel, in which only one name is imported."""

    def run(self) -> None:
        """Write all metadata, and replace the list of top-level names."""
        super().run()
        Path(self.egg_info, "top_level.txt").write_text(f"{PACKAGE}\n", encoding="utf-8")


def with_package_name(source: str) -> str:
    """Return source code in which all our modules are imported from the package `PACKAGE`.

    >>> with_package_name("from dap.text import load_bitext")
    'from dap_transformers.text import load_bitext'
    >>> with_package_name("import modeling_dap")
    'from dap_transformers import modeling_dap'
    """
    modules = "|".join(MODEL + COMMANDS)
    # Also in docstrings and messages: `python -m dap.reports`.
    source = re.sub(r"(^ *from |python -m )dap(?=[. ])", rf"\1{PACKAGE}", source, flags=re.M)
    source = re.sub(rf"^( *)from ({modules}) ", rf"\1from {PACKAGE}.\2 ", source, flags=re.M)
    return re.sub(rf"^( *)import ({modules})$", rf"\1from {PACKAGE} import \2", source, flags=re.M)


def version() -> str:
    """Return the version that `dap/__init__.py` states."""
    text = (ROOT / "dap" / "__init__.py").read_text(encoding="utf-8")
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
    cmdclass={"build_py": BuildPackage, "egg_info": DescribePackage},
    py_modules=[*MODEL, *COMMANDS, PACKAGE],
    packages=find_packages(include=["dap", "dap.*"]),
    package_data={
        "dap": ["py.typed"],
        "dap.prepare": ["data_card.md"],
        "dap.publishing": ["model_card.md"],
    },
    install_requires=[
        "torch>=2.8",
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
        "tqdm>=4.66.3",
        "requests>=2.32",
        "xxhash>=3.4",
        "python-xz>=0.4",
        "filelock>=3.10",
        "fsspec[http]>=2024.2",
        "polib>=1.2",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            f"train-dap={PACKAGE}.train_dap:main",
            f"eval-retrieval={PACKAGE}.eval_retrieval:main",
            f"mine-bitext={PACKAGE}.mine_bitext:main",
            f"align-words={PACKAGE}.align_words:main",
            f"run-xnli={PACKAGE}.run_xnli:main",
            f"prepare-data={PACKAGE}.prepare_data:main",
            f"push-to-hub={PACKAGE}.push_to_hub:main",
            f"export-onnx={PACKAGE}.publishing.onnx_export:main",
            f"merge-reports={PACKAGE}.reports.command_line:main",
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
