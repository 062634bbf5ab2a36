"""A follower beside real workers and shards, over sockets: it has the run's bits, round by round."""

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest
import torch
import zmq
from torch import nn

from shoestring.client.follow import follow
from shoestring.client.version import Version
from shoestring.errors import EndedError, JoinError, LinkError, OverdueError, UsageError
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

WORKERS, STEPS = 2, 6
LIMIT_S = 60.0


class Net(nn.Module):
    """A few layers whose dtypes take turns; large enough for several parts."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        dtypes = dtypes or (torch.float32,)
        torch.manual_seed(1)
        sides = (24, 300, 200, 6)
        self.layers = nn.ModuleList(
            nn.Linear(inner, outer, dtype=dtypes[index % len(dtypes)])
            for index, (inner, outer) in enumerate(itertools.pairwise(sides))
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x.to(layer.weight.dtype)))
        return x.float()


def made(*dtypes: torch.dtype) -> Net:
    with _seeding:
        return Net(*dtypes)


_seeding = threading.Lock()  # workers are threads here, and torch has one seed for all


class Gate:
    """Lets workers go on when the follower has come as far."""

    def __init__(self) -> None:
        self._reached = -1
        self._changed = threading.Condition()

    def open(self, reached: int) -> None:
        with self._changed:
            self._reached = reached
            self._changed.notify_all()

    def wait(self, reached: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._reached >= reached, LIMIT_S), "the follower hangs"


class Running:
    """Workers that train in threads, each held at `gate` after every round."""

    def __init__(self, cluster: Cluster, *, dtypes=(), steps=STEPS, policy="every", **settings) -> None:
        self.gate, self.hashes, self.error = Gate(), {}, None
        self.optimizers: dict[int, object] = {}

        def be_worker(here: Session) -> None:
            model = made(*dtypes)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            settings.setdefault("codec", "dct")
            model, optimizer = join(here, model, optimizer, policy=policy, **settings)
            self.hashes.setdefault(0, optimizer.parameter_hash())
            self.gate.wait(0)
            for step in range(1, steps + 1):
                x = torch.from_numpy(
                    np.random.default_rng((step, here.run.worker)).standard_normal((8, 24), np.float32)
                )
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                rounds = optimizer.driver.rounds
                if policy.startswith("local") and step % 2:
                    continue
                known = self.hashes.setdefault(rounds, optimizer.parameter_hash())
                assert policy in ("async",) or known == optimizer.parameter_hash()
                self.gate.wait(rounds)

        def body() -> None:
            try:
                cluster.train(be_worker)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open(1 << 40)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


CASES: dict[str, dict] = {
    "float32": {"codec": "float32"},
    "dct": {},
    "delay": {"policy": "every:delay=1"},
    "clip": {"clip_norm": 0.01},
    "bfloat16": {"dtypes": (torch.bfloat16,)},
    "mixed": {"dtypes": (torch.bfloat16, torch.float32, torch.float16)},
    "mixed float32": {"dtypes": (torch.bfloat16, torch.float32, torch.float16), "codec": "float32"},
    "local": {"policy": "local:2", "steps": 2 * STEPS},
    "local nesterov": {"policy": "local:h=2,outer=nesterov", "steps": 2 * STEPS},
    "local bfloat16": {"policy": "local:2", "steps": 2 * STEPS, "dtypes": (torch.bfloat16,)},
}


@pytest.mark.parametrize("ipc", [False, True], ids=["tcp", "ipc"])
@pytest.mark.parametrize("case", CASES)
def test_a_follower_has_the_bits_of_every_round(case, ipc):
    with Cluster(WORKERS, 2, ipc=ipc) as cluster, Running(cluster, **CASES[case]) as running:
        seen: dict[int, Version] = {}
        with follow(",".join(cluster.addresses)) as follower:
            for version in follower:
                seen[version.round] = version
                running.gate.open(version.round)
                if version.round == STEPS:
                    break
    assert list(seen) == list(range(STEPS + 1))
    assert all(version.is_whole for version in seen.values())
    wanted = dict(running.hashes)
    if case == "delay":  # a worker has the round before
        wanted = {seq - 1: digest for seq, digest in wanted.items() if seq}
    found = {seq: version.parameter_hash() for seq, version in seen.items()}
    shared = sorted(wanted.keys() & found.keys())
    assert len(shared) >= STEPS
    assert [found[seq] for seq in shared] == [wanted[seq] for seq in shared]


def test_rounds_that_follow_each_other_travel_compressed():
    with Cluster(WORKERS, 2) as cluster, Running(cluster) as running:
        kinds: dict[int, set[str]] = {}
        with follow(",".join(cluster.addresses)) as follower:
            tracker, handle = follower._tracker, follower._tracker.handle

            def note(shard, message, payload, now):
                if hasattr(message, "version"):
                    kinds.setdefault(message.seq, set()).add(type(message).__name__)
                handle(shard, message, payload, now)

            tracker.handle = note
            for version in follower:
                running.gate.open(version.round)
                if version.round == STEPS:
                    break
    assert kinds.pop(0) == {"Full"}
    assert all(kinds[seq] == {"Delta"} for seq in range(1, STEPS + 1))


@pytest.mark.parametrize("policy", ["every", "local:2"])
def test_pull_gives_the_newest_version_and_each_once(policy):
    steps = 3 * STEPS if policy == "every" else 6 * STEPS
    with following(policy=policy, steps=steps) as (running, follower):
        first = follower.pull(timeout_s=LIMIT_S)
        while "waits for the end of round 1" not in overdue(follower):
            pass
        running.gate.open(2 * STEPS)
        seen = [first]
        while seen[-1].round < 2 * STEPS:
            seen.append(follower.pull(timeout_s=LIMIT_S))
    rounds = [version.round for version in seen]
    assert rounds[0] == 0
    assert rounds == sorted(set(rounds))
    assert [version.parameter_hash() for version in seen] == [running.hashes[seq] for seq in rounds]


def test_a_follower_that_is_late_goes_on_with_a_later_round():
    with following(steps=20) as (running, follower):
        versions = iter(follower)
        assert next(versions).round == 0
        running.gate.open(15)  # the workers go on; nobody reads meanwhile
        running_to(running, 16)
        rounds = [0]
        while rounds[-1] < 16:
            rounds.append(next(versions).round)
        assert rounds == sorted(set(rounds))
        assert set(rounds) <= {0, 1, 2, 16}  # two may have been asked for in time
        running.gate.open(16)
        version = next(versions)
        running_to(running, 17)
        assert (version.round, version.parameter_hash()) == (17, running.hashes[17])


@contextlib.contextmanager
def following(**settings):
    """Workers that train on two shards, and a follower."""
    with (
        Cluster(WORKERS, 2) as cluster,
        Running(cluster, **settings) as running,
        follow(",".join(cluster.addresses)) as follower,
    ):
        yield running, follower


def running_to(running: Running, seq: int) -> None:
    limit = time.monotonic() + LIMIT_S
    while seq not in running.hashes:
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("policy", ["async", "bounded:1"])
def test_without_whole_rounds_parts_are_given_as_they_are_and_it_is_said(policy):
    with Cluster(WORKERS, 2) as cluster, Running(cluster, policy=policy) as running:
        with follow(",".join(cluster.addresses)) as follower:
            first = follower.pull(timeout_s=LIMIT_S)
            assert (first.round, first.is_whole) == (0, True)
            running.gate.open(STEPS - 1)  # all wait after their last push
            while True:
                version = follower.pull(timeout_s=LIMIT_S)
                assert not version.is_whole
                if version.round == STEPS:
                    break
        parts = {i: rounds for shard in cluster.shards for i, rounds in shard.parts.items()}
        held = np.concatenate([parts[index].holding.values for index in sorted(parts)])
        found = np.concatenate([values.reshape(-1) for values in version.parameters.values()])
        np.testing.assert_array_equal(found, held)


def test_iterating_ends_when_the_run_does_and_pull_says_so():
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(WORKERS, 2))
        running = stack.enter_context(Running(cluster))
        follower = stack.enter_context(follow(",".join(cluster.addresses)))
        idle = stack.enter_context(follow(",".join(cluster.addresses)))
        assert idle.pull(timeout_s=LIMIT_S).round == 0
        for version in follower:
            running.gate.open(version.round)
            if version.round == STEPS:
                break
        running.thread.join(LIMIT_S)
        ending = threading.Thread(target=cluster.__exit__)
        ending.start()
        assert [version.round for version in follower] == []
        ending.join(LIMIT_S)
        with pytest.raises(
            EndedError, match=rf"run `test` has ended; its last round that came here is {STEPS}"
        ):
            follower.pull()
        with pytest.raises(EndedError):  # what was said while nobody listened
            idle.pull()


def test_a_run_whose_workers_update_the_parameters_is_refused():
    with Cluster(1, 1) as cluster:
        refusals = []

        def be_worker(here: Session) -> None:
            join(here, made())
            for _ in range(2):
                with follow(cluster.addresses[0]) as follower, pytest.raises(JoinError) as caught:
                    follower.pull(timeout_s=LIMIT_S)
                refusals.append(caught.value.message)

        cluster.train(be_worker)
    assert refusals == ["this run's workers update the parameters: its shards have none to read"] * 2


def test_a_follower_that_comes_before_the_workers_waits_for_them():
    with Cluster(1, 1) as cluster, follow(cluster.addresses[0]) as follower:
        while "waits for the run's first worker to bring the model" not in overdue(follower):
            pass
        with Running(cluster):
            assert follower.pull(timeout_s=LIMIT_S).round == 0


def overdue(follower) -> str:
    with pytest.raises(OverdueError) as caught:
        follower.pull(timeout_s=0.05)
    return caught.value.message


def test_several_models_of_a_run_are_followed_by_their_number():
    found = {}

    def be_worker(here: Session) -> None:
        for number in range(2):
            model = nn.Linear(3, 2 + number)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = join(here, model, optimizer, codec="float32")
            with follow(cluster.addresses[0], model=number) as follower:
                version = follower.pull(timeout_s=LIMIT_S)
            found[number] = version.parameter_hash() == optimizer.parameter_hash()
            assert version.parameters["weight"].shape == (2 + number, 3)

    with Cluster(1, 1) as cluster:
        cluster.train(be_worker)
    assert found == {0: True, 1: True}


def test_shards_of_other_runs_and_in_another_order_are_refused():
    with Cluster(1, 2) as cluster, Running(cluster):
        turned = ",".join(cluster.addresses[::-1])
        with (
            follow(turned) as follower,
            pytest.raises(JoinError, match="looks for shard . of 2 of run `test`"),
        ):
            follower.pull(timeout_s=LIMIT_S)
        with follow(cluster.addresses[0]) as follower, pytest.raises(JoinError, match="shard 0 of 1"):
            follower.pull(timeout_s=LIMIT_S)


def test_where_nothing_answers_it_says_whom_it_asked(capsys, monkeypatch):
    monkeypatch.setattr("shoestring.client.follow._WORD_S", 0.1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as dead:  # it listens and never answers
        where = f"tcp://127.0.0.1:{dead.bind_to_random_port('tcp://127.0.0.1')}"
        silence = pytest.raises(LinkError, match=rf"shard 0 of 1 at `{where}` has not answered")
        with follow(where, silence_s=0.3) as follower, silence:
            follower.pull()
    assert capsys.readouterr().err == f"shoestring: follower: waits for an answer of shard 0 at `{where}`\n"


def test_a_closed_follower_says_so():
    with follow("127.0.0.1:1") as follower:
        pass
    follower.close()
    with pytest.raises(UsageError, match="closed"):
        follower.pull()


def test_beyond_this_machine_nothing_is_followed_without_keys():
    with pytest.raises(LinkError, match="without keys"):
        follow("192.0.2.1:5555")


def test_there_is_no_model_of_any_number():
    with pytest.raises(UsageError, match="there is no model 64"):
        follow("127.0.0.1:1", model=64)
