"""The commands on a local Ray cluster of two nodes: what one process gives, whatever is lost on the way."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import synthetic_pairs
from written import text_of

import eval_retrieval
import mine_bitext
import prepare_data
from dap.encoding import EncoderArguments, SentenceEncoder, embed_to_disk, embeddings
from dap.errors import UserError
from dap.prepare import pipeline
from dap.ray import ray_encoder, ray_search
from dap.ray.connection import ClusterArguments
from dap.ray.ray_encoder import ClusterEncoder
from dap.ray.ray_search import TILES, cluster_neighbours
from dap.search import Neighbours, mutual_neighbours, recall_at_k
from dap.search.approximate import built_index

HEALTH = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3}
os.environ |= {
    f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()
}  # read when Ray is loaded
os.environ |= {"RAY_worker_niceness": "0"}  # else they wait for whatever else is at work
ray = pytest.importorskip("ray")
PAIRS = synthetic_pairs("de", 60)


@pytest.fixture(scope="module")
def nodes() -> Iterator:
    """A head and a second node, of 1 CPU each, to which this process is connected."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=small)
    nodes.add_node(num_cpus=1, object_store_memory=2**27)
    with ClusterArguments(nodes.address).connect():
        yield nodes
    nodes.shutdown()


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Texts of both languages, and the model to mine them with."""
    files = []
    for number, name in enumerate(("a.de", "a.en")):
        files.append(str(tmp_path / name))
        Path(files[-1]).write_text("".join(f"{pair[number]}\n" for pair in PAIRS))
    return files


def sides(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    source, target = (
        generator.standard_normal((count, 8)).astype(np.float32) for count in (rows, columns)
    )
    target[columns // 2 :: 7] = target[3]  # equal scores far from each other
    return source, target


def require_equal(found: object, expected: object) -> None:
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


def test_commands_give_the_files_of_one_process(
    text: list[str],
    tiny_bert_dir: Path,
    tmp_path: Path,
    nodes: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr("dap.encoding.embeddings.PIECE", 16)  # several pieces a shard
    model = ["--model", str(tiny_bert_dir), "--pooling", "mean"]
    (tmp_path / "de-en.tsv").write_bytes(text_of(PAIRS))

    def outcome(name: str, *more: str) -> tuple[bytes, list[str], dict]:
        out = tmp_path / f"{name}.tsv"
        report = eval_retrieval.run([*model, "--data_dir", str(tmp_path / "de-en.tsv"), *more])
        mine_bitext.run([*text, *model, "--shard_size", "25", "--output", str(out), *more])
        shards = sorted(
            path.name for path in Path(f"{out}.embeddings").rglob("*.npy")
        )  # either goes on with these
        return out.read_bytes(), shards, report["languages"]

    expected = outcome("one")
    arguments, on_cluster = (
        EncoderArguments(str(tiny_bert_dir), pooling="mean"),
        ClusterArguments(nodes.address, ray_actors=1),
    )
    encoder = ClusterEncoder(arguments.load(), arguments, on_cluster)
    for command in (mine_bitext, eval_retrieval):
        monkeypatch.setattr(command, "load_on", lambda *_: encoder)
    write, left = embeddings.write_vectors, ["first", "second"]

    def stopped(vectors: np.ndarray, path: Path) -> None:
        write(vectors, path)
        left.pop()
        if not left:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "write_vectors", stopped)
        pytest.raises(KeyboardInterrupt, outcome, "two", "--ray", nodes.address)
    finished = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "two.tsv.embeddings").rglob("*.npy")
    }
    capsys.readouterr()
    assert outcome("two", "--ray", nodes.address) == expected
    said, shown = capsys.readouterr()
    assert re.search(r"nearest neighbours: 100%", shown)
    assert len(finished) == 2
    assert all(
        path.stat().st_mtime_ns == made for path, made in finished.items()
    )  # not encoded again
    assert "Ray: 120 sentences in 6 shards on 1 encoders" in said
    assert "Ray: 1 search tasks of about 24 MiB on 2 CPUs" in said


def test_text_is_prepared_as_in_one_process_and_damaged_files_are_left_for_another_run(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, languages = tmp_path / "raw", ("de", "fi", "sw")
    raw.mkdir()
    for language in languages:
        (raw / f"{language}-en.tsv").write_bytes(text_of(synthetic_pairs(language, 30)))
    (tmp_path / "test.en").write_text(f"{PAIRS[5][1]}\n")
    given = [
        "--data",
        str(raw),
        "--evaluation_data",
        str(tmp_path / "test.en"),
        "--max_shared",
        "2",
    ]

    def result(name: str, *more: str) -> dict[str, bytes]:
        out = tmp_path / name
        report = prepare_data.run([*given, "--dev_pairs", "2", "--output_dir", str(out), *more])
        files = (path for path in out.rglob("*") if path.is_file() and path.name != "report.json")
        return {str(path.relative_to(out)): path.read_bytes() for path in files} | report[
            "languages"
        ]

    expected = result("one")
    damaged = {raw / f"{language}-en.tsv": "one column\n" for language in languages[:2]}
    whole = {path: path.read_text() for path in damaged}
    for path, text in damaged.items():
        path.write_text(text + whole[path])
    for where in (["--ray", nodes.address], []):  # the second goes on behind the first
        with pytest.raises(
            UserError, match=r"^2 fail: .*/de-en.tsv: 1 of the .*; .*/fi-en.tsv: 1 of the "
        ):
            result("two", *where)
    (cleaned,) = (tmp_path / "two/.prepare_data").glob("clean-*")
    for path, text in whole.items():
        path.write_text(text)
    assert result("two", "--ray", nodes.address) == expected
    each = pipeline.each_on_cluster

    def lossy(*call: object) -> Iterator:
        calls = each(*call)
        for node in nodes.worker_nodes.copy():
            done = next(calls)
            nodes.remove_node(node, allow_graceful=False)
            yield done
        yield from calls

    monkeypatch.setattr(pipeline, "each_on_cluster", lossy)
    assert result("three", "--ray", nodes.address) == expected
    nodes.add_node(num_cpus=1, object_store_memory=2**27)


def test_a_file_whose_worker_is_always_lost_is_named_and_the_others_are_done(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap.ray.connection.RETRIES", 1)

    def lost(folder: Path, times: int) -> None:
        begun = len(list(folder.iterdir()))
        (folder / str(begun)).touch()
        if begun < times:
            os.kill(os.getpid(), signal.SIGKILL)

    calls = {
        name: (tmp_path / name, times) for name, times in (("a, de", 9), ("b, de", 1), ("c, de", 0))
    }
    for folder, _ in calls.values():
        folder.mkdir()
    said = r"^a, de: its worker was lost 2 times, perhaps because memory ran out$"
    with pipeline.workers(1, on_cluster=True) as run, pytest.raises(UserError, match=said):
        run("clean", lost, calls)
    assert [len(list(folder.iterdir())) for folder, _ in calls.values()] == [2, 2, 1]


def test_what_a_cluster_cannot_do_is_said_in_a_line(
    text: list[str],
    tiny_bert_dir: Path,
    tmp_path: Path,
    nodes: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mining = [
        *text,
        "--model",
        str(tiny_bert_dir),
        "--pooling",
        "mean",
        "--output",
        str(tmp_path / "pairs.tsv"),
    ]
    for more, said in (
        (["--ray_actors", "2"], "--ray_actors 2 is for a cluster: name it with --ray"),
        (["--ray", nodes.address, "--ray_actors", "0"], "--ray_actors 0: at least 1"),
        (
            ["--ray", nodes.address, "--ray_actors", "9"],
            "--ray_actors 9 with --ray_cpus_per_actor 1: .* room for 2, ",
        ),
    ):
        with pytest.raises(UserError, match=said):
            mine_bitext.run([*mining, *more])
    with pytest.raises(UserError, match="target: row 2 .* has NaN"):
        cluster_neighbours(np.ones((3, 2)), np.array([[1.0, 1], [1, 1], [1, np.nan]]), k=1)

    def raising(error: Exception) -> None:
        raise error

    class Refusing:
        def __init__(self, reason: str = "no such model") -> None:
            raise UserError(reason)

    with (
        pytest.raises(UserError, match=r"^keys: row 2$"),
        ClusterArguments(nodes.address).connect(),
    ):
        ray.get(ray.remote(num_cpus=0)(lambda: Refusing("keys: row 2")).remote())
    for full in (
        ray.exceptions.ObjectStoreFullError,
        ray.exceptions.OutOfDiskError,
    ):  # in a task, and here
        said = r"^--ray .*: a node's object store is full, and so is the disk .* a larger --object-store-memory, or "
        with pytest.raises(UserError, match=said), ClusterArguments(nodes.address).connect():
            ray.get(ray.remote(num_cpus=0)(raising).remote(full("no room")))
        with pytest.raises(UserError, match=said), ClusterArguments(nodes.address).connect():
            raising(full("no room"))
    with (
        pytest.raises(UserError, match=r"^--ray .*: no such model$"),
        ClusterArguments(nodes.address).connect(),
    ):
        ray.get(ray.remote(num_cpus=0)(Refusing).remote().__ray_ready__.remote())
    monkeypatch.setenv("WORLD_SIZE", "2")  # as accelerate launch
    with pytest.raises(UserError, match="^--ray auto in 2 processes: start one, "):
        mine_bitext.run([*mining, "--ray", "auto"])


def test_a_cluster_that_cannot_be_joined_is_told_in_a_line(nodes: object) -> None:
    script = """
