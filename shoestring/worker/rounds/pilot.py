"""Decide how each round travels, and see to it that all workers decide alike.

With a named codec that is the same for every round after the warm-up. With `auto` it
follows what is measured: see `auto.py`. What must be common to all workers, the delay, is
decided by the first one: its decision names the round from which it holds, and reaches the
others with the answers in between. So replicas stay equal while decisions change.
"""

import time

from shoestring.checkpoint.schedule import Schedule
from shoestring.codec.registry import LOSSLESS, make
from shoestring.wire.messages import Decisions, Delay, PolicyChange, Shares
from shoestring.worker.coder import Setting, Terms
from shoestring.worker.rounds.auto import Auto
from shoestring.worker.rounds.chooser import Chooser
from shoestring.worker.rounds.sharing import Sharing
from shoestring.worker.rounds.witness import Watch

_NOTICE = 3  # rounds between a decision and its effect: with a delay of 1 the others hear of it two later


class Pilot:
    """Sets the terms of each round, and times what happens between them."""

    def __init__(
        self,
        codec: str | Auto,
        *,
        is_first: bool,
        warmup: int,
        delay: int,
        schedule: Schedule | None = None,
        sharing: Sharing | None = None,
        watch: Watch | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        self.codec = LOSSLESS  # of the last round
        self.waited_s = 0.0  # for the exchange, in all rounds so far
        self._auto = codec if isinstance(codec, Auto) else None
        self._fixed = Setting() if isinstance(codec, Auto) else fixed_setting(codec)
        self._is_first = is_first
        self._warmup = warmup
        self._schedule = schedule or Schedule()
        self._delays = {0: delay}  # from a round on
        self._sharing = sharing
        self._watch = watch
        self._delay: Delay | None = None  # the first worker's last decisions, told again with every round
        self._shares: Shares | None = None
        self._chooser = chooser if is_first else None
        self.change: PolicyChange | None = None  # that all workers make
        self._pace_s = 0.0  # how long this worker's own work took in the last step; 0: nobody asks
        self._began_at = self._exposed_from = time.monotonic()

    @property
    def level(self) -> int | None:
        """How hard `auto` compresses, from 0; none with a named codec."""
        return None if self._auto is None else self._auto.level

    def terms(self, seq: int, hyper: list[list[float]], weight: float, bound: int) -> Terms:
        """The terms of round `seq`."""
        setting = Setting()
        if seq > self._warmup:
            setting = self._auto.setting() if self._auto is not None else self._fixed
        self.codec = setting.push
        return Terms(seq, setting, hyper, weight, bound, self._schedule.is_due(seq), self._decisions(seq))

    def delay(self, seq: int) -> int:
        """How many rounds later the answers to round `seq` are applied."""
        latest = max(start for start in self._delays if start <= seq)
        for start in [start for start in self._delays if start < latest]:
            del self._delays[start]
        return self._delays[latest]

    def hear(self, decisions: Decisions | None) -> None:
        """Take in the first worker's decisions, and how long workers take."""
        if decisions is None:
            return
        if decisions.delay is not None:
            self._delays[decisions.delay.round] = decisions.delay.rounds
        self.change = self.change or decisions.policy
        if self._watch is not None and decisions.witnesses:
            self._watch.hear(decisions.witnesses)
        if self._sharing is not None:
            if decisions.shares is not None:
                self._sharing.obey(decisions.shares)
            self._sharing.hear(decisions.paces)

    def backward_done(self) -> None:
        """From now on the worker waits for the exchange."""
        self._exposed_from = time.monotonic()

    def round_done(self, seq: int) -> None:
        """A round ended, as far as this worker waits for it."""
        now = time.monotonic()
        compute_s, exposed_s = self._exposed_from - self._began_at, now - self._exposed_from
        self._began_at = now
        self.waited_s += exposed_s
        if self._sharing is not None and self._sharing.is_auto:
            self._pace_s = compute_s
            shares = self._sharing.decide() if self._is_first else None
            if shares is not None:
                self._shares = shares
                self._sharing.obey(shares)
        if self._auto is not None and seq > self._warmup:
            self._auto.measure(compute_s=compute_s, exposed_s=exposed_s, seq=seq, now=now)
            if self._is_first:
                self._decide_delay(seq, self._auto)
        chosen = None if self._chooser is None or self.change is not None else self._chooser.choose()
        if chosen is not None:
            self.change = PolicyChange(seq + _NOTICE, *chosen)

    def _decisions(self, seq: int) -> Decisions | None:
        """What goes with a round's first part."""
        witness = None if self._watch is None else self._watch.say(seq)
        change = self.change if self._is_first else None
        said = (self._delay, self._shares, self._pace_s or None, witness, change)
        if all(one is None for one in said):
            return None
        paces = (self._pace_s,) if self._pace_s else ()
        return Decisions(self._delay, self._shares, paces, () if witness is None else (witness,), change)

    def _decide_delay(self, seq: int, auto: Auto) -> None:
        latest = max(self._delays)
        if latest > seq:  # a change is under way
            return
        delay = auto.decide_delay(self._delays[latest])
        if delay != self._delays[latest]:
            self._delay = Delay(seq + _NOTICE, delay)
            self._delays[seq + _NOTICE] = delay


def fixed_setting(codec: str) -> Setting:
    """The setting of a run whose codec is named."""
    spec = make(codec).spec
    return Setting(spec, spec, 32.0 if spec == LOSSLESS else 1.0)
