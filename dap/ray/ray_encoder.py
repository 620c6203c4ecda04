"""Encoding by the actors of a Ray cluster, each with a copy of the model."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap.encoding.embeddings import Encoder, SentenceError, encode_pieces, model_fingerprint
from dap.encoding.encoder_arguments import EncoderArguments
from dap.errors import UserError, one_line
from dap.ray.connection import RETRIES, ClusterArguments, duration

#: Sentences of a text that show the rate of an encoder.
SAMPLE = 128
#: Encoders that may be lost at the same sentences, before these are given up.
LOSSES = 3
#: Seconds without news before it is asked whether there is a node yet that could bring some.
WAIT = 10
Jobs = dict[
    Any, tuple[Any, int | None]
]  # what an actor does -> the actor, and the piece's number; None: it begins


def load_on(cluster: ClusterArguments, arguments: EncoderArguments) -> "Encoder | ClusterEncoder":
    """The encoder: on the cluster, to which this process is connected, where one is asked for."""
    encoder = arguments.load()
    return ClusterEncoder(encoder, arguments, cluster) if cluster.ray else encoder


class EncoderActor:
    """An encoder on a node: what the arguments load there."""

    def __init__(self, arguments: EncoderArguments) -> None:
        self.encoder = arguments.load()
        self.own = model_fingerprint(self.encoder)

    def fingerprint(self) -> str:
        return self.own

    def encode(self, piece: Sequence[str], token_budget: int) -> np.ndarray:
        return self.encoder.encode(piece, token_budget)


class ClusterEncoder:
    """An encoder whose sentences actors encode, each with a copy of the model; all else it asks of `encoder`.

    Args:
        encoder: the one of this process.
        arguments: what the actors load.
        cluster: how many there are; the cluster is connected.

    Raises:
        ValueError: the cluster has no room for an actor.
    """

    def __init__(
        self, encoder: Encoder, arguments: EncoderArguments, cluster: ClusterArguments
    ) -> None:
        import ray

        self.encoder, self.fingerprint = encoder, model_fingerprint(encoder)
        self.needs = {
            "CPU": cluster.ray_cpus_per_actor,
            "GPU": int(ray.cluster_resources().get("GPU", 0) > 0),
        }
        fit, most = self._room()
        count = cluster.ray_actors or max(fit, 1)
        if count > fit:
            raise UserError(
                f"--ray_actors {count} with --ray_cpus_per_actor {cluster.ray_cpus_per_actor}: the cluster has room "
                f"for {fit}, a node at most {most}; ask for fewer, or add nodes"
            )
        actor = ray.remote(num_cpus=self.needs["CPU"], num_gpus=self.needs["GPU"], max_restarts=0)(
            EncoderActor
        )
        self._begin = partial(actor.remote, arguments)
        self.actors = [self._begin() for _ in range(count)]

    def plan(self, texts: Sequence[Sequence[str]], token_budget: int) -> tuple[str, float]:
        """What it takes to encode the texts, at the rate that an encoder shows now: in words, and in seconds."""
        sample = [
            text[row] for text in texts for row in range(0, len(text), -(-len(text) // SAMPLE) or 1)
        ]
        self.encode(sample[:1], token_budget)  # an encoder has begun
        started = time.perf_counter()
        self.encode(sample, token_budget)
        rate, count = len(sample) / (time.perf_counter() - started), sum(map(len, texts))
        seconds = count / rate / len(self.actors)
        words = f"{count:,} sentences on {len(self.actors)} encoders: {duration(seconds)}"
        return f"{words} at {rate:,.0f} sentences a second each", seconds

    def _room(self) -> tuple[int, str]:
        """How many actors there is room for on the living nodes, and the most that one of these has."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = {kind: amount for kind, amount in self.needs.items() if amount}
        fit = sum(
            min(int(node.get(kind, 0) // amount) for kind, amount in needs.items())
            for node in nodes
        )
        return fit, " and ".join(
            f"{max(node.get(kind, 0) for node in nodes):g} {kind}s" for kind in needs
        )

    def end(self) -> None:
        """End the actors: their CPUs and GPUs are free for other tasks, which would wait for them for ever."""
        import ray

        for actor in self.actors:
            ray.kill(actor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def encode_each(
        self, pieces: Sequence[Sequence[str]], token_budget: int
    ) -> Iterator[np.ndarray]:
        """The vectors (n, D) of each piece, in order.

        The piece of a lost actor goes to another one, and a new actor takes part once there is room for it.

        Raises:
            SentenceError: a piece that cannot be encoded, or whose actors are always lost.
            ValueError: there is no room for any actor, or another model on a node.
        """
        import ray

        todo, idle, found, losses, due = deque(range(len(pieces))), [], {}, Counter(), 0
        jobs = _beginning(self.actors)
        while due < len(pieces):
            while todo and idle:
                actor, number = idle.pop(), todo.popleft()
                jobs[actor.encode.remote(pieces[number], token_budget)] = actor, number
            actor, number, outcome = self._next(jobs, pieces)
            if isinstance(outcome, ray.exceptions.RayError):
                losses[number] += 1
                _require_few(losses[number], outcome, None if number is None else pieces[number])
                todo.extendleft([] if number is None else [number])
                ray.kill(actor)  # it may be no more than out of reach
                self.actors[self.actors.index(actor)] = new = (
                    self._begin()
                )  # once there is room for it
                jobs |= _beginning([*idle, new])  # the idle ones may be lost with it
                idle.clear()
                continue
            idle.append(actor)
            losses.pop(None, None)
            if number is None:
                self._require_same(outcome)
            else:
                found[number] = outcome
            while due in found:
                yield found.pop(due)
                due += 1

    def _next(self, jobs: Jobs, pieces: Sequence[Sequence[str]]) -> tuple[Any, int | None, Any]:
        """The actor that is done next, with what, and what came of it; or Ray's error where the actor is lost."""
        import ray

        while not (ended := ray.wait([*jobs], timeout=WAIT)[0]):
            if all(number is None for _, number in jobs.values()) and not self._room()[0]:
                raise UserError(
                    "no node is left with room for an encoder: add nodes, then run again to go on"
                )
        actor, number = jobs.pop(ended[0])
        try:
            return actor, number, ray.get(ended[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError):
                raise
            reason = f"{type(error.cause).__name__}: {one_line(error.cause)}"
            raise SentenceError(f"{_named(pieces[number])} cannot be encoded ({reason})") from error
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise
            return actor, number, error

    def _require_same(self, fingerprint: str) -> None:
        if fingerprint != self.fingerprint:
            raise UserError(
                f"an encoder of the cluster has another model than this process (fingerprint {fingerprint[:12]}, here "
                f"{self.fingerprint[:12]}): give all nodes the same files, and the same version of Transformers"
            )

    def encode(
        self, sentences: Sequence[str], token_budget: int = 4096, progress: bool = False
    ) -> np.ndarray:
        """The sentences' vectors, (N, D), as the encoder's own `encode`."""
        if not len(sentences):
            return self.encoder.encode([])
        with tqdm(
            total=len(sentences), desc="encoding", unit=" sentences", disable=not progress
        ) as bar:
            return encode_pieces(self, sentences, token_budget, bar)


def _beginning(actors: Iterable[Any]) -> Jobs:
    return {actor.fingerprint.remote(): (actor, None) for actor in actors}


def _require_few(losses: int, last: Exception, piece: Sequence[str] | None) -> None:
    """Raises where too many actors were lost one after the other: at a piece, or else before they had begun."""
    if piece is None and losses > RETRIES:
        raise last
    if piece is not None and losses >= LOSSES:
        raise SentenceError(
            f"{_named(piece)}: {losses} encoders were lost at them, perhaps for want of memory: give a smaller "
            "--token_budget or --max_seq_length, or leave out what is too long"
        ) from last


def _named(piece: Sequence[str]) -> str:
    return f"{len(piece)} sentences, the longest {max(piece, key=len)[:60]!r}"