import sys
import ray._private.utils as of_ray
from dap.ray.connection import ClusterArguments
of_ray.compute_version_info = lambda: ("2.60.0", "3.10.1")
for address in sys.argv[1:]:
    try:
        with ClusterArguments(address).connect():
            pass
    except ValueError as error:
        print(error)
"""
    command = [sys.executable, "-c", script, "foo", nodes.address, "127.0.0.1:1"]
    told = subprocess.run(command, text=True, capture_output=True, check=True, timeout=120).stdout
    first, second, third = told.splitlines()
    assert first == "--ray foo: Invalid address format: foo; give auto, HOST:PORT or local"
    assert re.fullmatch(
        rf"--ray {nodes.address}: Version mismatch: .* Python: 3\..* Python: 3\.10\.1; give all .*",
        second,
    )
    assert re.fullmatch(r"--ray 127.0.0.1:1: .*Connection refused", third)


def test_lost_encoders_change_no_vector_and_sentences_that_end_them_are_named(
    tiny_bert_dir: Path, tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(SentenceEncoder):
        def encode(self, sentences: Sequence[str], *options: object) -> np.ndarray:
            if "poison" in sentences:
                os.kill(os.getpid(), signal.SIGKILL)
            if "" in sentences:
                raise RuntimeError("nothing\nto do")
            return super().encode(sentences, *options)

    class Loading(EncoderArguments):
        def load(self) -> SentenceEncoder:
            return Mortal.from_pretrained(self.model_name_or_path, self.pooling)

    arguments, pieces = Loading(str(tiny_bert_dir), pooling="mean"), [[pair[0]] for pair in PAIRS]
    encoder = ClusterEncoder(arguments.load(), arguments, ClusterArguments(nodes.address))
    expected = [encoder.encoder.encode(piece) for piece in pieces]
    actors = list(encoder.actors)
    assert len(actors) == 2  # on a node of its own each, and no place for another one
    ray.get([actor.fingerprint.remote() for actor in actors])
    (second,) = nodes.worker_nodes
    nodes.remove_node(second, allow_graceful=False)
    while encoder.actors == actors:
        np.testing.assert_array_equal(list(encoder.encode_each(pieces, 4096)), expected)
    monkeypatch.setattr(ray_encoder, "LOSSES", 1)
    said = "^2 fail: 1 sentences, the longest 'poison': 1 encoders were lost at them, .*; 1 sentences, the longest '' "
    with pytest.raises(
        UserError, match=rf"{said}cannot be encoded \(RuntimeError: nothing to do\)$"
    ):
        embed_to_disk(encoder, ["a", "poison", "", "b"], tmp_path, shard_size=1)
    assert [path.name[:12] for path in sorted(tmp_path.iterdir())] == [
        "shard-000000",
        "shard-000003",
    ]
    encoder.end()
    nodes.add_node(num_cpus=1, object_store_memory=2**27)


def test_encoders_fit_on_nodes_and_have_the_model_of_the_command(
    tiny_bert_dir: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_encoder, "WAIT", 1)
    arguments, other = (
        EncoderArguments(str(tiny_bert_dir), pooling=pooling) for pooling in ("mean", "cls")
    )
    wide = ClusterArguments(nodes.address, ray_cpus_per_actor=2)
    with pytest.raises(
        UserError,
        match=r"--ray_cpus_per_actor 2: the cluster has room for 0, a node at most 1 CPUs",
    ):
        ClusterEncoder(other.load(), arguments, wide)
    added = nodes.add_node(num_cpus=2, object_store_memory=2**27)
    encoder = ClusterEncoder(other.load(), arguments, wide)
    assert len(encoder.actors) == 1  # though there are four CPUs
    said = model = "an encoder of the cluster has another model than this process"
    with pytest.raises(UserError, match=model):
        encoder.encode(["a"])
    nodes.remove_node(added, allow_graceful=False)
    while model in said:  # the last that is heard of the node
        with pytest.raises(UserError) as refused:
            encoder.encode(["a"])
        said = str(refused.value)
    assert said == "no node is left with room for an encoder: add nodes, then run again to resume"
    encoder.end()


def test_an_approximate_search_builds_an_index_of_each_strip_once(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(keys: np.ndarray, index: str) -> np.ndarray:
        tempfile.mkstemp(dir=tmp_path)
        return built_index(keys, index)

    monkeypatch.setattr(ray_search, "built_index", counted)
    monkeypatch.setattr(ray_search, "BAND", 2)
    monkeypatch.setitem(TILES, "CPU", 64)
    source, target = sides(200, 299)
    target = target[:149]  # all different
    found = cluster_neighbours(source, target, index="IVF4,Flat:nprobe=4")  # it visits all lists
    assert len(list(tmp_path.iterdir())) == 4 + 3
    exact = mutual_neighbours(source, target)
    np.testing.assert_array_equal(found.forward_indices, exact.forward_indices)
    np.testing.assert_array_equal(found.backward_indices, exact.backward_indices)
    np.testing.assert_allclose(found.forward_scores, exact.forward_scores, rtol=1e-5)
    # An exact search would now take wider tiles on one CPU than on two.
    monkeypatch.setattr(ray_search, "TILES_PER_DEVICE", 1)
    index = "IVF4,Flat:nprobe=1"
    found = cluster_neighbours(source, target, index=index)
    assert 0.5 < recall_at_k(found, source, target) < 1
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    require_equal(cluster_neighbours(source, target, index=index), found)


@pytest.mark.parametrize("seed", range(20))
def test_of_equal_scores_the_first_are_kept_though_tiles_come_in_another_order(seed: int) -> None:
    generator = np.random.default_rng(seed)
    kinds = generator.standard_normal((12, 4)).astype(np.float32)
    both = [
        kinds[generator.integers(0, len(kinds), count)]
        for count in generator.integers(8, 20, 2) * 4
    ]
    cut, found = [], []  # strips of each side have 4 rows at least
    for side in both:
        height = int(4 * generator.integers(1, 4))
        cut.append({row: side[row : row + height] for row in range(0, len(side), height)})
        found.append({row: [] for row in cut[-1]})
    begun = []  # up to three tiles are at work, in any order
    for row, column in [*ray_search._diagonals([*cut[0]], [*cut[1]]), *[(None, None)] * 3]:
        if row is not None:
            mine, theirs = found[0][row].copy(), found[1][column].copy()
            found[0][row].clear(), found[1][column].clear()
            sides = cut[0][row], cut[1][column], None, None
            tile = ray_search._search_tile(
                4, None, (column, row), *sides, len(mine), *mine, *theirs
            )
            begun.append((row, column, tile))
        if begun and (len(begun) == 3 or row is None):
            row, column, tile = begun.pop(generator.integers(len(begun)))
            found[0][row].append(tile[0])
            found[1][column].append(tile[1])
    best = [{row: ray_search._merge(pieces, 4) for row, pieces in each.items()} for each in found]
    merged = [np.concatenate(parts) for each in best for parts in zip(*each.values(), strict=True)]
    require_equal(Neighbours(*merged), mutual_neighbours(*both))


def test_lost_workers_and_nodes_change_no_neighbour(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TILES, "CPU", 4096)  # a block of the search
    monkeypatch.setattr(ray_search, "BAND", 2)
    source, target = sides(9000, 5000)
    expected = mutual_neighbours(source, target)
    ahead = ray_search._run_ahead

    def killed(function: Callable) -> Callable:
        def lossy(*call: object) -> object:
            if len(list(tmp_path.glob(f"{function.__name__} *"))) < 2:
                (tmp_path / f"{function.__name__} {os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*call)

        return lossy

    with monkeypatch.context() as patch:
        patch.setattr(ray_search, "_search_tile", killed(ray_search._search_tile))
        require_equal(cluster_neighbours(source, target), expected)
    assert len(list(tmp_path.iterdir())) >= 2

    def lossy(*arguments: object) -> Iterator:
        for number, job in enumerate(ahead(*arguments)):
            if number == 2:  # the node holds what is found so far
                nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)
            yield job

    monkeypatch.setattr(ray_search, "_run_ahead", lossy)
    require_equal(cluster_neighbours(source, target), expected)
    monkeypatch.undo()
    few = source[:3], target[:2], 2
    require_equal(cluster_neighbours(*few), mutual_neighbours(*few))
    monkeypatch.setattr(
        ray_search, "_device_nodes", lambda kind: [None]
    )  # as where the nodes are still to come
    require_equal(cluster_neighbours(*few), mutual_neighbours(*few))
