"""One round of any number of workers and shards, as a discrete-event model.

Every host carries a worker, the first ones a shard too. What takes time is a station that
serves one message after the other, in the order they come: of a worker the exchange thread
(encodes), the training thread (applies answers once everything is sent) and the I/O thread;
of a shard the I/O thread, the service thread and the update threads, one part each; of a
host its line out and its line in. A message goes on while it still comes in: its first byte
reaches the other host `latency_s` after it left, its last when both lines have carried it.
Between a worker and the shard of its own host no line is used.

Workers on hosts that hold no part are alike, so some of them move as one: such a group
takes once the time of its own stations and `weight` times that of a shard's. `groups=None`
moves every worker by itself; the results differ by less than the services of one group.

On one machine (`cores`), threads share the cores evenly. As then all of them slow down
alike, the round is the one of unlimited cores, with the clock stretched by what runs at
each moment.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.scale.costs import Costs, crowding

BEAT_S = 1.0  # how often a worker writes to every shard, whatever it does else
FRAME_BYTES, CARRIED_BYTES = 1538, 1448  # of an Ethernet frame with all that is around it, for TCP
CPU = ("encode", "apply", "worker_io", "service", "update", "shard_io")
LINK = ("link_out", "link_in")

_ENCODE, _PUSH_IO, _PUSH_OUT, _PUSH_IN, _PUSH_TAKE, _SERVE, _UPDATE = range(7)
_ANSWER, _REPLY_IO, _REPLY_OUT, _REPLY_IN, _REPLY_TAKE, _HEAR, _APPLY = range(7, 14)


@dataclass(frozen=True)
class Cluster:
    """What takes part in a round. `rate_bits_s` is that of each host's line, each way."""

    workers: int
    shards: int  # the first so many hosts carry one
    parts: tuple[int, ...]  # the values of each
    homes: tuple[int, ...]  # the shard that holds each
    rate_bits_s: float = math.inf
    latency_s: float = 50e-6
    threads: int = 4  # that a shard updates parts with
    is_one_machine: bool = False  # no beats, as they are in the prices, and every push wakes its shard

    @property
    def holders(self) -> int:
        """So many shards, the first ones, hold parts."""
        return max(self.homes, default=-1) + 1


@dataclass
class Outcome:
    """What a round took. Seconds of stations are those of the busiest of their kind."""

    round_s: float
    busy_s: dict[str, float]
    shard_s: float  # processor seconds of the busiest shard, all its threads
    sent_bytes: list[float]  # that left each host of a group, for the hosts that hold parts first
    received_bytes: list[float]
    spans: list[tuple[float, float]] = field(default_factory=list)  # when a thread was busy

    @property
    def bottleneck(self) -> str:
        """The kind of station that is busy for most of the round."""
        return max(self.busy_s, key=lambda kind: self.busy_s[kind])


@dataclass
class _Station:
    kind: str
    free: float = 0.0
    busy: float = 0.0


def simulate(
    cluster: Cluster, costs: Costs, *, groups: int | None = None, is_recorded: bool = False
) -> Outcome:
    """Let one round go by, from when every worker is ready until the last has all its answers."""
    if max(beat_loads(cluster, costs)) >= 1:  # there is no time left for rounds
        return Outcome(math.inf, dict.fromkeys((*CPU, *LINK), 0.0) | {"beats": math.inf}, math.inf, [], [])
    return _Round(cluster, costs, _weigh(cluster, groups), is_recorded).run()


def beat_loads(cluster: Cluster, costs: Costs) -> tuple[float, float]:
    """What part of a shard's service thread, and of a worker's exchange thread, beats take."""
    if cluster.is_one_machine:
        return 0.0, 0.0
    service = cluster.workers * 2 * costs.crowd.message_s / BEAT_S
    return service, cluster.shards * 2 * costs.crowd.look_s / BEAT_S


def stretch(outcome: Outcome, cores: int) -> float:
    """How long a round takes where all threads share `cores`; it must be recorded, and without links."""
    edges = sorted([(start, 1) for start, _ in outcome.spans] + [(end, -1) for _, end in outcome.spans])
    took = now = 0.0
    running = 0
    for time, change in edges:
        took += (time - now) * max(1.0, running / cores)
        now, running = time, running + change
    return took + outcome.round_s - now


def limit_s(workers: int, up_bytes: float, down_bytes: float, rate_bits_s: float) -> float:
    """The least time for these bytes of one worker where every host carries an equal shard."""
    return 8 * (workers - 1) / workers * (up_bytes + down_bytes) / rate_bits_s


