"""Parallel text is loaded once into a cache, or streamed with rows that identify the pairs."""

import os
from pathlib import Path

import pytest
from written import PAIRS, many, pairs_of, text_of, write, write_format

from dap_transformers.text.corpus import count_pairs, load_bitext
from dap_transformers.text.find import find_bitext


@pytest.mark.parametrize("streaming", [False, True])
def test_all_files_of_a_language_follow_each_other(tmp_path: Path, streaming: bool) -> None:
    write_format(tmp_path, "a.de-en.jsonl", PAIRS)
    write_format(tmp_path, "b.deu-en.parquet", PAIRS[:2])
    write_format(tmp_path, "c.XX", PAIRS[1:])
    write_format(tmp_path, "d.de-en.tsv.xz", PAIRS)
    write_format(tmp_path, "xh-en.tsv", PAIRS[:1])
    data = load_bitext(tmp_path, streaming=streaming, cache_dir=tmp_path / "cache")
    assert list(data) == ["de", "xh"]
    columns = ["source", "target", "row"] if streaming else ["source", "target"]
    assert data["de"].column_names == columns
    assert all(data["de"].features[name].dtype == "string" for name in columns)
    assert pairs_of(data["de"]) == PAIRS + PAIRS[:2] + PAIRS[1:] + PAIRS
    assert pairs_of(data["xh"]) == PAIRS[:1]
    assert count_pairs(find_bitext(tmp_path)["de"]) == 3 * len(PAIRS) + 1


def test_a_stream_resumes_where_it_stopped(tmp_path: Path) -> None:
    write_format(tmp_path, "a.de-en.tsv", many(30))
    write_format(tmp_path, "b.de-en.tsv", many(20))
    stream = load_bitext(tmp_path, streaming=True)["de"]
    rows = iter(stream)
    seen = [next(rows) for _ in range(37)]
    state = stream.state_dict()
    again = load_bitext(tmp_path, streaming=True)["de"]
    again.load_state_dict(state)
    assert seen + list(again) == list(stream)


def test_rows_of_a_stream_identify_the_pair(tmp_path: Path) -> None:
    write(tmp_path / "fr-en.tsv", text_of([*many(2), ("alone",), *many(2)]))
    for name in ("x/de-en.tsv", "y/de-en.tsv"):
        write(tmp_path / name, text_of(many(2)))
    write_format(tmp_path / "y", "a.XX", many(1))
    paths = [tmp_path / "fr-en.tsv", tmp_path / "x", tmp_path / "y"]
    data = load_bitext(paths, streaming=True, max_bad_lines=0.5)
    assert [row["row"] for row in data["fr"]] == ["0", "1", "2", "3"]
    names = ["0:0", "0:1", "1:0", "2:0", "2:1"]
    assert [row["row"] for row in data["de"]] == names
    with pytest.raises(ValueError, match="max_bad_lines=5"):
        load_bitext(paths, streaming=True, max_bad_lines=5)


def test_the_cache_is_used_until_the_file_or_the_tolerance_changes(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "de-en.tsv", text_of([*PAIRS, ("alone",)])), tmp_path / "cache"
    first, second = (load_bitext(path, False, 0.5, cache_dir=cache)["de"] for _ in range(2))
    assert first.cache_files == second.cache_files
    assert first._fingerprint == second._fingerprint
    with pytest.raises(ValueError, match="line 7"):
        load_bitext(path, cache_dir=cache)
    times = path.stat()
    write(path, text_of([*PAIRS[::-1], ("alone",)]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time
    assert pairs_of(load_bitext(path, False, 0.5, cache_dir=cache)["de"]) == PAIRS[::-1]
    assert len(list(cache.iterdir())) == 2  # nothing half written
