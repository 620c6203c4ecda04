"""Work on a local Ray cluster of two nodes equals the work of one process, whatever is lost."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import synthetic_pairs
from written import text_of

import eval_retrieval
from dap_transformers.commands import mine as mine_bitext
from dap_transformers.commands import prepare as prepare_data
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.encoding import shards as embeddings
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import embed_to_disk
from dap_transformers.errors import UserError
from dap_transformers.prepare import pipeline
from dap_transformers.ray import encoder as ray_encoder
from dap_transformers.ray import search as ray_search
from dap_transformers.ray.connection import ClusterArguments
from dap_transformers.ray.encoder import ClusterEncoder
from dap_transformers.ray.search import TILES, WIDEST, cluster_neighbours, tile_size
from dap_transformers.search.approximate import built_index, recall_at_k
from dap_transformers.search.exact import Neighbours, mutual_neighbours

# Ray reads these when it is imported. A lost node is noticed after seconds instead of minutes.
os.environ |= {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # By default workers give way to every other process of the machine.
    "RAY_worker_niceness": "0",
}
ray = pytest.importorskip("ray")
STORE = 2**27  # bytes of a node's object store
PAIRS = synthetic_pairs("de", 60)


@pytest.fixture(scope="module")
def nodes() -> Iterator:
    """Start a cluster of a head and a second node with one CPU each, and connect to it."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    add_node(nodes)
    with ClusterArguments(nodes.address).connect():
        yield nodes
    nodes.shutdown()


def add_node(nodes: object, cpus: int = 1) -> object:
    return nodes.add_node(num_cpus=cpus, object_store_memory=STORE)


def lose_node(nodes: object) -> None:
    """Kill the second node."""
    nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Write the pairs as two texts for mining."""
    german, english = tmp_path / "a.de", tmp_path / "a.en"
    german.write_text("".join(f"{pair[0]}\n" for pair in PAIRS))
    english.write_text("".join(f"{pair[1]}\n" for pair in PAIRS))
    return [str(german), str(english)]


def random_sides(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Make random vectors (rows, 8) and (columns, 8), with equal ones far from each other."""
    generator = np.random.default_rng(0)
    source = generator.standard_normal((rows, 8)).astype(np.float32)
    target = generator.standard_normal((columns, 8)).astype(np.float32)
    target[columns // 2 :: 7] = target[3]
    return source, target


def require_equal(found: Neighbours, expected: Neighbours) -> None:
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


# ------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_a_stopped_run_on_the_cluster_resumes_and_gives_the_files_of_one_process(
    texts: list[str],
    tiny_bert_dir: Path,
    tmp_path: Path,
    nodes: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(embeddings, "PIECE", 16)  # several pieces per shard
    model = ["--model", str(tiny_bert_dir), "--pooling", "mean"]
    tatoeba = tmp_path / "de-en.tsv"
    tatoeba.write_bytes(text_of(PAIRS))

    def run_commands(name: str, *more: str) -> tuple[bytes, list[str], dict]:
        out = tmp_path / f"{name}.tsv"
        report = eval_retrieval.run([*model, "--data_dir", str(tatoeba), *more])
        kept = ["--output", str(out), "--embeddings_dir", f"{out}.embeddings"]
        mine_bitext.run([*texts, *model, "--shard_size", "25", *kept, *more])
        shards = sorted(path.name for path in Path(f"{out}.embeddings").rglob("*.npy"))
        return out.read_bytes(), shards, report["languages"]

    expected = run_commands("one")

    arguments = EncoderArguments(str(tiny_bert_dir), pooling="mean")
    cluster = ClusterArguments(nodes.address, ray_actors=1)
    encoder = ClusterEncoder(arguments.load(), arguments, cluster)
    for command in (mine_bitext, eval_retrieval):
        monkeypatch.setattr(command, "load_on", lambda *_: encoder)

    # Stop the run behind its second shard.
    write = embeddings.write_vectors
    written = []

    def write_then_stop(vectors: np.ndarray, path: Path) -> None:
        write(vectors, path)
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "write_vectors", write_then_stop)
        with pytest.raises(KeyboardInterrupt):
            run_commands("two", "--ray", nodes.address)
    times = [path.stat().st_mtime_ns for path in written]

    capsys.readouterr()
    assert run_commands("two", "--ray", nodes.address) == expected
    assert [path.stat().st_mtime_ns for path in written] == times  # not encoded again
    output = capsys.readouterr().out
    assert "Ray: 120 sentences in 6 shards on 1 encoder\n" in output
    assert "Ray: 1 search task of about 24 MiB on 2 CPUs" in output


