"""Choose Ray nodes for a run's shards and workers, by placement groups.

Shards come first, on nodes of their own where there are enough; workers are spread. The
groups are Ray's: what a run was given nobody else gets, and all of it is given back together.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoestring.errors import UsageError
from shoestring.launch.ray.cluster import Cluster, Node, core_share

_LOOK_S = 5.0  # a node may have gone since it was counted


@dataclass(frozen=True)
class Places:
    """The nodes of a run's shards and workers, reserved until `close`."""

    cluster: Cluster
    shards: tuple[Node, ...]
    workers: tuple[Node, ...]
    cpus: float  # of a worker
    shard_cpus: float
    gpus: float  # of a worker
    groups: tuple[Any, Any]

    @property
    def nodes(self) -> set[str]:
        return {node.id for node in (*self.shards, *self.workers)}

    def shard_options(self, index: int) -> dict[str, Any]:
        """What makes an actor take the place of a shard."""
        return {"num_cpus": self.shard_cpus, "scheduling_strategy": self._strategy(0, index)}

    def worker_options(self, index: int) -> dict[str, Any]:
        """What makes an actor take the place of a worker."""
        return {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "scheduling_strategy": self._strategy(1, index),
        }

    def close(self) -> None:
        """Give the places back."""
        for group in self.groups:
            _remove(self.cluster, group)

    def _strategy(self, group: int, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.groups[group], placement_group_bundle_index=index)


def place(
    cluster: Cluster,
    workers: int,
    shards: int | None,
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    timeout_s: float,
) -> Places:
    """Reserve places for so many workers and shards; wait for them, as others may use the cluster.

    By default there is a shard on every node, but not more than workers; a worker asks for a GPU
    where the cluster has any.
    """
    from ray.util.placement_group import placement_group

    deadline = time.monotonic() + timeout_s
    while True:
        nodes = cluster.nodes()
        if not nodes:
            raise UsageError("no node of the Ray cluster has a core to give", hint="add nodes to it")
        count = shards or min(len(nodes), workers)
        share = core_share(nodes, workers + count)
        own_cpus = share if cpus is None else cpus
        own_gpus = float(any(node.gpus for node in nodes)) if gpus is None else gpus
        for_shards = placement_group(
            [{"CPU": share}] * count, strategy="STRICT_SPREAD" if count <= len(nodes) else "SPREAD"
        )
        wanted = {"CPU": own_cpus, "GPU": own_gpus}
        for_workers = placement_group(
            [{name: amount for name, amount in wanted.items() if amount}] * workers, strategy="SPREAD"
        )
        groups = (for_shards, for_workers)
        try:
            if _wait(cluster, groups, [node.id for node in nodes], deadline):
                by_id = {node.id: node for node in cluster.nodes()}
                found = [[by_id.get(id) for id in _node_ids(group)] for group in groups]
                shard_nodes, worker_nodes = ([n for n in own if n is not None] for own in found)
                if (len(shard_nodes), len(worker_nodes)) == (count, workers):
                    return Places(
                        cluster, tuple(shard_nodes), tuple(worker_nodes), own_cpus, share, own_gpus, groups
                    )
        except BaseException:
            for group in groups:
                _remove(cluster, group)
            raise
        for group in groups:
            _remove(cluster, group)
        if time.monotonic() > deadline:
            raise UsageError(
                f"the Ray cluster had no room within {timeout_s:g} s for {count} shards with {share:g} CPUs "
                f"each and {workers} workers with {own_cpus:g} CPUs and {own_gpus:g} GPUs each",
                hint="see `ray status`; ask for less with `--workers`, `--cpus-per-worker` and "
                "`--gpus-per-worker`, or add nodes",
            )


def _wait(cluster: Cluster, groups: tuple[Any, Any], known: list[str], deadline: float) -> bool:
    """Wait until both groups are placed; give up when the nodes are no longer those that were counted."""
    while True:
        if all(group.wait(_LOOK_S) for group in groups):
            return True
        if time.monotonic() > deadline or [node.id for node in cluster.nodes()] != known:
            return False


def _node_ids(group: Any) -> list[str]:
    """The node of each bundle, in order."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [str(nodes[index]) for index in sorted(nodes)]


def _remove(cluster: Cluster, group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    with suppress(cluster.ray.exceptions.RayError):
        remove_placement_group(group)
