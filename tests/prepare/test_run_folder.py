"""A step's folder is whole, or not there."""

from pathlib import Path

import pytest

from dap.prepare.run_folder import new_folder


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new") as folder:
        (folder / "half").write_bytes(bytes([1 // 0]))
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "new") as folder:
        (folder / "whole").touch()
        assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["whole"]
