"""Parallel text is loaded once into a cache."""

import os
from pathlib import Path

import pytest
from datasets import Value
from written import PAIRS, pairs_of, text_of, write, write_format

from dap_transformers.text.corpus import load_bitext


def test_all_files_of_a_language_follow_each_other(tmp_path: Path) -> None:
    write_format(tmp_path, "a.de-en.jsonl", PAIRS)
    write_format(tmp_path, "b.deu-en.parquet", PAIRS[:2])
    write_format(tmp_path, "c.XX", PAIRS[1:])
    write_format(tmp_path, "d.de-en.tsv.xz", PAIRS)
    write_format(tmp_path, "xh-en.tsv", PAIRS[:1])
    data = load_bitext(tmp_path, cache_dir=tmp_path / "cache")
    assert list(data) == ["de", "xh"]
    assert data["de"].features == {"source": Value("string"), "target": Value("string")}
    assert pairs_of(data["de"]) == PAIRS + PAIRS[:2] + PAIRS[1:] + PAIRS
    assert pairs_of(data["xh"]) == PAIRS[:1]


def test_the_cache_is_used_until_the_file_or_the_tolerance_changes(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "de-en.tsv", text_of([*PAIRS, ("alone",)])), tmp_path / "cache"
    first, second = (load_bitext(path, 0.5, cache_dir=cache)["de"] for _ in range(2))
    assert first.cache_files == second.cache_files
    assert first._fingerprint == second._fingerprint
    with pytest.raises(ValueError, match="line 7"):
        load_bitext(path, cache_dir=cache)
    times = path.stat()
    write(path, text_of([*PAIRS[::-1], ("alone",)]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time
    assert pairs_of(load_bitext(path, 0.5, cache_dir=cache)["de"]) == PAIRS[::-1]
    assert len(list(cache.iterdir())) == 2  # nothing half written
