"""The folder of a run belongs to one process at a time."""

import os
from pathlib import Path

import pytest

from dap.prepare import run_folder
from dap.prepare.run_folder import claimed


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
