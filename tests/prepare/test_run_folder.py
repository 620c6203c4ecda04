"""The folder of a run belongs to one process at a time, and what is in it is whole."""

import os
from pathlib import Path

import pytest

from dap.prepare import run_folder
from dap.prepare.run_folder import claimed, full_device, new_folder


def test_a_refused_claim_leaves_the_folder_to_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with claimed(folder):
            for _ in range(2):
                with pytest.raises(ValueError, match="another run is at work"), claimed(folder):
                    raise AssertionError("claimed twice")
            assert folder.is_dir()
        assert not folder.exists()
    with claimed(folder):
        (folder / "kept").touch()
    assert (folder / "kept").is_file()


def test_a_folder_that_was_taken_away_before_its_lock_is_claimed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock, taken_away = tmp_path / "run", run_folder._lock, []

    def lock_too_late(handle: int, path: Path) -> None:
        if len(taken_away) < 2:  # as by another run that ends between the opening and the lock
            path.rmdir()
            taken_away.append(path)
        lock(handle, path)

    monkeypatch.setattr(run_folder, "_lock", lock_too_late)
    before = set(os.listdir("/proc/self/fd"))
    with claimed(folder):
        monkeypatch.undo()
        assert folder.is_dir()
        with pytest.raises(ValueError, match="another run is at work"), claimed(folder):
            raise AssertionError("claimed twice")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new") as folder:
        (folder / "half").write_bytes(bytes([1 // 0]))
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "new") as folder:
        (folder / "whole").touch()
        assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["whole"]


def test_other_errors_of_the_system_pass() -> None:
    with pytest.raises(FileNotFoundError), full_device("here"):
        raise FileNotFoundError(2, "absent")
