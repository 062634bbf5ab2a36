"""`follow`: read the parameters of a run that trains, without being one of its workers.

This file holds the thread that talks with shards, and time; what is said to whom is decided by
`tracker.py`. Versions are put together in that thread while the program works with an earlier one,
two rounds ahead at most.
"""

import contextlib
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from shoestring.client.address import find
from shoestring.client.line import Line
from shoestring.client.tracker import Tracker
from shoestring.client.version import Version
from shoestring.codec.warmup import warm_up_dct
from shoestring.config import PREFIX
from shoestring.errors import EndedError, LinkError, OverdueError, ShoestringError, UsageError
from shoestring.wire.identity import TRAINED_LIMIT
from shoestring.wire.keys import FOLLOWER, SHARD, WorkerKeys, load_pair, load_public, public_file, secret_file

_TICK_S = 1.0
_WORD_S = 10.0  # of waiting, after which a line says for whom
_LAST_S = 1.0  # for the rest of a round, after a shard has said that it ends
_LEAVE_MS = 500


def follow(
    run: str | Path | None = None,
    *,
    key: str | Path | None = None,
    model: int = 0,
    silence_s: float = 60.0,
) -> "Follower":
    """Read whole versions of a run's parameters: for evaluation, serving or rollouts.

    `run` is the run's folder on this machine, or the addresses of its shards in their order, with commas
    between them; without it they come from `SHOESTRING_SHARDS`. Beyond this machine `key` names this
    program's secret key, with `shard.public` beside it; without it, it is `follower.secret` in the folder
    that `SHOESTRING_KEYS` names. A key whose name is `follower`, or begins with `follower-`, may only read.
    `model` is the number of the model, where a script wraps several. A shard that is silent for `silence_s`
    while it is waited for ends the wait: too short, and a busy one counts as gone; too long, and one that is
    gone shows late.

    The run does not wait for followers, and goes on as if there were none.
    """
    if not 0 <= model < TRAINED_LIMIT:
        raise UsageError(
            f"there is no model {model}", hint=f"models are counted from 0 to {TRAINED_LIMIT - 1}"
        )
    place = find(run)
    keys = _keys(key)
    identity = f"follower.{secrets.token_hex(8)}.{model}".encode()
    with contextlib.ExitStack() as opened:
        lines = []
        for address in place.addresses:
            lines.append(Line(address, keys, identity))
            opened.callback(lines[-1].close, 0)
        follower = Follower(lines, Tracker(len(lines), place.run, time.monotonic()), silence_s)
        opened.pop_all()
    return follower


def _keys(key: str | Path | None) -> WorkerKeys | None:
    folder = os.environ.get(f"{PREFIX}KEYS")
    if key is not None:
        secret = Path(key)
    elif folder and secret_file(FOLLOWER, Path(folder)).exists():
        secret = secret_file(FOLLOWER, Path(folder))
    else:
        return None
    return WorkerKeys(load_pair(secret), load_public(public_file(SHARD, secret.parent)))


def _say(text: str) -> None:
    print(f"shoestring: follower: {text}", file=sys.stderr, flush=True)


