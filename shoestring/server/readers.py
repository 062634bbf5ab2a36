"""Workers that ask for a part as it is: its parameters, or what the optimizer's rule keeps of it.

They are answered once the part is there, has come to the round they name, and nobody is changing it.
"""

from collections.abc import Callable, Collection, Mapping

from shoestring.model.vectors import state_names
from shoestring.server.members import Member, Members
from shoestring.server.rounds import PartRounds
from shoestring.wire import messages as say
from shoestring.wire.messages import Message

_EMPTY = memoryview(b"")


class Readers:
    """The questions that wait: one of a kind for each worker and part."""

    def __init__(self, members: Members, send: Callable[[bytes, Message, memoryview], None]) -> None:
        self._members = members
        self._send = send
        self._pulls: dict[tuple[int, int], say.Pull] = {}  # by part and worker
        self._states: dict[tuple[int, int], say.AskState] = {}

    def __len__(self) -> int:
        return len(self._pulls) + len(self._states)

    def pull(self, worker: int, question: say.Pull) -> None:
        """Note that a worker wants a part's parameters."""
        self._pulls[question.part, worker] = question

    def ask_state(self, worker: int, question: say.AskState) -> None:
        """Note that a worker wants the optimizer's state of a part."""
        self._states[question.part, worker] = question

    def forget(self, worker: int) -> None:
        """Drop the questions of a worker that is gone."""
        self._pulls = {key: asked for key, asked in self._pulls.items() if key[1] != worker}
        self._states = {key: asked for key, asked in self._states.items() if key[1] != worker}

    def answer(self, parts: Mapping[int, PartRounds], filled: Collection[int]) -> None:
        """Answer what can be answered now."""
        for (index, worker), pull in list(self._pulls.items()):
            rounds, member = parts[index], self._members.get(worker)
            is_ready = index in filled and rounds.round >= pull.round
            full = rounds.full() if is_ready else None
            if full is not None and member is not None:
                del self._pulls[index, worker]
                message = say.Full(part=index, version=full.version, seq=0, statistics=full.statistics)
                has_values = rounds.holding.has_values
                self._send(member.identity, message, full.payload.data if has_values else _EMPTY)
        for (index, worker), asked in list(self._states.items()):
            rounds, member = parts[index], self._members.get(worker)
            is_ready = index in filled and rounds.round >= asked.round and not rounds.is_updating
            if is_ready and member is not None:
                self._answer_state(rounds, member, self._states.pop((index, worker)))

    def _answer_state(self, rounds: PartRounds, member: Member, asked: say.AskState) -> None:
        names = state_names(rounds.holding.rule)
        self._send(member.identity, say.State(asked.part, asked.round, names), rounds.state())
