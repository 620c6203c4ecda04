"""An encoder on a Ray cluster: actors, each of which holds a copy of the model, encode for it.

An actor is a process of Ray that stays alive between calls. A piece is a list of sentences that one
actor encodes in one call.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import encode_pieces, model_fingerprint
from dap_transformers.errors import UserError
from dap_transformers.ray.connection import RETRIES, Cluster

logger = logging.getLogger(__name__)

#: Running call of an actor -> the actor and the number of its piece. The number is None while the
#: actor starts.
Jobs = dict[Any, tuple[Any, int | None]]


class EncoderActor:
    """The class of the actors: an encoder on a node of the cluster."""

    def __init__(self, load: Callable[[], SentenceEncoder]) -> None:
        self.encoder = load()
        self.loaded = model_fingerprint(self.encoder)

    def fingerprint(self) -> str:
        """Return a hash of the encoder's model and settings, as they were loaded."""
        return self.loaded

    def encode(self, piece: Sequence[str], prefix: str) -> tuple[np.ndarray, int]:
        """Return the vectors (n, D) of the piece's n sentences, and how many of them were cut."""
        self.encoder.prefix = prefix
        self.encoder.cut = 0
        return self.encoder.encode(piece), self.encoder.cut


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
        needs = {"CPU": cluster.ray_cpus_per_actor, "GPU": int(has_gpus)}
        options = {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"], "max_restarts": 0}
        self._actor_class = ray.remote(**options)(EncoderActor)
        self._load = load
        room = 0  # actors that fit on the living nodes, if nothing else runs there
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            room += int(min(resources.get(kind, 0) // need for kind, need in needs.items() if need))
        if not room:
            raise UserError(f"no node of the Ray cluster has room for an encoder: {needs}")
        self.actors = [self._start_actor() for _ in range(room)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def for_task(self, task: str) -> "ClusterEncoder":
        """Return this encoder with its prompt for a task, as `SentenceEncoder.for_task`."""
        other = object.__new__(ClusterEncoder)
        vars(other).update(vars(self), encoder=self.encoder.for_task(task))
        return other

    def _start_actor(self) -> Any:
        """Return Ray's handle of a new actor, which starts as soon as a node has room for it."""
        return self._actor_class.remote(self._load)

    def end(self) -> None:
        """End all actors. Later tasks would otherwise wait forever for their CPUs and GPUs."""
        import ray

        for actor in self.actors:
            ray.kill(actor)

    def encode(self, sentences: Sequence[str], progress: bool = False) -> np.ndarray:
        """Return the vectors (N, D) of N sentences, as `SentenceEncoder.encode`."""
        if not len(sentences):
            return self.encoder.encode([])
        with tqdm(
            total=len(sentences), desc="encoding", unit=" sentences", disable=not progress
        ) as bar:
            return encode_pieces(self, sentences, bar)

    def encode_each(self, pieces: Sequence[Sequence[str]]) -> Iterator[np.ndarray]:
        """Encode pieces on the actors, several at a time, and yield their vectors (n, D) in order.

        If an actor is lost, another one encodes its piece, and a new actor starts once a node has
        room for it. Ray's error is raised after more than `RETRIES` losses in a row.
        """
        import ray

        waiting = deque(range(len(pieces)))  # numbers of the pieces that no actor has yet
        results: dict[int, np.ndarray] = {}  # pieces that came before their turn
        losses = 0
        jobs = _starting(self.actors)
        for due in range(len(pieces)):
            while due not in results:
                (ended,), _ = ray.wait([*jobs])
                actor, number = jobs.pop(ended)
                try:
                    outcome = ray.get(ended)
                except ray.exceptions.RayTaskError:  # the encoder itself failed
                    raise
                except ray.exceptions.RayError as error:
                    losses += 1
                    if losses > RETRIES or getattr(error, "actor_init_failed", False):
                        raise
                    logger.warning("an encoder of the cluster was lost; another one goes on")
                    if number is not None:
                        waiting.appendleft(number)
                    ray.kill(actor)  # it may still live and only be out of reach
                    self.actors[self.actors.index(actor)] = self._start_actor()
                    # Idle actors may be lost with the same node: ask them again whether they live.
                    busy = [each for each, _ in jobs.values()]
                    jobs |= _starting(each for each in self.actors if each not in busy)
                    continue

                if number is None:
                    if outcome != self.fingerprint:
                        raise UserError(
                            "an encoder of the cluster has another model than this process: give "
                            "all nodes the same files, and the same version of Transformers"
                        )
                else:
                    losses = 0
                    results[number], cut = outcome
                    self.encoder.cut += cut
                if waiting:
                    number = waiting.popleft()
                    job = actor.encode.remote(pieces[number], self.encoder.prefix)
                    jobs[job] = actor, number
            yield results.pop(due)


def _starting(actors: Iterable[Any]) -> Jobs:
    """Ask actors for the fingerprint of their model. They answer once they have loaded it."""
    return {actor.fingerprint.remote(): (actor, None) for actor in actors}