class Follower:
    """A reader of a run. `pull` gives the newest version; iterating gives every round's.

    Iterating asks shards for rounds before these are there, so that none is missed by a program that
    keeps up; one that is more than two rounds late goes on with a later round. It stops when the run ends.
    """

    def __init__(self, lines: Sequence[Line], tracker: Tracker, silence_s: float) -> None:
        """Made by `shoestring.follow`."""
        self._lines = lines
        self._tracker = tracker  # used under the lock of `_changed` alone
        self._silence_s = silence_s
        self._changed = threading.Condition()
        self._failure: ShoestringError | None = None
        self._is_closed = False
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the thread
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def pull(self, *, timeout_s: float | None = None) -> Version:
        """Return the newest version, once there is one that was not given yet.

        Raises `EndedError` when the run has ended, and `OverdueError` after `timeout_s`.
        """
        return self._wait(self._tracker.want_newest, timeout_s)

    def __iter__(self) -> Iterator[Version]:
        """Give the newest version and from then on every round's."""
        warm_up_dct(_say)  # before rounds go by: loading takes longer than some of them
        while True:
            try:
                version = self._wait(self._tracker.want_next, None)
            except EndedError:
                return
            with self._changed:
                self._tracker.want_next(time.monotonic())  # the program works with this one meanwhile
            self._wake()
            yield version

    def close(self) -> None:
        """Say goodbye. May be called again."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()
        os.close(self._alarm)

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, want: Callable[[float], None], timeout_s: float | None) -> Version:
        """Ask for a version and wait until it is here."""
        began = now = time.monotonic()
        limit = math.inf if timeout_s is None else began + timeout_s
        word_at, ends_at = began + _WORD_S, math.inf
        tracker = self._tracker
        with self._changed:
            self._raise()
            want(now)
            self._wake()
            while (version := tracker.take()) is None:
                self._raise()
                if tracker.is_over:
                    ends_at = min(ends_at, now + _LAST_S)
                if now >= ends_at or (tracker.is_over and not tracker.missing()):
                    raise self._ended()
                self._refuse_silence(began, now)
                if now >= limit:
                    raise OverdueError(
                        f"no version newer than that of round {max(tracker.given, 0)} within "
                        f"{timeout_s:g} s: {self._waits_for()}",
                        hint="give a longer `timeout_s`, or none, to wait as long as the next round takes",
                    )
                if now >= word_at:
                    word_at = math.inf
                    _say(self._waits_for())
                self._changed.wait(max(0.0, min(limit, word_at, ends_at, now + _TICK_S) - now))
                now = time.monotonic()
        return version

    def _ended(self) -> EndedError:
        return EndedError(
            f"the run `{self._tracker.run}` has ended; its last round that came here is "
            f"{max(self._tracker.given, 0)}",
            hint="take its last parameters from a checkpoint: `shoestring export`",
        )

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise UsageError("this follower is closed", hint="call `shoestring.follow` again")

    def _refuse_silence(self, began: float, now: float) -> None:
        for index in self._tracker.missing():
            line = self._lines[index]
            if now - max(line.heard_at, began) > self._silence_s:
                raise LinkError(
                    f"shard {index} of {len(self._lines)} at `{line.address}` has not answered for "
                    f"{self._silence_s:g} s",
                    hint="check that the run is going on, that this host reaches it, and that this "
                    "program's public key is in the folder of keys of every shard's host",
                )

    def _waits_for(self) -> str:
        tracker, seq = self._tracker, self._tracker.wanted()
        silent = [index for index in tracker.missing() if not self._lines[index].was_heard]
        if tracker.table is None and not silent:
            return "waits for the run's first worker to bring the model"
        if silent:
            where = ", ".join(f"{index} at `{self._lines[index].address}`" for index in silent)
            return f"waits for an answer of shard {where}"
        return "waits for the shards" if seq is None else f"waits for the end of round {seq}"

    # The rest runs in the follower's own thread.

    def _wake(self) -> None:
        os.eventfd_write(self._alarm, 1)

    def _run(self) -> None:
        try:
            self._loop()
        except ShoestringError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, the program must not wait for ever
            self._fail(ShoestringError(f"the follower failed: {error!r}", hint="please report this"))
        for line in self._lines:
            line.close(_LEAVE_MS)

    def _fail(self, error: ShoestringError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._alarm, zmq.POLLIN)
        tick_at = 0.0
        while not self._is_closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._alarm)
            with self._changed:
                for index, line in enumerate(self._lines):
                    for message, payload in line.receive():
                        self._tracker.handle(index, message, payload, time.monotonic())
                now = time.monotonic()
                if now >= tick_at:
                    tick_at = now + _TICK_S
                    self._tracker.tick(now)
                self._pass_on()
                self._changed.notify_all()
            for line in self._lines:
                poller.register(line.socket, line.events)
            poller.poll(max(0, math.ceil(1000 * (tick_at - time.monotonic()))))
        self._tracker.leave()
        self._pass_on()

    def _pass_on(self) -> None:
        outbox = self._tracker.outbox
        while outbox:
            index, message = outbox.popleft()
            self._lines[index].send(message)
        for line in self._lines:
            line.flush()
