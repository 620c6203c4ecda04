"""Package definition of dap-transformers."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "eval": ["matplotlib>=3.8"],
    "app": ["gradio>=6.31", "matplotlib>=3.8"],
    "st": ["sentence-transformers>=5.2"],
    "faiss": ["faiss-cpu>=1.10"],
    "data": ["polars>=1.30"],
    "onnx": ["onnx>=1.18", "onnxscript>=0.6.2", "onnxruntime>=1.22"],
    "ray": ["ray>=2.50"],
    "gpu": ["liger-kernel>=0.6; sys_platform == 'linux'"],
    "quickstart": ["matplotlib>=3.8"],
}
EXTRAS["dev"] = [
    *EXTRAS["quickstart"],
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

setup(
    name="dap-transformers",
    version="0.1.0",
    description="Dual-alignment pre-training (DAP, ACL 2023) for cross-lingual sentence embedding with Transformers",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    py_modules=[
        "configuration_dap",
        "encoder_dap",
        "heads_dap",
        "objectives_dap",
        "losses_dap",
        "modeling_dap",
        "train_dap",
        "eval_retrieval",
        "mine_bitext",
        "run_xnli",
        "prepare_data",
        "push_to_hub",
    ],
    packages=find_packages(include=["dap", "dap.*"]),
    package_data={"dap.prepare": ["data_card.md"], "dap.publishing": ["model_card.md"]},
    install_requires=[
        "torch>=2.8",
        "transformers>=5.20",
        "accelerate>=1.12",
        "datasets>=4.4",
        "evaluate>=0.4.6",
        "safetensors>=0.8",
        "huggingface-hub>=1.31",
        "jinja2>=3.1",
        "numpy>=1.26",
        "pyarrow>=21",
        "pyyaml>=6",
        "tqdm>=4.66.3",
        "xxhash>=3.4",
        "python-xz>=0.4",
        "filelock>=3.10",
        "fsspec[http]>=2024.2",
        "polib>=1.2",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "train-dap=train_dap:main",
            "eval-retrieval=eval_retrieval:main",
            "mine-bitext=mine_bitext:main",
            "run-xnli=run_xnli:main",
            "prepare-data=prepare_data:main",
            "push-to-hub=push_to_hub:main",
        ]
    },
    classifiers=["Programming Language :: Python :: 3", "Topic :: Text Processing :: Linguistic"],
)