def _weigh(cluster: Cluster, groups: int | None) -> list[int]:
    """How many workers move as one: first those on hosts that hold parts, each by itself."""
    single = min(cluster.holders, cluster.workers)
    rest = cluster.workers - single
    count = rest if groups is None else min(groups, rest)
    shares = [rest * (i + 1) // count - rest * i // count for i in range(count)]
    return [1] * single + shares


class _Round:
    def __init__(self, cluster: Cluster, costs: Costs, weights: Sequence[int], is_recorded: bool) -> None:
        self.cluster, self.costs, self.weights = cluster, costs, weights
        self.spans: list[tuple[float, float]] | None = [] if is_recorded else None
        hosts, holders = range(len(weights)), range(cluster.holders)
        self.encode = [_Station("encode") for _ in hosts]
        self.apply = [_Station("apply") for _ in hosts]
        self.worker_io = [_Station("worker_io") for _ in hosts]
        self.out = [_Station("link_out") for _ in hosts]
        self.into = [_Station("link_in") for _ in hosts]
        self.shard_io = [_Station("shard_io") for _ in holders]
        self.service = [_Station("service") for _ in holders]
        self.update = [[_Station("update") for _ in range(cluster.threads)] for _ in holders]
        self.sent, self.received = [0.0] * len(weights), [0.0] * len(weights)
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.count = 0
        self.arrived = [0] * len(cluster.parts)
        self.encoded = [0] * len(weights)  # parts of each worker
        # Answers, and when they were heard, until all is sent.
        self.waiting: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.end = 0.0
        self._prepare()

    def _prepare(self) -> None:
        """Work out what each part costs at each station, once."""
        costs, cluster, sizes = self.costs, self.cluster, self.cluster.parts
        crowd, shards = costs.crowd, cluster.shards
        self.up = [costs.up.of(size) for size in sizes]
        self.down = [costs.down.of(size) for size in sizes]
        byte_s = 8 * FRAME_BYTES / CARRIED_BYTES / cluster.rate_bits_s
        self.up_line = [byte_s * size for size in self.up]
        self.down_line = [byte_s * size for size in self.down]
        slow = crowding(costs.neighbour, cluster.workers) if cluster.is_one_machine else 1.0
        # What beats take of a thread is not there for rounds.
        service, worker = (slow / (1 - load) for load in beat_loads(cluster, costs))
        looking = crowd.look_s * shards
        self.encode_s = [worker * (costs.encode.of(size) + looking) for size in sizes]
        self.hear_s = worker * (looking + crowd.poll_s * shards)
        self.apply_s = [slow * costs.apply.of(size) for size in sizes]
        self.push_worker_s = [slow * costs.worker_io.of(size) for size in self.up]
        self.reply_worker_s = [slow * costs.worker_io.of(size) for size in self.down]
        self.push_shard_s = [slow * costs.shard_io.of(size) for size in self.up]
        self.reply_shard_s = [slow * costs.shard_io.of(size) for size in self.down]
        members_s = crowd.member_s * cluster.workers
        self.serve_s = [service * (costs.service.of(size) + members_s) for size in self.up]
        self.answer_s = [service * costs.service.of(size) for size in self.down]
        self.update_s = [
            slow * (cluster.workers * costs.gather.of(size) + costs.update.of(size)) for size in sizes
        ]
        self.wake_s = slow * costs.wake_s

    def run(self) -> Outcome:
        steps = {
            _ENCODE: self._encode, _PUSH_IO: self._push_io, _PUSH_OUT: self._push_out,
            _PUSH_IN: self._push_in, _PUSH_TAKE: self._push_take, _SERVE: self._serve,
            _UPDATE: self._update, _ANSWER: self._answer, _REPLY_IO: self._reply_io,
            _REPLY_OUT: self._reply_out, _REPLY_IN: self._reply_in, _REPLY_TAKE: self._reply_take,
            _HEAR: self._hear, _APPLY: self._apply,
        }  # fmt: skip
        order = [steps[step] for step in range(len(steps))]
        for group in range(len(self.weights)):
            self._plan(0.0, _ENCODE, group, len(self.cluster.parts) - 1)  # the last is pushed first
        while self.heap:
            time, _, step, group, part = heapq.heappop(self.heap)
            order[step](time, group, part)
        return self._outcome()

    def _plan(self, time: float, step: int, group: int, part: int) -> None:
        self.count += 1
        heapq.heappush(self.heap, (time, self.count, step, group, part))

    def _use(self, station: _Station, time: float, service_s: float) -> float:
        """Take a station for a while, as soon as it is free; return when that ends."""
        start = time if time > station.free else station.free
        station.free = end = start + service_s
        station.busy += service_s
        if self.spans is not None and service_s > 0:
            self.spans.append((start, end))
        return end

    def _encode(self, time: float, group: int, part: int) -> None:
        end = self._use(self.encode[group], time, self.encode_s[part])
        self._plan(end, _PUSH_IO, group, part)
        if part > 0:
            self._plan(end, _ENCODE, group, part - 1)  # answers that come meanwhile are heard first

    def _push_io(self, time: float, group: int, part: int) -> None:
        self.encoded[group] += 1
        if self.encoded[group] == len(self.cluster.parts):
            for heard, early in self.waiting.pop(group, ()):
                self._plan(max(time, heard), _APPLY, group, early)
        end = self._use(self.worker_io[group], time, self.push_worker_s[part])
        self._plan(end, _PUSH_TAKE if group == self.cluster.homes[part] else _PUSH_OUT, group, part)

    def _push_out(self, time: float, group: int, part: int) -> None:
        line_s = self.up_line[part]
        self.sent[group] += self.up[part]
        end = self._use(self.out[group], time, line_s)
        self._plan(end - line_s + self.cluster.latency_s, _PUSH_IN, group, part)

    def _push_in(self, time: float, group: int, part: int) -> None:
        home, weight = self.cluster.homes[part], self.weights[group]
        self.received[home] += weight * self.up[part]
        self._plan(self._use(self.into[home], time, weight * self.up_line[part]), _PUSH_TAKE, group, part)

    def _push_take(self, time: float, group: int, part: int) -> None:
        station = self.shard_io[self.cluster.homes[part]]
        end = self._use(station, time, self.weights[group] * self.push_shard_s[part])
        self._plan(end, _SERVE, group, part)

    def _wake(self, station: _Station, time: float) -> None:
        # Where cores are shared, messages that would come together come one by one.
        if self.cluster.is_one_machine or station.free <= time:
            self._use(station, time, self.wake_s)

    def _serve(self, time: float, group: int, part: int) -> None:
        station = self.service[self.cluster.homes[part]]
        self._wake(station, time)
        end = self._use(station, time, self.weights[group] * self.serve_s[part])
        self.arrived[part] += self.weights[group]
        if self.arrived[part] == self.cluster.workers:
            self._plan(end, _UPDATE, 0, part)

    def _update(self, time: float, group: int, part: int) -> None:
        threads = self.update[self.cluster.homes[part]]
        thread = min(threads, key=lambda station: station.free)
        self._plan(self._use(thread, time, self.update_s[part]), _ANSWER, 0, part)

    def _answer(self, time: float, group: int, part: int) -> None:
        station = self.service[self.cluster.homes[part]]
        self._wake(station, time)
        for to, weight in enumerate(self.weights):
            self._plan(self._use(station, time, weight * self.answer_s[part]), _REPLY_IO, to, part)

    def _reply_io(self, time: float, group: int, part: int) -> None:
        home = self.cluster.homes[part]
        end = self._use(self.shard_io[home], time, self.weights[group] * self.reply_shard_s[part])
        self._plan(end, _REPLY_TAKE if group == home else _REPLY_OUT, group, part)

    def _reply_out(self, time: float, group: int, part: int) -> None:
        home, weight, line_s = self.cluster.homes[part], self.weights[group], self.down_line[part]
        self.sent[home] += weight * self.down[part]
        end = self._use(self.out[home], time, weight * line_s)
        # Of a group the last one counts: its answer leaves last.
        self._plan(end - line_s + self.cluster.latency_s, _REPLY_IN, group, part)

    def _reply_in(self, time: float, group: int, part: int) -> None:
        self.received[group] += self.down[part]
        self._plan(self._use(self.into[group], time, self.down_line[part]), _REPLY_TAKE, group, part)

    def _reply_take(self, time: float, group: int, part: int) -> None:
        end = self._use(self.worker_io[group], time, self.reply_worker_s[part])
        self._plan(end, _HEAR, group, part)

    def _hear(self, time: float, group: int, part: int) -> None:
        end = self._use(self.encode[group], time, self.hear_s)
        if self.encoded[group] < len(self.cluster.parts):
            self.waiting[group].append((end, part))
        else:
            self._plan(end, _APPLY, group, part)

    def _apply(self, time: float, group: int, part: int) -> None:
        self.end = max(self.end, self._use(self.apply[group], time, self.apply_s[part]))

    def _outcome(self) -> Outcome:
        stations = [*self.encode, *self.apply, *self.worker_io, *self.out, *self.into]
        stations += [*self.shard_io, *self.service, *(one for some in self.update for one in some)]
        busy = dict.fromkeys((*CPU, *LINK), 0.0)
        for station in stations:
            busy[station.kind] = max(busy[station.kind], station.busy)
        shards = zip(self.shard_io, self.service, self.update, strict=True)
        shard_s = max(
            (io.busy + service.busy + sum(one.busy for one in update) for io, service, update in shards),
            default=0.0,
        )
        return Outcome(self.end, busy, shard_s, self.sent, self.received, self.spans or [])
