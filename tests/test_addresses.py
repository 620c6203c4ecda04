"""Files at addresses that fsspec knows are fetched and sent, once and whole."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import synthetic_pairs
from written import serve_folder, text_of

import eval_retrieval
import mine_bitext
import prepare_data
from dap import addresses
from dap.encoding import embeddings
from dap.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(addresses, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def bucket() -> Iterator[fsspec.AbstractFileSystem]:
    """Yield the file system `memory://`, and empty it at the end."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def refused(*_: Any, **__: Any) -> None:
    raise PermissionError("read-only")


def test_text_of_a_bucket_is_prepared_into_a_bucket(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    pairs = [pair for pair in synthetic_pairs("de", 160) if len(pair[1].split()) > 3]
    text = text_of(pairs)
    bucket.pipe("/raw/de-en.tsv", text)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/de-en.tsv").write_bytes(text)
    options = ["--dev_pairs", "5", "--max_shared", "2"]
    prepare_data.run(["--data", "memory://raw", "--output_dir", "memory://made/corpus", *options])
    prepare_data.run(
        ["--data", str(tmp_path / "raw"), "--output_dir", str(tmp_path / "corpus"), *options]
    )
    whole = {path for path in (tmp_path / "corpus").rglob("*") if path.is_file()}
    names = {str(path.relative_to(tmp_path)) for path in whole}
    assert {name.removeprefix("/made/") for name in bucket.find("/made")} == names
    for path in whole:
        if path.suffix == ".parquet":
            assert bucket.cat(f"/made/{path.relative_to(tmp_path)}") == path.read_bytes()


def test_a_file_is_fetched_again_only_if_its_size_or_time_has_changed(
    bucket: fsspec.AbstractFileSystem, cache: Path
) -> None:
    bucket.pipe({"/corpus/de-en.tsv": b"eins\tone\n", "/corpus/more/fr-en.tsv": b"un\tone\n"})
    copy = Path(addresses.fetch_address("memory://corpus"))
    assert copy == cache / "memory/corpus"
    assert (copy / "more/fr-en.tsv").read_bytes() == b"un\tone\n"
    changed = bucket.modified("/corpus/de-en.tsv")
    bucket.pipe({"/corpus/de-en.tsv": b"drei\tsix\n", "/corpus/more/fr-en.tsv": b"deux\ttwo\n"})
    file = bucket.store["/corpus/de-en.tsv"]
    file.modified = changed
    assert Path(addresses.fetch_address("memory://corpus/de-en.tsv")).read_bytes() == b"eins\tone\n"
    file.modified = changed + timedelta(seconds=1)
    assert Path(addresses.fetch_address("memory://corpus/de-en.tsv")).read_bytes() == b"drei\tsix\n"
    assert (
        Path(addresses.fetch_address("memory://corpus") + "/more/fr-en.tsv").read_bytes()
        == b"deux\ttwo\n"
    )
    bucket.rm("/corpus/more/fr-en.tsv")
    with pytest.raises(
        UserError, match=f"has no more/fr-en.tsv, but its copy has: remove {copy}/more/fr-en.tsv"
    ):
        addresses.fetch_address("memory://corpus")
    bucket.store["/corpus/../out.tsv"] = file
    with pytest.raises(UserError, match="/corpus/../out.tsv leads out of the folder"):
        addresses.fetch_address("memory://corpus")


def test_a_file_of_a_web_server_is_fetched_and_an_absent_one_is_refused(
    tmp_path: Path,
) -> None:
    text = (
        b"eins\tone\n" * 1_300_000
    )  # which fsspec would read in parts, and this server knows none
    (tmp_path / "de-en.tsv").write_bytes(text)
    with serve_folder(tmp_path) as home:
        assert Path(addresses.fetch_address(f"{home}/de-en.tsv")).read_bytes() == text
        with pytest.raises(UserError, match=r"fr-en.tsv cannot be fetched \(FileNotFoundError"):
            addresses.fetch_address(f"{home}/fr-en.tsv")


@pytest.mark.parametrize("option", ["--data", "--output_dir"])
@pytest.mark.parametrize("address", ["file:///a", "s4://a/b", "memory://nothing"])
def test_addresses_that_cannot_be_used_are_refused_with_the_name_of_the_argument(
    option: str, address: str, tmp_path: Path
) -> None:
    if (option, address) == ("--output_dir", "memory://nothing"):
        return  # an output need not exist
    argv = ["--data", str(tmp_path), "--output_dir", str(tmp_path / "out"), option, address]
    with pytest.raises(UserError, match=f"^{option} {address}"):
        prepare_data.run(argv)


def test_results_that_cannot_be_sent_stay_on_this_machine(
    bucket: fsspec.AbstractFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path(addresses.local_path("memory://made/pairs.tsv"))
    made.parent.mkdir(parents=True)
    made.write_bytes(b"1.2\ta\tb\n")
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "_open", refused)
        with pytest.raises(
            UserError, match=f"made/pairs.tsv cannot be written .*read-only.*; {made} has it"
        ):
            addresses.send_path(made)
    addresses.send_path(made)
    assert bucket.cat("/made/pairs.tsv") == made.read_bytes()


def test_shards_of_vectors_are_sent_one_by_one_and_another_machine_resumes_from_them(
    bucket: fsspec.AbstractFileSystem,
    tiny_bert_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = synthetic_pairs("de", 40)
    for side, name in enumerate(("de", "en")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs))
    model = ["--model", str(tiny_bert_dir), "--pooling", "mean", "--shard_size", "10"]
    command = [
        str(tmp_path / "de"),
        str(tmp_path / "en"),
        *model,
        "--output",
        "memory://made/pairs.tsv",
    ]
    encode, sent, left = embeddings.encode_pieces, [], iter([True] * 6 + [False])
    put = type(bucket).put_file

    def stopped(*arguments: Any) -> Any:
        if not next(left):
            raise KeyboardInterrupt
        return encode(*arguments)

    def counted(system: Any, local: str, there: str, **options: Any) -> None:
        sent.append(there)
        put(system, local, there, **options)

    monkeypatch.setattr(type(bucket), "put_file", counted)
    monkeypatch.setattr(embeddings, "encode_pieces", stopped)
    pytest.raises(KeyboardInterrupt, mine_bitext.run, command)
    assert len(bucket.find("/made")) == 6
    monkeypatch.setattr(addresses, "CACHE", tmp_path / "another machine")
    left = iter([True] * 2 + [False])
    mine_bitext.run(command)
    assert len(sent) == len(set(sent)) == 8 + 2  # shards, then pairs and report
    assert set(sent) == set(bucket.find("/made"))
    monkeypatch.undo()
    mine_bitext.run([*command[:-1], str(tmp_path / "here.tsv")])
    assert bucket.cat("/made/pairs.tsv") == (tmp_path / "here.tsv").read_bytes()


def test_vectors_that_could_not_be_sent_are_sent_when_the_command_is_given_again(
    bucket: fsspec.AbstractFileSystem,
    tiny_bert_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = synthetic_pairs("de", 20)
    (tmp_path / "de-en.tsv").write_text(
        "".join(f"{source}\t{target}\n" for source, target in pairs)
    )
    command = [
        "--model",
        str(tiny_bert_dir),
        "--pooling",
        "mean",
        "--data_dir",
        str(tmp_path / "de-en.tsv"),
    ]
    command += ["--embeddings_dir", "memory://kept"]
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "put_file", refused)
        with pytest.raises(UserError, match="the same command sends it"):
            eval_retrieval.run(command)
    eval_retrieval.run(command)
    (kept,) = (tmp_path / "cache/memory/kept").rglob("*.npy")
    assert bucket.cat(f"/kept/{kept.parent.name}/{kept.name}") == kept.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "exists", refused)
        kept.unlink()
        with pytest.raises(
            UserError, match=r"memory://kept/.* cannot be reached \(PermissionError: read-only\)"
        ):
            eval_retrieval.run(command)
