"""Hear what shards and workers of a cluster say to each other, and what becomes of statistics."""

from collections import Counter

from shoestring.model.statistics import History, Statistics, unpack
from shoestring.wire import messages as say
from tests.unit.model.test_statistics import reference
from tests.unit.worker.cluster import Cluster


def histories(cluster: Cluster) -> dict[int, History]:
    """What the shards hold of each part that has layers."""
    holdings = [rounds.holding for shard in cluster.shards for rounds in shard.parts.values()]
    return {own.part.index: own.history for own in holdings if own.history.layers}


class Listener:
    """Hears what shards and workers say to each other; what is said twice counts once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pushes: dict[tuple[int, int, int], say.Push] = {}  # by part, round and worker
        self.answers: dict[tuple[int, int, int], say.Message] = {}
        self.others: Counter[str] = Counter()
        for shard in cluster.shards:
            self._listen(shard)

    def _listen(self, shard) -> None:
        handle, send = shard.handle, shard._send

        def hear(sender, message, payload, now):
            if isinstance(message, say.Push):
                self.pushes[message.part, message.seq, message.worker] = message
            elif not isinstance(message, say.Beat | say.Ask | say.Leave):  # which come with time, or too late
                self.others[type(message).__name__] += 1
            handle(sender, message, payload, now)

        def tell(identity, message, *payload):
            if isinstance(message, say.Full | say.Delta):
                worker = int(identity.partition(b".")[0])
                self.answers[message.part, message.seq, worker] = message
            elif not isinstance(message, say.Beat | say.Missing | say.Left):
                self.others[type(message).__name__] += 1
            send(identity, message, *payload)

        shard.handle, shard._send = hear, tell

    def seen(self, part: int, seq: int) -> list[Statistics]:
        """What the workers sent of a part in a round, in their order."""
        layers = self.histories()[part].layers
        keys = sorted(key for key in self.pushes if key[:2] == (part, seq))
        return [unpack(self.pushes[key].statistics, layers) for key in keys]

    def histories(self) -> dict[int, History]:
        return histories(self.cluster)

    def check(self) -> None:
        """The shards' sums are those of all that was pushed in whole rounds, to the last bit.

        Call it when the cluster is closed: with a delay the last round ends after the workers.
        """
        versions = {
            rounds.holding.part.index: rounds.holding.version
            for shard in self.cluster.shards
            for rounds in shard.parts.values()
        }
        for part, history in self.histories().items():
            batches = [self.seen(part, seq) for seq in range(1, versions[part] + 1)]
            assert history.sums.tolist() == reference(
                history.layers, [(those, 1 / len(those)) for those in batches]
            )
