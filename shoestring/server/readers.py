"""Workers that wait for a part to be at rest: they ask for its parameters, or for what the rule keeps of it.

They are answered once the part is there, has come to the round that they name, and nobody is changing it.
"""

from collections.abc import Callable, Collection, Mapping

from shoestring.model.vectors import state_names
from shoestring.server.members import Member, Members
from shoestring.server.rounds import PartRounds
from shoestring.wire import messages as say
from shoestring.wire.messages import Message

Question = say.Pull | say.AskState
_EMPTY = memoryview(b"")


class Readers:
    """The questions that wait: one of a kind for each worker and part."""

    def __init__(self, members: Members, send: Callable[[bytes, Message, memoryview], None]) -> None:
        self._members = members
        self._send = send
        self.waiting: dict[tuple[type, int, int], Question] = {}  # by kind, part and worker

    def ask(self, worker: int, question: Question) -> None:
        """Note what a worker wants of a part; what it asked before it does not want any more."""
        self.waiting[type(question), question.part, worker] = question

    def forget(self, worker: int) -> None:
        """Drop the questions of a worker that is gone."""
        self.waiting = {key: question for key, question in self.waiting.items() if key[2] != worker}

    def answer(self, parts: Mapping[int, PartRounds], filled: Collection[int]) -> None:
        """Answer what can be answered now."""
        for (kind, index, worker), question in list(self.waiting.items()):
            rounds, member = parts[index], self._members.get(worker)
            if index not in filled or rounds.round < question.round or member is None:
                continue
            say_it = self._parameters if kind is say.Pull else self._state
            if say_it(rounds, member, question):
                del self.waiting[kind, index, worker]

    def _parameters(self, rounds: PartRounds, member: Member, question: Question) -> bool:
        full = rounds.full()
        if full is None:
            return False
        message = say.Full(part=question.part, version=full.version, seq=0, statistics=full.statistics)
        self._send(member.identity, message, full.payload.data if rounds.holding.has_values else _EMPTY)
        return True

    def _state(self, rounds: PartRounds, member: Member, question: Question) -> bool:
        if rounds.is_updating:
            return False
        message = say.State(question.part, question.round, state_names(rounds.holding.rule))
        self._send(member.identity, message, rounds.state())
        return True
