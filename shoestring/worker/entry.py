"""Enter a run with the table of a model: open connections to all shards and take what they hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from shoestring.model.parts import Part, assign
from shoestring.model.table import Table
from shoestring.model.vectors import PARAMS
from shoestring.worker.exchange import Exchange
from shoestring.worker.memory import SharedMemory
from shoestring.worker.protocol.joining import Identity
from shoestring.worker.protocol.worker import Answer, Worker
from shoestring.worker.session import Session


@dataclass(frozen=True)
class Entry:
    """This worker's place among the shards."""

    model: int
    exchange: Exchange
    homes: tuple[int, ...]  # the shard of each part
    shards: int
    first_round: int

    def loads(self, parts: Sequence[Part]) -> list[int]:
        """How many values each shard holds."""
        loads = [0] * self.shards
        for home, part in zip(self.homes, parts, strict=True):
            loads[home] += part.size
        return loads


def enter(
    here: Session,
    model: int,
    table: Table,
    parts: Sequence[Part],
    *,
    initial: Callable[[int], memoryview],
    names: tuple[str, ...] = (PARAMS,),
    take: Callable[[Answer], None],
) -> Entry:
    """Join all shards with the model of this number.

    `initial` gives a part as this worker has it, the vectors of these names; `take` gets each as the
    shards hold it.
    """
    run = here.run
    sockets = here.connect(model)
    addresses = [address for address, _ in sockets]
    homes = assign(parts, len(sockets))
    sizes = [part.size for part in parts]
    memory = SharedMemory(addresses, homes, sizes)

    def protocol(now: float) -> Worker:
        return Worker(
            Identity(run.name, run.worker, run.workers, here.life, run.incarnation),
            memoryview(msgspec.msgpack.encode(table)),
            homes,
            sizes,
            addresses,
            initial=initial,
            names=names,
            memory=memory,
            clip_norm=table.clip_norm,
            timeout_s=run.timeout_s,
            join_timeout_s=run.join_timeout_s,
            ask_after_s=run.ask_after_s,
            now=now,
        )

    exchange = Exchange(sockets, sizes, protocol, memory, notice=here.notice)
    here.closers.append(exchange.close)
    return Entry(model, exchange, homes, len(sockets), exchange.enter(take))
