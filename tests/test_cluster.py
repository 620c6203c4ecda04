"""The commands on a local Ray cluster of two nodes: what one process gives, whatever is lost on the way."""

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import synthetic_pairs

import eval_retrieval
import mine_bitext
import prepare_data
from dap.cluster import ClusterArguments, connected
from dap.encoding import ClusterEncoder, EncoderArguments, embeddings
from dap.errors import UserError
from dap.prepare.pipeline import workers
from dap.search import TILES, cluster, cluster_neighbours, mutual_neighbours, recall_at_k
from dap.search.approximate import built_index

HEALTH = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3}
os.environ |= {f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()}  # read when Ray is loaded
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
    with connected(nodes.address):
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
    source, target = (generator.standard_normal((count, 8)).astype(np.float32) for count in (rows, columns))
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
    (tmp_path / "de-en.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))

    def outcome(name: str, *more: str) -> tuple[bytes, list[str], dict]:
        out = tmp_path / f"{name}.tsv"
        report = eval_retrieval.run([*model, "--data_dir", str(tmp_path / "de-en.tsv"), *more])
        mine_bitext.run([*text, *model, "--shard_size", "25", "--output", str(out), *more])
        shards = sorted(path.name for path in Path(f"{out}.embeddings").rglob("*.npy"))  # either goes on with these
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
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "two.tsv.embeddings").rglob("*.npy")}
    assert outcome("two", "--ray", nodes.address) == expected
    assert len(finished) == 2
    assert all(path.stat().st_mtime_ns == made for path, made in finished.items())  # not encoded again
    said = capsys.readouterr().out
    plan = (
        r"plan: 120 sentences, 6 shards, 1 encoders: (\S+) s at ([\d,]+) sentences a second each; 1 search tasks of "
        r"about 48 MiB on 2 CPUs: \S+ s for 2\.3e\+05 FLOPs at \S+ a second each, 0\.0 GiB to move"
    )
    seconds, rate = (float(each.replace(",", "")) for each in re.search(plan, said).groups())
    assert seconds == pytest.approx(120 / rate, rel=0.1)


def test_text_is_prepared_as_in_one_process_and_damaged_files_are_left_for_another_run(
    tmp_path: Path, nodes: object
) -> None:
    raw, languages = tmp_path / "raw", ("de", "fi", "sw")
    raw.mkdir()
    for language in languages:
        pairs = "".join(f"{source}\t{target}\n" for source, target in synthetic_pairs(language, 30))
        (raw / f"{language}-en.tsv").write_text(pairs)
    (tmp_path / "test.en").write_text(f"{PAIRS[5][1]}\n")
    given = ["--data", str(raw), "--evaluation_data", str(tmp_path / "test.en"), "--max_shared", "2"]

    def result(name: str, *more: str) -> dict[str, bytes]:
        out = tmp_path / name
        report = prepare_data.run([*given, "--dev_pairs", "2", "--output_dir", str(out), *more])
        files = (path for path in out.rglob("*") if path.is_file() and path.name != "report.json")
        return {str(path.relative_to(out)): path.read_bytes() for path in files} | report["languages"]

    expected = result("one")
    damaged = {raw / f"{language}-en.tsv": "one column\n" for language in languages[:2]}
    whole = {path: path.read_text() for path in damaged}
    for path, text in damaged.items():
        path.write_text(text + whole[path])
    for where in (["--ray", nodes.address], []):  # the second goes on behind the first
        with pytest.raises(UserError, match=r"^2 fail: .*/de-en.tsv: 1 of the .*; .*/fi-en.tsv: 1 of the "):
            result("two", *where)
    (cleaned,) = (tmp_path / "two/.prepare_data").glob("clean-*")
    for path, text in whole.items():
        path.write_text(text)
    assert result("two", "--ray", nodes.address) == expected


