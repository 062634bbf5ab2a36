"""One message of every kind, with no field at its default."""

from shoestring.wire import messages as say

DECISIONS = say.Decisions(say.Delay(5, 1), say.Shares(6, (3, 1)), (0.5,))

SAMPLES = (
    say.Hello(
        protocol=1, run="run", worker=2, workers=3, life="l", incarnation=4, shard=5, shards=6, shared="s"
    ),
    say.Welcome(protocol=1, incarnation=2, round=3, lease_s=20.0, shared="s"),
    say.Enter(7, True),
    say.Entered(8, 9, True),
    say.Init(9),
    say.Pull(10, 11),
    say.Push(
        part=1,
        seq=2,
        worker=3,
        incarnation=4,
        weight=5.5,
        sender=6,
        have=7,
        codec="dct",
        reply="float32",
        reply_cost=6.5,
        hyper=[[0.1, 0.2], [0.3]],
        used=b"\x07",
        bound=8,
        skip=True,
        early=True,
        save=True,
        slot=1,
        statistics=b"s",
        decisions=DECISIONS,
    ),
    say.Full(part=1, version=2, seq=3, squares=4.5, skip=True, slot=1, statistics=b"s", decisions=DECISIONS),
    say.Delta(
        part=1,
        version=2,
        seq=3,
        codec="dct",
        last=True,
        squares=4.5,
        skip=True,
        statistics=b"s",
        decisions=DECISIONS,
    ),
    say.Norm(1, 2, 3.5),
    say.Scale(1, 0.5),
    say.Ask(1, 2, 3),
    say.Missing(1, 2),
    say.Saved(1),
    say.Snapped(1, "why"),
    say.Beat(1.5),
    say.Leave(),
    say.Refusal("what", "hint", True),
    say.Left(),
    say.Recorded(1),
    say.AskSnapped(1),
    say.Commit(1, True),
)