@pytest.mark.slow
def test_prepared_text_is_that_of_one_process(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for language in ("de", "fi", "sw"):
        (raw / f"{language}-en.tsv").write_bytes(text_of(synthetic_pairs(language, 30)))
    leaked = tmp_path / "test.en"
    leaked.write_text(f"{PAIRS[5][1]}\n")
    command = ["--data", str(raw), "--evaluation_data", str(leaked)]
    command += ["--max_shared", "2", "--dev_pairs", "2"]

    def prepare(name: str, *more: str) -> dict[str, object]:
        """Return the content of each file, and the counts of each language."""
        out = tmp_path / name
        report = prepare_data.run([*command, "--output_dir", str(out), *more])
        results = dict(report["languages"])
        for path in out.rglob("*"):
            if path.is_file() and path.name != "report.json":
                results[str(path.relative_to(out))] = path.read_bytes()
        return results

    expected = prepare("one")

    # Two damaged files are named. The third is cleaned, once for the cluster and one process.
    damaged = [raw / "de-en.tsv", raw / "fi-en.tsv"]
    contents = [path.read_text() for path in damaged]
    for path, content in zip(damaged, contents, strict=True):
        path.write_text(f"one column\n{content}")
    for where in (["--ray", nodes.address], []):
        with pytest.raises(UserError, match="^2 fail: .*de-en.tsv: .*fi-en.tsv: "):
            prepare("two", *where)
    assert len(list((tmp_path / "two/.prepare_data").glob("clean-*"))) == 1

    # After the repair the cluster prepares the rest.
    for path, content in zip(damaged, contents, strict=True):
        path.write_text(content)
    assert prepare("two", "--ray", nodes.address) == expected

    # A lost node changes nothing.
    each_on_cluster = pipeline.each_on_cluster

    def lose_node_after_first_call(*arguments: object) -> Iterator:
        calls = each_on_cluster(*arguments)
        if nodes.worker_nodes:
            yield next(calls)
            lose_node(nodes)
        yield from calls

    monkeypatch.setattr(pipeline, "each_on_cluster", lose_node_after_first_call)
    assert prepare("three", "--ray", nodes.address) == expected
    assert not nodes.worker_nodes
    add_node(nodes)


@pytest.mark.slow
def test_a_file_whose_worker_is_always_lost_is_named_and_the_others_are_done(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap_transformers.ray.connection.RETRIES", 1)

    def lose_workers(folder: Path, times: int) -> None:
        """Count the calls by files in a folder, and kill the first workers."""
        earlier = len(list(folder.iterdir()))
        (folder / str(earlier)).touch()
        if earlier < times:
            os.kill(os.getpid(), signal.SIGKILL)

    calls = {}
    for name, times in (("a, de", 9), ("b, de", 1), ("c, de", 0)):
        (tmp_path / name).mkdir()
        calls[name] = tmp_path / name, times
    with (
        pipeline.workers(1, on_cluster=True) as run,
        pytest.raises(UserError, match="^a, de: its worker was lost 2 times"),
    ):
        run("clean", lose_workers, calls)
    begun = [len(list((tmp_path / name).iterdir())) for name in calls]
    assert begun == [2, 2, 1]


# ------------------------------------------------------------------------------------ connection


def test_arguments_that_no_cluster_can_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--ray_actors 2"):
        ClusterArguments(ray_actors=2)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as accelerate launch sets it
    with pytest.raises(UserError, match="--ray auto in 2 processes"):
        ClusterArguments("auto")


@pytest.mark.slow
def test_errors_of_tasks_become_one_line(nodes: object) -> None:
    def fail(error: Exception) -> None:
        raise error

    class FailingActor:
        def __init__(self) -> None:
            raise UserError("no such model")

    def run_task(error: Exception) -> None:
        ray.get(ray.remote(num_cpus=0)(fail).remote(error))

    # Our own errors come back unchanged.
    with pytest.raises(UserError, match="^keys: row 2$"), ClusterArguments("auto").connect():
        run_task(UserError("keys: row 2"))
    with pytest.raises(UserError, match="no such model$"), ClusterArguments("auto").connect():
        ray.get(ray.remote(num_cpus=0)(FailingActor).remote().__ray_ready__.remote())
    # A full store or disk says what to do, in a task and in this process.
    for full in (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        for raise_it in (run_task, fail):
            with (
                pytest.raises(UserError, match="--object-store-memory"),
                ClusterArguments("auto").connect(),
            ):
                raise_it(full("no room"))


@pytest.mark.slow
def test_a_cluster_that_cannot_be_joined_is_named_in_one_line(nodes: object) -> None:
    script = """
import sys
import ray._private.utils as ray_utils
from dap_transformers.ray.connection import ClusterArguments
ray_utils.compute_version_info = lambda: ("2.60.0", "3.10.1")
for address in sys.argv[1:]:
    try:
        with ClusterArguments(address).connect():
            pass
    except ValueError as error:
        print(error)
"""
    command = [sys.executable, "-c", script, "foo", nodes.address, "127.0.0.1:1"]
    done = subprocess.run(command, text=True, capture_output=True, check=True, timeout=120)
    unknown, other_version, silent = done.stdout.splitlines()
    assert unknown.startswith("--ray foo: ")
    assert re.match(rf"--ray {nodes.address}: Version mismatch: .*3\.10\.1", other_version)
    assert re.match(r"--ray 127.0.0.1:1: .*Connection refused", silent)


# -------------------------------------------------------------------------------------- encoding


@pytest.mark.slow
def test_lost_encoders_change_no_vector_and_fatal_sentences_are_named(
    tiny_bert_dir: Path, tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MortalEncoder(SentenceEncoder):
        def encode(self, sentences: Sequence[str], *options: object) -> np.ndarray:
            if "poison" in sentences:
                os.kill(os.getpid(), signal.SIGKILL)
            if "" in sentences:
                raise RuntimeError("nothing\nto do")
            return super().encode(sentences, *options)

    class MortalArguments(EncoderArguments):
        def load(self) -> SentenceEncoder:
            return MortalEncoder.from_pretrained(self.model_name_or_path, self.pooling)

    arguments = MortalArguments(str(tiny_bert_dir), pooling="mean")
    encoder = ClusterEncoder(arguments.load(), arguments, ClusterArguments(nodes.address))
    pieces = [[source] for source, _ in PAIRS]
    expected = [encoder.encoder.encode(piece) for piece in pieces]

    # Each of the two actors has a node of its own. Lose one of the nodes.
    actors = list(encoder.actors)
    assert len(actors) == 2
    ray.get([actor.fingerprint.remote() for actor in actors])
    lose_node(nodes)
    while encoder.actors == actors:  # until Ray notices it
        np.testing.assert_array_equal(list(encoder.encode_each(pieces, 4096)), expected)

    monkeypatch.setattr(ray_encoder, "LOSSES", 1)
    lost = "1 sentence, the longest 'poison': 1 encoder stopped there"
    failed = r"1 sentence, the longest '' cannot be encoded \(RuntimeError: nothing to do\)"
    with pytest.raises(UserError, match=f"^2 fail: {lost}.*; {failed}$"):
        embed_to_disk(encoder, ["a", "poison", "", "b"], tmp_path, shard_size=1)
    shards = [path.name[:12] for path in sorted(tmp_path.iterdir())]
    assert shards == ["shard-000000", "shard-000003"]
    encoder.end()
    add_node(nodes)


@pytest.mark.slow
def test_encoders_fit_on_nodes_and_have_the_model_of_the_command(
    tiny_bert_dir: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_encoder, "WAIT", 1)
    mean = EncoderArguments(str(tiny_bert_dir), pooling="mean")
    cls = EncoderArguments(str(tiny_bert_dir), pooling="cls")
    many = ClusterArguments(nodes.address, ray_actors=9)
    lacking = "--ray_actors 9 with --ray_cpus_per_actor 1: .* room for [12]"
    with pytest.raises(UserError, match=lacking):
        ClusterEncoder(mean.load(), mean, many)
    wide = ClusterArguments(nodes.address, ray_cpus_per_actor=2)
    # The two CPUs are on different nodes.
    with pytest.raises(UserError, match="--ray_cpus_per_actor 2: .* room for 0, .* most 1 CPUs"):
        ClusterEncoder(cls.load(), mean, wide)
    added = add_node(nodes, cpus=2)
    encoder = ClusterEncoder(cls.load(), mean, wide)
    assert len(encoder.actors) == 1  # though there are four CPUs

    other_model = "another model than this process"
    with pytest.raises(UserError, match=other_model):
        encoder.encode(["a"])
    nodes.remove_node(added, allow_graceful=False)
    message = other_model
    while other_model in message:  # the actor still answers until the node is gone
        with pytest.raises(UserError) as refused:
            encoder.encode(["a"])
        message = str(refused.value)
    assert message.startswith("no node is left with room for an encoder")
    encoder.end()


# ---------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("rows", [1, 1000, 50_000, 10**6, 10**9])
@pytest.mark.parametrize("columns", [1, 70_000, 10**8])
@pytest.mark.parametrize(("kind", "count"), [("CPU", 1), ("CPU", 512), ("GPU", 8)])
def test_tiles_cover_both_sides_and_have_a_highest_size(
    rows: int, columns: int, kind: str, count: int
) -> None:
    height, width = tile_size(rows, columns, kind, count)
    assert 1 <= height <= WIDEST * TILES[kind]
    assert 1 <= width <= WIDEST * TILES[kind]
    for side, size in ((rows, height), (columns, width)):
        strips = -(-side // size)
        assert strips * size - side < strips  # equal strips: none lacks more than a row each


@pytest.mark.slow
def test_an_approximate_search_builds_one_index_per_strip_and_ignores_the_number_of_cpus(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted_index(keys: np.ndarray, index: str) -> np.ndarray:
        tempfile.mkstemp(dir=tmp_path)
        return built_index(keys, index)

    monkeypatch.setattr(ray_search, "built_index", counted_index)
    monkeypatch.setattr(ray_search, "BAND", 2)
    monkeypatch.setitem(TILES, "CPU", 64)
    source, target = random_sides(200, 299)
    target = target[:149]  # without equal vectors
    exact = mutual_neighbours(source, target)

    all_lists = cluster_neighbours(source, target, index="IVF4,Flat:nprobe=4")
    assert len(list(tmp_path.iterdir())) == 4 + 3
    np.testing.assert_array_equal(all_lists.forward_indices, exact.forward_indices)
    np.testing.assert_array_equal(all_lists.backward_indices, exact.backward_indices)
    np.testing.assert_allclose(all_lists.forward_scores, exact.forward_scores, rtol=1e-5)

    # The tiles of an exact search would now be wider on one CPU than on two.
    monkeypatch.setattr(ray_search, "TILES_PER_DEVICE", 1)
    one_list = "IVF4,Flat:nprobe=1"
    found = cluster_neighbours(source, target, index=one_list)
    assert 0.5 < recall_at_k(found, source, target) < 1
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    require_equal(cluster_neighbours(source, target, index=one_list), found)


@pytest.mark.slow
def test_vectors_with_nan_are_refused(nodes: object) -> None:
    with pytest.raises(UserError, match="target: row 2 .* has NaN"):
        cluster_neighbours(np.ones((3, 2)), np.array([[1.0, 1], [1, 1], [1, np.nan]]), k=1)


@pytest.mark.parametrize("seed", range(8))
def test_equal_scores_keep_the_lowest_index_in_any_order_of_tiles(seed: int) -> None:
    generator = np.random.default_rng(seed)
    kinds = generator.standard_normal((12, 4)).astype(np.float32)

    def random_strips() -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Make a side of repeated vectors, and cut it into strips of 4 rows or more."""
        count = 4 * int(generator.integers(8, 20))
        side = kinds[generator.integers(0, len(kinds), count)]
        height = 4 * int(generator.integers(1, 4))
        strips = {start: side[start : start + height] for start in range(0, count, height)}
        return side, strips

    source, rows = random_strips()
    target, columns = random_strips()
    found_rows = {row: [] for row in rows}
    found_columns = {column: [] for column in columns}

    def start(row: int, column: int) -> tuple:
        """Search a tile from what is found so far. Its result comes later."""
        known_rows, found_rows[row] = found_rows[row], []
        known_columns, found_columns[column] = found_columns[column], []
        known = (len(known_rows), *known_rows, *known_columns)
        vectors = rows[row], columns[column], None, None
        return row, column, ray_search._search_tile(4, None, (column, row), *vectors, *known)

    def finish_any(running: list[tuple]) -> None:
        row, column, (forward, backward) = running.pop(generator.integers(len(running)))
        found_rows[row].append(forward)
        found_columns[column].append(backward)

    running = []  # three tiles at a time
    for row, column in ray_search._diagonals([*rows], [*columns]):
        running.append(start(row, column))
        if len(running) == 3:
            finish_any(running)
    while running:
        finish_any(running)

    merged = []
    for found in (found_rows, found_columns):
        best = [ray_search._merge(pieces, 4) for pieces in found.values()]
        merged.append(np.concatenate([scores for scores, _ in best]))
        merged.append(np.concatenate([indices for _, indices in best]))
    require_equal(Neighbours(*merged), mutual_neighbours(source, target))


@pytest.mark.slow
def test_lost_workers_and_nodes_change_no_neighbour(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TILES, "CPU", 4096)
    monkeypatch.setattr(ray_search, "BAND", 2)
    source, target = random_sides(9000, 5000)
    expected = mutual_neighbours(source, target)

    # The first two workers die.
    search_tile = ray_search._search_tile

    def search_or_die(*tile: object) -> object:
        if len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return search_tile(*tile)

    with monkeypatch.context() as patch:
        patch.setattr(ray_search, "_search_tile", search_or_die)
        require_equal(cluster_neighbours(source, target), expected)
    assert len(list(tmp_path.iterdir())) >= 2

    # A node dies with what is found so far.
    run_ahead = ray_search._run_ahead

    def lose_node_at_third_tile(*arguments: object) -> Iterator:
        for number, job in enumerate(run_ahead(*arguments)):
            if number == 2:
                lose_node(nodes)
            yield job

    monkeypatch.setattr(ray_search, "_run_ahead", lose_node_at_third_tile)
    require_equal(cluster_neighbours(source, target), expected)
    assert not nodes.worker_nodes


@pytest.mark.slow
def test_few_rows_are_searched_also_while_no_node_has_joined_yet(
    nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = random_sides(8, 8)
    source, target = source[:3], target[:2]
    expected = mutual_neighbours(source, target, 2)
    require_equal(cluster_neighbours(source, target, 2), expected)
    monkeypatch.setattr(ray_search, "_device_nodes", lambda kind: [None])
    require_equal(cluster_neighbours(source, target, 2), expected)
