"""One message of every kind, with no field at its default."""

from shoestring.wire import messages as say

SAMPLES = (
    say.Hello(1, "run", 2, 3, 4, 5, 6, "s"),
    say.Welcome(1, 2, True, 20.0, "s"),
    say.Enter(7, True),
    say.Entered(8, True),
    say.Init(9),
    say.Pull(10, 11),
    say.Push(
        1, 2, 3, 4, 5.5, "dct", "float32", 6.5, [[0.1, 0.2], [0.3]], b"\x07", 8, True, True, "p", 1, b"s", 0.5
    ),
    say.Full(1, 2, 3, "p", 4.5, 1, b"s", [0.5]),
    say.Delta(1, 2, 3, "dct", True, "p", 4.5, b"s", [0.5]),
    say.Norm(1, 2, 3.5),
    say.Scale(1, 0.5),
    say.Ask(1, 2, 3),
    say.Missing(1, 2),
    say.Saved(1),
    say.Snapped(1, "why"),
    say.Beat(1.5),
    say.Leave(),
    say.Refusal("what", "hint", True),
)
