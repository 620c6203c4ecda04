"""Encoding by the actors of a Ray cluster, each with a copy of the model."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap.cluster import RETRIES, ClusterArguments, EncoderActor
from dap.encoding.arguments import EncoderArguments
from dap.encoding.embeddings import Encoder, pieces_by_length
from dap.errors import UserError


def load_on(cluster: ClusterArguments, arguments: EncoderArguments) -> "Encoder | ClusterEncoder":
    """The encoder: on the cluster, to which this process is connected, where one is asked for."""
    encoder = arguments.load()
    return ClusterEncoder(encoder, arguments, cluster) if cluster.ray else encoder


class ClusterEncoder:
    """An encoder whose sentences are encoded by actors, each with a copy of the model; else it is that encoder.

    Args:
        encoder: the one of this process.
        arguments: what the actors load.
        cluster: how many there are; the cluster is connected.

    Raises:
        ValueError: the cluster has no room for an actor.
    """

    def __init__(self, encoder: Encoder, arguments: EncoderArguments, cluster: ClusterArguments) -> None:
        import ray
        from ray.util import ActorPool

        self.encoder, there = encoder, ray.cluster_resources()
        gpus, cpus = int(there.get("GPU", 0)), cluster.ray_cpus_per_actor
        fit = gpus or int(there.get("CPU", 0)) // cpus
        count = cluster.ray_actors or fit
        if not 1 <= count <= fit:
            has = f"the cluster has {there.get('CPU', 0):g} CPUs and {gpus} GPUs, room for {fit}"
            raise UserError(f"--ray_actors {count} with {cpus} CPUs each: {has}; ask for fewer, or add nodes")
        options = {"num_cpus": cpus, "num_gpus": 1 if gpus else 0, "max_restarts": -1, "max_task_retries": RETRIES}
        actor = ray.remote(**options)(EncoderActor)
        self.actors = [actor.remote(arguments) for _ in range(count)]
        self.pool = ActorPool(self.actors)

    def end(self) -> None:
        """End the actors: their CPUs and GPUs are free for other tasks, which would wait for them for ever."""
        import ray

        for actor in self.actors:
            ray.kill(actor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def encode_each(self, pieces: Iterable[Sequence[str]], token_budget: int) -> Iterator[np.ndarray]:
        """The vectors (n, D) of each piece, in order."""
        return self.pool.map(lambda actor, piece: actor.encode.remote(piece, token_budget), pieces)

    def encode(self, sentences: Sequence[str], token_budget: int = 4096, progress: bool = False) -> np.ndarray:
        """The sentences' vectors, (N, D), as the encoder's own `encode`."""
        pieces, back = pieces_by_length(sentences)
        bar = tqdm(total=len(sentences), desc="encoding", unit=" sentences", disable=not progress)
        found = []
        with bar:
            for vectors in self.encode_each(pieces, token_budget):
                found.append(vectors)
                bar.update(len(vectors))
        return np.concatenate(found)[back] if found else self.encoder.encode([])
