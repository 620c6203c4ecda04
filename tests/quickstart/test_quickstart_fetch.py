"""Pinned wheels are downloaded and checked. No network is needed."""

import hashlib
import sys
from pathlib import Path

import pytest
from written import zip_of

from dap_transformers.errors import UserError
from quickstart import fetch


def pinned(content: bytes) -> fetch.Wheel:
    return fetch.Wheel("toy==1.0", "toy-1.0-py3-none-any.whl", hashlib.sha256(content).hexdigest())


def test_a_download_reaches_the_folder_once_and_is_always_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {
        "toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
        "toy-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\n",
    }
    toy = zip_of(tmp_path / "toy-1.0-py3-none-any.whl", members)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "wheels"
    wheel = pinned(toy.read_bytes())
    for executable in (sys.executable, "/no/such/python"):
        monkeypatch.setattr(sys, "executable", executable)
        assert fetch.fetch([wheel], folder) == [*folder.iterdir()] == [folder / toy.name]
    (folder / toy.name).write_bytes(b"other")
    with pytest.raises(UserError, match=toy.name):
        fetch.fetch([wheel], folder)


def test_half_a_download_is_not_taken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"  # it dies within the file
    pip.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n'
        'printf da > "$2/toy-1.0-py3-none-any.whl"\nexit 1\n'
    )
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(UserError, match="toy==1.0"):
        fetch.fetch([pinned(b"data")], tmp_path / "wheels")
    assert list((tmp_path / "wheels").iterdir()) == []
