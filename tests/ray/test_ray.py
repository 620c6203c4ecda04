"""Work on a local Ray cluster of two nodes equals the work of one process, whatever is lost."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import synthetic_pairs
from numpy.testing import assert_array_equal, assert_equal
from written import text_of, write, write_format

import eval_retrieval
from dap_transformers.commands import mine_bitext
from dap_transformers.encoding import shards as embeddings
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.prepare.options import PrepareOptions, RawText
from dap_transformers.prepare.prepare_text import prepare_text
from dap_transformers.ray import encoder as ray_encoder
from dap_transformers.ray import search as ray_search
from dap_transformers.ray.connection import Cluster, each_on_cluster
from dap_transformers.ray.encoder import ClusterEncoder
from dap_transformers.ray.search import TILES, cluster_neighbours
from dap_transformers.search.exact import mutual_neighbours

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
    from ray import cluster_utils

    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    add_node(nodes)
    with Cluster(nodes.address).connect():
        yield nodes
    nodes.shutdown()


def add_node(nodes: object, cpus: int = 1) -> object:
    return nodes.add_node(num_cpus=cpus, object_store_memory=STORE)


def lose_node(nodes: object) -> None:
    """Kill the second node."""
    nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)


# ------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_commands_on_the_cluster_give_the_numbers_of_one_process(
    tiny_bert_dir: Path, nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "PIECE", 16)  # several pieces per shard
    text = write(tmp_path / "de-en.tsv", text_of(PAIRS))
    write_format(tmp_path, "a.XX", PAIRS)
    sides = f"{tmp_path}/a.de {tmp_path}/a.en"

    def run_commands(out: Path, more: str = "") -> tuple[bytes, dict]:
        more += f" --model {tiny_bert_dir} --pooling mean"
        report = eval_retrieval.run(f"--data_dir {text} {more}".split())
        mine_bitext.run(f"{sides} --output {out} {more}".split())
        return out.read_bytes(), report["languages"]

    expected = run_commands(tmp_path / "one.tsv")
    assert run_commands(tmp_path / "two.tsv", f"--ray {nodes.address}") == expected


@pytest.mark.slow
def test_prepared_text_is_that_of_one_process_also_if_a_node_is_lost(
    tmp_path: Path, nodes: object
) -> None:
    for code in ("de", "fi", "sw"):
        write(tmp_path / f"raw/{code}-en.tsv", text_of(synthetic_pairs(code, 30)))

    def lose_node_after_first_call(*arguments: object) -> Iterator:
        calls = each_on_cluster(*arguments)
        if nodes.worker_nodes:
            yield next(calls)
            lose_node(nodes)
        yield from calls

    results = []
    for number, run_calls in enumerate((None, each_on_cluster, lose_node_after_first_call)):
        out = tmp_path / str(number)
        text = RawText(str(out), [f"{tmp_path}/raw"])
        report = prepare_text(text, PrepareOptions(max_shared=2, dev_pairs=2), run_calls)
        results.append(dict(report["languages"]))
        for path in out.rglob("*.parquet"):
            results[-1][str(path.relative_to(out))] = path.read_bytes()
    assert results[0] == results[1] == results[2]
    assert not nodes.worker_nodes
    add_node(nodes)


# ------------------------------------------------------------------------------------ connection


def test_several_processes_need_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as accelerate launch sets it
    with pytest.raises(UserError, match="ray=auto in 2 processes"):
        Cluster("auto")


@pytest.mark.slow
def test_errors_of_tasks_become_one_line(nodes: object) -> None:
    def fail(error: Exception) -> None:
        raise error

    # Our own errors come back unchanged. A full store says what to do.
    errors = {
        "^keys: row 2$": UserError("keys: row 2"),
        "--object-store-memory": ray.exceptions.ObjectStoreFullError("no room"),
    }
    for says, error in errors.items():
        with pytest.raises(UserError, match=says), Cluster("auto").connect():
            ray.get(ray.remote(num_cpus=0)(fail).remote(error))


# -------------------------------------------------------------------------------------- encoding


@pytest.mark.slow
def test_lost_encoders_change_no_vector_and_are_not_restarted_for_ever(
    tiny_bert_dir: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MortalEncoder(SentenceEncoder):
        def encode(self, sentences: Sequence[str], *options: object) -> np.ndarray:
            if "poison" in sentences:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode(sentences, *options)

    encoder = ClusterEncoder(
        lambda: MortalEncoder.from_pretrained(str(tiny_bert_dir), "mean"), Cluster(nodes.address)
    )
    pieces = [[source] for source, _ in PAIRS]
    expected = [encoder.encoder.encode(piece) for piece in pieces]

    # Each of the two actors has a node of its own. Lose one of the nodes.
    actors = list(encoder.actors)
    assert len(actors) == 2
    ray.get([actor.fingerprint.remote() for actor in actors])
    lose_node(nodes)
    while encoder.actors == actors:  # until Ray notices it
        assert_array_equal(list(encoder.encode_each(pieces)), expected)

    monkeypatch.setattr(ray_encoder, "RETRIES", 1)
    with pytest.raises(ray.exceptions.RayError):
        list(encoder.encode_each([["poison"]]))
    encoder.end()
    add_node(nodes)


@pytest.mark.slow
def test_actors_encode_with_the_prompt_of_each_task(
    tiny_bert_dir: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> SentenceEncoder:
        prompts = {"query": "ka ", "document": "bo "}
        return SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", prompts=prompts)

    texts = [source for source, _ in PAIRS]
    expected = {task: load().for_task(task).encode(texts) for task in ("query", "document")}
    encoder = ClusterEncoder(load, Cluster(nodes.address))
    monkeypatch.delattr(SentenceEncoder, "encode")  # in this process
    for task, vectors in expected.items():
        assert_array_equal(encoder.for_task(task).encode(texts), vectors)
    encoder.end()


@pytest.mark.slow
def test_encoders_fit_on_nodes_and_have_the_model_of_the_command(
    tiny_bert_dir: Path, nodes: object
) -> None:
    def load(pooling: str = "mean") -> SentenceEncoder:
        return SentenceEncoder.from_pretrained(str(tiny_bert_dir), pooling)  # nodes lack conftest

    wide = Cluster(nodes.address, ray_cpus_per_actor=2)
    with pytest.raises(UserError, match="no node of the Ray cluster has room"):
        ClusterEncoder(load, wide)  # the two CPUs are on different nodes
    added = add_node(nodes, cpus=2)
    here = os.getpid()
    encoder = ClusterEncoder(lambda: load("cls" if os.getpid() == here else "mean"), wide)
    assert len(encoder.actors) == 1  # though there are four CPUs
    with pytest.raises(UserError, match="another model than this process"):
        encoder.encode(["a"])
    encoder.end()
    nodes.remove_node(added, allow_graceful=False)


# ---------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("cpus", [0, 2, 4])  # none: no node has joined yet
def test_equal_scores_keep_the_lowest_index_in_any_order_of_tiles(
    cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(cpus)
    kinds = generator.standard_normal((12, 4)).astype(np.float32)
    # In blocks of four rows, the products have equal rounding.
    source, target = (kinds[generator.integers(0, 12, size)] for size in (72, 52))
    ended = []  # results of tiles, which are fetched in random order

    def remote(function: Callable) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *tile: ended.append(function(*tile)) or len(ended) - 1)

    cluster = SimpleNamespace(
        cluster_resources=lambda: {"CPU": cpus},
        put=lambda array: array,
        remote=lambda **_: remote,
        wait=lambda running: ([generator.choice(running)], None),
        get=ended.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setitem(TILES, "CPU", 8)
    assert_equal(cluster_neighbours(source, target, 8), mutual_neighbours(source, target, 8))
    # More than k rows, but not two strips of k rows.
    few = source[:9], target[:15]
    assert_equal(cluster_neighbours(*few, 8), mutual_neighbours(*few, 8))


@pytest.mark.slow
def test_lost_workers_and_nodes_change_no_neighbour(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TILES, "CPU", 4096)
    generator = np.random.default_rng(0)
    source, target = (generator.standard_normal((rows, 8), np.float32) for rows in (9000, 5000))
    target[2500::7] = target[3]  # equal scores far from each other
    expected = mutual_neighbours(source, target)

    # The first two workers die.

    def search_or_die(*tile: object) -> object:
        if len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mutual_neighbours(*tile)

    # A node dies with the tiles that run there.
    merge = ray_search._merge
    merged = []

    def lose_node_at_third_tile(*arguments: object) -> None:
        merged.append(merge(*arguments))
        if len(merged) == 5:
            lose_node(nodes)

    monkeypatch.setattr(ray_search, "mutual_neighbours", search_or_die)
    monkeypatch.setattr(ray_search, "_merge", lose_node_at_third_tile)
    assert_equal(cluster_neighbours(source, target), expected)
    assert len(list(tmp_path.iterdir())) >= 2
    assert not nodes.worker_nodes