def test_a_file_whose_worker_is_always_lost_is_named_and_the_others_are_done(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap.cluster.RETRIES", 1)

    def lost(folder: Path, times: int) -> None:
        begun = len(list(folder.iterdir()))
        (folder / str(begun)).touch()
        if begun < times:
            os.kill(os.getpid(), signal.SIGKILL)

    calls = {name: (tmp_path / name, times) for name, times in (("a, de", 9), ("b, de", 1), ("c, de", 0))}
    for folder, _ in calls.values():
        folder.mkdir()
    said = r"^a, de: its worker was lost 2 times, perhaps for want of memory$"
    with workers(1, on_cluster=True) as run, pytest.raises(UserError, match=said):
        run("clean", lost, calls)
    assert [len(list(folder.iterdir())) for folder, _ in calls.values()] == [2, 2, 1]


def test_what_a_cluster_cannot_do_is_said_in_a_line(
    text: list[str], tiny_bert_dir: Path, tmp_path: Path, nodes: object
) -> None:
    mining = [*text, "--model", str(tiny_bert_dir), "--pooling", "mean", "--output", str(tmp_path / "pairs.tsv")]
    for more, said in (
        (["--ray_actors", "2"], "--ray_actors 2 is for a cluster: name it with --ray"),
        (["--ray", nodes.address, "--ray_actors", "0"], "--ray_actors 0: at least 1"),
        (["--ray", nodes.address, "--ray_actors", "9"], "--ray_actors 9 with 1 CPUs each: the cluster has 2 CPUs"),
    ):
        with pytest.raises(UserError, match=said):
            mine_bitext.run([*mining, *more])
    with pytest.raises(UserError, match="target: row 2 .* has NaN"):
        cluster_neighbours(np.ones((3, 2)), np.array([[1.0, 1], [1, 1], [1, np.nan]]), k=1)

    class Refusing:
        def __init__(self, reason: str = "no such model") -> None:
            raise UserError(reason)

    with pytest.raises(UserError, match=r"^keys: row 2$"), connected(nodes.address):
        ray.get(ray.remote(num_cpus=0)(lambda: Refusing("keys: row 2")).remote())
    with pytest.raises(UserError, match=r"^--ray .*: no such model; run again to go on$"), connected(nodes.address):
        ray.get(ray.remote(num_cpus=0)(Refusing).remote().__ray_ready__.remote())


def test_a_killed_encoder_begins_again(nodes: object) -> None:
    class Letters:
        """An encoder of no model, and what loads it: a letter's share of the sentence, a dimension a letter."""

        def load(self) -> "Letters":
            return self

        def encode(self, sentences: Sequence[str], token_budget: int = 0) -> np.ndarray:
            return np.array([[text.count(letter) / len(text) for letter in "abcde"] for text in sentences])

    sentences = [pair[0] for pair in PAIRS]
    encoder = ClusterEncoder(Letters(), Letters(), ClusterArguments(nodes.address, ray_actors=1))
    actor = encoder.pool.pop_idle()
    end = actor.__ray_call__.options(max_task_retries=0).remote(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(end)
    encoder.pool.push(actor)
    np.testing.assert_array_equal(encoder.encode(sentences), Letters().encode(sentences))
    encoder.end()


def test_an_approximate_search_builds_an_index_of_each_strip_once(
    tmp_path: Path, nodes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(keys: np.ndarray, index: str) -> np.ndarray:
        tempfile.mkstemp(dir=tmp_path)
        return built_index(keys, index)

    monkeypatch.setattr(cluster, "built_index", counted)
    monkeypatch.setattr(cluster, "BAND", 2)
    monkeypatch.setitem(TILES, "CPU", 64)
    source, target = sides(200, 299)
    target = target[:149]  # all different
    found = cluster_neighbours(source, target, index="IVF4,Flat:nprobe=4")  # it visits all lists
    assert len(list(tmp_path.iterdir())) == 4 + 3
    exact = mutual_neighbours(source, target)
    np.testing.assert_array_equal(found.forward_indices, exact.forward_indices)
    np.testing.assert_array_equal(found.backward_indices, exact.backward_indices)
    np.testing.assert_allclose(found.forward_scores, exact.forward_scores, rtol=1e-5)
    monkeypatch.setattr("dap.search.plan.TASKS", 1)  # tiles of an exact search would be wider on one CPU
    index = "IVF4,Flat:nprobe=1"
    found = cluster_neighbours(source, target, index=index)
    assert 0.5 < recall_at_k(found, source, target) < 1
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    require_equal(cluster_neighbours(source, target, index=index), found)


def test_a_lost_node_changes_no_neighbour(nodes: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILES, "CPU", 4096)  # a block of the search
    monkeypatch.setattr(cluster, "BAND", 2)
    source, target = sides(9000, 5000)
    expected = mutual_neighbours(source, target)
    ahead = cluster._ahead

    def lossy(jobs: Iterator, most: int) -> Iterator:
        for number, job in enumerate(ahead(jobs, most)):
            if number == 2:  # the node holds what is merged so far
                nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)
            yield job

    monkeypatch.setattr(cluster, "_ahead", lossy)
    require_equal(cluster_neighbours(source, target), expected)
    monkeypatch.undo()
    require_equal(cluster_neighbours(source[:3], target[:2], k=2), mutual_neighbours(source[:3], target[:2], k=2))
