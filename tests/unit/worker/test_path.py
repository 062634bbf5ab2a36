"""One part's way: from the hook of its last gradient to its parameters, which the shard's answer changes."""

import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import shoestring
from shoestring.model.parts import Part
from shoestring.server.holding import Holding
from shoestring.server.rounds import PartRounds
from shoestring.server.shard import Shard
from shoestring.server.work import Work
from shoestring.wire.messages import Delta, Full, Push
from shoestring.worker.protocol.worker import Answer
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.docs.walks import walk
from tests.unit.worker.cluster import Cluster

ROOT = Path(shoestring.__file__).parent
FOLLOWED, AT_STEP = 2, 4
MOST = 14  # files of the package


class Follower:
    """Notes which files of the package run while they hold a part, in any thread."""

    def __init__(self, part: int) -> None:
        self.part = part
        self.is_on = False
        self.files: set[str] = set()
        self._within = threading.local()  # how deep a thread is in calls that were given the part

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        """Called for every call and return of a Python function."""
        within = vars(self._within).setdefault("frames", [])
        if event == "return" and within and within[-1] is frame:
            within.pop()
        path = Path(frame.f_code.co_filename)
        if not self.is_on or event not in ("call", "return") or not path.is_relative_to(ROOT):
            return
        holds = any(self._is_about(name, local) for name, local in frame.f_locals.items())
        if event == "call" and holds:
            within.append(frame)
        if within or holds or self._is_about("", value):
            self.files.add(path.relative_to(ROOT).as_posix())

    def _is_about(self, name: str, value: Any) -> bool:
        if isinstance(value, tuple):
            return any(self._is_about("", item) for item in value)
        match value:
            case Push() | Full() | Delta() | Answer():
                return value.part == self.part
            case Part():
                return value.index == self.part
            case Holding():
                return value.part.index == self.part
            case PartRounds():
                return value.holding.part.index == self.part
            case Work():
                return value.rounds.holding.part.index == self.part
        return name == "part" and type(value) is int and value == self.part


def wait_for_sum(shard: Shard) -> None:
    """Wait until the part of both workers is summed: on a busy machine their steps may come first."""
    for _ in range(3000):
        if shard._waiting.has(AT_STEP + 1, FOLLOWED):
            return
        time.sleep(0.01)
    raise AssertionError("a part that was pushed is not summed")


def test_a_part_passes_through_few_files():
    follower = Follower(FOLLOWED)

    def be_worker(here: Session) -> int:
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
        model, optimizer = join(
            here,
            model,
            torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
            codec="float32",
            policy="every",
        )
        replica = optimizer.driver.replica
        write = replica.write

        def note(part, values):
            write(part, values)
            if part.index == FOLLOWED:
                follower.is_on = False  # it has arrived

        replica.write = note
        for step in range(AT_STEP + 1):
            loss = model(torch.ones(2, 200)).square().mean()
            follower.is_on = step == AT_STEP
            loss.backward()
            if follower.is_on:
                wait_for_sum(cluster.shards[0])
            optimizer.step()
            optimizer.zero_grad()
        return len(replica.parts)

    threading.setprofile(follower.profile)
    try:
        with Cluster(2, 1) as cluster:
            parts = cluster.train(be_worker)
    finally:
        threading.setprofile(None)
    assert parts[0] > FOLLOWED + 1
    assert sorted(follower.files) == sorted({file for file, _ in walk("A gradient's way")})
    assert len(follower.files) <= MOST
