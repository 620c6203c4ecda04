"""An encoder on a Ray cluster: actors, each of which holds a copy of the model, encode for it.

An actor is a process of Ray that stays alive between calls. A piece is a list of sentences that one
actor encodes in one call.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import (
    SentenceError,
    encode_pieces,
    model_fingerprint,
)
from dap_transformers.errors import UserError, counted, one_line
from dap_transformers.ray.connection import RETRIES, Cluster

#: How many actors may be lost at the same piece before the piece is given up.
LOSSES = 3
#: Seconds to wait for an actor before checking whether any node has room for one.
WAIT = 10

#: Running call of an actor -> the actor and the number of its piece. The number is None while the
#: actor starts.
Jobs = dict[Any, tuple[Any, int | None]]


class EncoderActor:
    """The class of the actors: an encoder on a node of the cluster."""

    def __init__(self, load: Callable[[], SentenceEncoder]) -> None:
        self.encoder = load()

    def fingerprint(self) -> str:
        """Return a hash of the encoder's model and settings (`model_fingerprint`)."""
        return model_fingerprint(self.encoder)

    def encode(self, piece: Sequence[str], token_budget: int) -> tuple[np.ndarray, int]:
        """Return the vectors (n, D) of the piece's n sentences, and how many of them were cut."""
        self.encoder.cut = 0
        return self.encoder.encode(piece, token_budget), self.encoder.cut


class ClusterEncoder:
    """An encoder whose sentences are encoded by actors of a connected cluster that called `load`.

    Attributes that this class lacks, such as `pooling`, are taken from `encoder`, the model of this
    process. Actors must have the same model. If the cluster has GPUs, each actor gets one. End the
    actors afterwards (`end`).
    """

    def __init__(self, load: Callable[[], SentenceEncoder], cluster: Cluster) -> None:
        import ray

        self.encoder = load()
        self.fingerprint = model_fingerprint(self.encoder)
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.needs = {"CPU": cluster.ray_cpus_per_actor, "GPU": int(has_gpus)}
        options = {"num_cpus": self.needs["CPU"], "num_gpus": self.needs["GPU"], "max_restarts": 0}
        self._actor_class = ray.remote(**options)(EncoderActor)
        self._load = load
        self.actors = [self._start_actor() for _ in range(max(self._room(), 1))]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def _start_actor(self) -> Any:
        """Return Ray's handle of a new actor, which starts as soon as a node has room for it."""
        return self._actor_class.remote(self._load)

    def _room(self) -> int:
        """Return how many actors fit on the cluster's living nodes, if nothing else runs there."""
        import ray

        room = 0
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            room += min(resources.get(kind, 0) // need for kind, need in self.needs.items() if need)
        return int(room)

    def end(self) -> None:
        """End all actors. Later tasks would otherwise wait forever for their CPUs and GPUs."""
        import ray

        for actor in self.actors:
            ray.kill(actor)

    def encode(
        self, sentences: Sequence[str], token_budget: int = 4096, progress: bool = False
    ) -> np.ndarray:
        """Return the vectors (N, D) of N sentences, as `SentenceEncoder.encode`."""
        if not len(sentences):
            return self.encoder.encode([])
        with tqdm(
            total=len(sentences), desc="encoding", unit=" sentences", disable=not progress
        ) as bar:
            return encode_pieces(self, sentences, token_budget, bar)

    def encode_each(
        self, pieces: Sequence[Sequence[str]], token_budget: int
    ) -> Iterator[np.ndarray]:
        """Encode pieces on the actors, several at a time, and yield their vectors (n, D) in order.

        If an actor is lost, another one encodes its piece, and a new actor starts once a node has
        room for it.
        """
        import ray

        waiting = deque(range(len(pieces)))  # numbers of the pieces that no actor has yet
        idle: list[Any] = []
        losses: Counter[int | None] = Counter()  # by piece, None: while the actor started
        results: dict[int, np.ndarray] = {}  # pieces that came before their turn
        due = 0  # number of the piece to yield next
        jobs = _starting(self.actors)
        while due < len(pieces):
            while waiting and idle:
                actor = idle.pop()
                number = waiting.popleft()
                jobs[actor.encode.remote(pieces[number], token_budget)] = actor, number
            actor, number, outcome = self._next_outcome(jobs, pieces)

            if isinstance(outcome, ray.exceptions.RayError):
                losses[number] += 1
                if number is None and losses[None] > RETRIES:
                    raise outcome
                if number is not None:
                    _require_few_losses(losses[number], pieces[number])
                    waiting.appendleft(number)
                new = self._replace(actor)
                # The idle actors may be lost with the same node: ask them again whether they live.
                jobs |= _starting([*idle, new])
                idle.clear()
                continue

            idle.append(actor)
            losses.pop(None, None)
            if number is None:
                if outcome != self.fingerprint:
                    raise UserError(
                        "an encoder of the cluster has another model than this process "
                        f"(fingerprint {outcome[:12]}, here {self.fingerprint[:12]}): give all "
                        "nodes the same files, and the same version of Transformers"
                    )
            else:
                results[number], cut = outcome
                self.encoder.cut += cut
            while due in results:
                yield results.pop(due)
                due += 1

    def _replace(self, actor: Any) -> Any:
        """Kill a lost actor, and start and return a new one, which takes its place in `actors`."""
        import ray

        ray.kill(actor)  # it may still live and only be out of reach
        new = self._start_actor()
        self.actors[self.actors.index(actor)] = new
        return new

    def _next_outcome(
        self, jobs: Jobs, pieces: Sequence[Sequence[str]]
    ) -> tuple[Any, int | None, Any]:
        """Wait for the next job that ends, and remove it from `jobs`. Return actor, piece, outcome.

        The outcome is what `encode` returned, or Ray's error if the actor is lost. If the actor has
        just started, the piece is None, and the outcome is the fingerprint of its model.
        """
        import ray

        ended, _ = ray.wait([*jobs], timeout=WAIT)
        while not ended:
            is_any_alive = any(number is not None for _, number in jobs.values())
            if not is_any_alive and not self._room():
                raise UserError(
                    "no node is left with room for an encoder: add nodes, then run again to resume"
                )
            ended, _ = ray.wait([*jobs], timeout=WAIT)
        actor, number = jobs.pop(ended[0])
        try:
            return actor, number, ray.get(ended[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError):
                raise
            reason = f"{type(error.cause).__name__}: {one_line(error.cause)}"
            raise SentenceError(
                f"{_piece_name(pieces[number])} cannot be encoded ({reason})"
            ) from error
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise
            return actor, number, error


def _starting(actors: Iterable[Any]) -> Jobs:
    """Ask actors for the fingerprint of their model. They answer once they have loaded it."""
    return {actor.fingerprint.remote(): (actor, None) for actor in actors}


def _require_few_losses(losses: int, piece: Sequence[str]) -> None:
    """Raise `SentenceError` if too many actors were lost at the same piece."""
    if losses >= LOSSES:
        raise SentenceError(
            f"{_piece_name(piece)}: {counted(losses, 'encoder')} stopped there, perhaps because "
            "memory ran out: give a smaller token budget or maximum length, or leave out what is "
            "too long"
        )


def _piece_name(piece: Sequence[str]) -> str:
    """Return what error messages call a piece: its number of sentences and its longest one."""
    longest = max(piece, key=len)
    return f"{counted(len(piece), 'sentence')}, the longest {longest[:60]!r}"
