"""Corpora are downloaded from a local server that looks like OPUS'."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from written import serve_folder, zip_of

from dap_transformers.errors import UserError
from dap_transformers.prepare import opus
from dap_transformers.prepare.opus import download, download_corpora
from dap_transformers.text.corpus import load_bitext

PAIRS = {
    ("Europarl/v8", "de-en"): ("Guten Tag", "Good day"),
    ("OpenSubtitles/v2018", "de-en"): ("Hallo", "Hello"),
    ("OpenSubtitles/v2018", "en-pt_br"): ("Bom dia", "Good morning"),
    ("OpenSubtitles/v2018", "en-zh_cn"): ("你好", "Hello"),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve archives as OPUS makes them: a Moses pair, a licence and other files."""
    folder = tmp_path / "store"
    for (release, pair), texts in PAIRS.items():
        path = folder / f"OPUS-{release}/moses/{pair}.txt.zip"
        code = pair.replace("-en", "").replace("en-", "")
        sides = {f"C.{pair}.{side}": f"{text}\n" for side, text in zip((code, "en"), texts)}
        zip_of(path, {"README": "not text\n" * 50, f"C.{pair}.ids": "1\n", **sides})
    with serve_folder(folder) as address:
        monkeypatch.setattr(opus, "STORE", address)
        yield folder


def test_all_corpora_are_asked_for_in_all_languages_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opus, "download", lambda url, path: True)
    names = {path.name for path in download_corpora(["all"], [], tmp_path)}
    assert len(names) == 36 * 6 + 2
    assert "OpenSubtitles_v2018.en-zh_tw.txt.zip" in names
    assert "OpenSubtitles_v2018.en-zh.txt.zip" not in names
    with pytest.raises(UserError, match="Books: known are Europarl"):
        download_corpora(["Books"], ["de"], tmp_path)


def test_downloaded_text_can_be_read(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    found = download_corpora(["Europarl", "OpenSubtitles"], ["deu", "pt", "zh"], folder)
    assert [f"{corpus}: {path.name}" for path, corpus in found.items()] == [
        "Europarl v8: Europarl_v8.de-en.txt.zip",
        "OpenSubtitles v2018: OpenSubtitles_v2018.de-en.txt.zip",
        "OpenSubtitles v2018: OpenSubtitles_v2018.en-pt_br.txt.zip",
        "OpenSubtitles v2018: OpenSubtitles_v2018.en-zh_cn.txt.zip",
    ]
    data = load_bitext(folder, cache_dir=tmp_path / "cache")
    read = [tuple(row.values()) for rows in data.values() for row in rows]
    assert read == list(PAIRS.values())
    opus.STORE = "http://127.0.0.1:1"  # what is there is not asked for again
    assert list(download_corpora(["Europarl"], ["de"], folder)) == list(found)[:1]


def test_a_file_that_is_absent_or_damaged_is_never_taken_for_a_whole_one(
    store: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="UNPC"):
        download_corpora(["UNPC"], ["sw"], tmp_path / "raw")
    file = store / "OPUS-Europarl/v8/moses/de-en.txt.zip"
    whole = file.read_bytes()
    source, path = f"{opus.STORE}/OPUS-Europarl/v8/moses/de-en.txt.zip", tmp_path / "a.zip"
    for size in (100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match="damaged"):
            download(source, path)
        assert not path.exists()
    file.write_bytes(whole)
    download(source, path)
    assert path.read_bytes() == whole
