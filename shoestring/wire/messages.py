"""What workers and shards say to each other.

A message is a header (one of the classes below) and one payload, possibly empty.
Workers say `Hello, Enter, Init, Pull, Push, Commit, Put, Scale, Ask, AskState, Saved, AskSnapped, Beat,
Leave`; shards answer with `Welcome, Entered, Full, Delta, Norm, Missing, Wanted, State, Recorded, Snapped,
Refusal, Beat, Left`. Followers, which read parameters and take no part, say `Follow, Fetch, Beat, Leave`,
and are answered by `Followed, Full, Delta, Passed, Refusal, Beat, Left, Over`.

The order of a worker's life: `Hello` with the table of the model as payload, answered
by `Welcome`; `Enter`, naming the first round it will take part in, answered by
`Entered`; then `Pull` for each part, answered by `Full`, or for the first worker by `Missing`
where the shard holds nothing yet, whereupon it sends `Init` and asks again.
After that a `Push` a part and round, each answered by a `Full` or a `Delta`, and, where pushes are made
before it is known whether the step is taken, a `Commit` a shard and round. A commit also says what the
script has changed since the last round: parameters, or the optimizer's state. Then the shard asks the first
worker for it, `Wanted`, and gets a `Put` a part. `AskState` brings the optimizer's state from a shard, a
`State` a part. At the end `Leave`, answered by `Left`.

A follower's: `Follow`, answered by `Followed` with the table once a worker has brought that; then a `Fetch`
for each round that it wants, ahead of time or for the one that the parts are at. Each part is sent as it
comes to that round, a `Full`, or a `Delta` where the follower has the round before. A part that has gone on
is not brought back: `Passed` says which round to ask for. `Over` says that the shard ends.

Every question is repeated until it is answered, so each may arrive twice. A push is named by whom
it counts for, that worker's incarnation, and `seq`, the round it belongs to. The answer to it is its
acknowledgement. All fields are data with fixed types and limits: decoding a message runs nothing,
and what is decoded is within its limits.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = 7

WHOLE_ROUND = -1  # `Push.bound` of a push that is summed with those of all workers
WORKER_LIMIT = 1 << 16
POLICY_LIMIT = 200  # characters
ROUND_LIMIT = 1 << 48
CHECKSUMS_LIMIT = 1 << 18  # bytes
NEWS_LIMIT = 1 << 19  # bytes; they lie in a header
WIDE = "float64"  # the codec of a push of float64 values, whose mean is taken and answered in float64
TAKEN, OPEN, DISCARDED = range(3)  # a `Fate`: a step was taken with it; not yet; it was thrown away

Count = Annotated[int, Meta(ge=0)]
Round = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, lt=1e18)]
CodecText = Annotated[str, Meta(max_length=128)]
Names = Annotated[tuple[Annotated[str, Meta(max_length=32)], ...], Meta(max_length=8)]  # of vectors


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The base of all headers."""


class Data(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The base of what is nested in headers."""


class Delay(Data, frozen=True):
    """From `round` on answers are applied `rounds` rounds after their push."""

    round: Round
    rounds: Annotated[int, Meta(ge=0, le=1)]


class Shares(Data, frozen=True):
    """From `step` on the workers take so many samples of the global batch, in their order."""

    step: Count
    samples: Annotated[tuple[Round, ...], Meta(min_length=1, max_length=WORKER_LIMIT)]


class Witness(Data, frozen=True):
    """What a worker shows the others: a fingerprint of a batch, a checksum of a parameter; 0: none."""

    worker: Count
    batch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    index: Count = 0  # of the parameter
    checksum: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


class PolicyChange(Data, frozen=True):
    """The policy and the codec by which all workers go on once they have ended a round."""

    round: Round
    policy: Annotated[str, Meta(max_length=POLICY_LIMIT)]
    codec: CodecText


class Decisions(Data, frozen=True):
    """What the first worker has decided for later rounds, and what it decides by.

    It travels in the push and the answers of one part.
    """

    delay: Delay | None = None
    shares: Shares | None = None
    # Seconds that a worker's own work took it of late: one in a push, all workers' in an answer.
    paces: Annotated[tuple[Seconds, ...], Meta(max_length=WORKER_LIMIT)] = ()
    # Likewise: one worker's in a push, all workers' in an answer.
    witnesses: Annotated[tuple[Witness, ...], Meta(max_length=WORKER_LIMIT)] = ()
    policy: PolicyChange | None = None


class Hello(Message, tag=1, kw_only=True):
    """Ask to take part. Payload: the `Table` of the model."""

    protocol: int
    run: str
    worker: int
    workers: int
    life: Annotated[str, Meta(max_length=64)]  # differs from process to process
    incarnation: Annotated[int, Meta(ge=0, le=1 << 48)] = 0  # as a launcher has counted; 0: not counted
    shard: int
    shards: int
    shared: str = ""  # the name of memory the worker writes, where both are on one machine


class Welcome(Message, tag=2, kw_only=True):
    """The worker fits. `round` is the last one any part here has begun."""

    protocol: int
    incarnation: int  # what the worker's pushes to this shard are named by
    round: int
    lease_s: float
    shared: str = ""  # the name of memory the shard writes, if it has opened the worker's


class Enter(Message, tag=3):
    """Take part from this round on. `shares`: the worker has opened the shard's memory."""

    round: int
    shares: bool = False


class Entered(Message, tag=4):
    """The answer to `Enter(asked)`: agreed, or too late (`round` is the earliest that may be asked for)."""

    asked: int
    round: int
    agreed: bool


class Init(Message, tag=5):
    """What a part is to begin with. Payload: the vectors named (`model/vectors.py`), parameters first."""

    part: int
    names: Names = ("params",)


class Pull(Message, tag=6):
    """Ask for a part as it is after `round`; the answer is a `Full`."""

    part: int
    round: int


class Push(Message, tag=7, kw_only=True):
    """A gradient of one part. Payload: a stream of `codec`, empty where `skip`."""

    part: int
    seq: Round
    worker: int = 0  # whom it counts for: whose place in the round and in the ledger it takes
    incarnation: int = 0  # of that worker, as the shard has told it
    weight: Annotated[float, Meta(ge=1e-30, le=1e30)]  # how much it counts in the mean: its samples
    sender: int = 0  # the worker that sends it
    have: Count = 0  # the version of the part the sender holds
    codec: CodecText
    reply: CodecText  # the codec the sender would like the answer in
    reply_cost: float  # the cheapest wish of a round is granted
    hyper: list[list[float]]  # for each parameter group
    used: bytes  # one bit a piece, empty: all
    bound: Annotated[int, Meta(ge=WHOLE_ROUND)] = WHOLE_ROUND  # or how far the slowest worker may be behind
    skip: bool = False  # it holds NaN or infinity: this round leaves the part as it is
    save: bool = False  # snapshot the part after this round
    slot: int = -1  # of the sender's shared memory, where the values are there and not in the payload
    statistics: bytes = b""  # what that worker's layers of the part have seen since its last push
    decisions: Decisions | None = None
    # Where workers update the parameters: what became of each piece's gradient of the round before, a
    # `Fate` each; empty: steps were taken with all of them.
    fates: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    news: Annotated[bytes, Meta(max_length=NEWS_LIMIT)] = b""  # what the first worker tells all others
    early: bool = False  # it counts once the worker's `Commit` of the round has come
    # Of the parameters that the worker holds, four bytes a piece, with one part in turn; empty: not now.
    checksums: Annotated[bytes, Meta(max_length=CHECKSUMS_LIMIT)] = b""
    commit: "Commit | None" = None  # to the round, with the last push of it


class Full(Message, tag=8, kw_only=True):
    """A whole part. Payload: float32."""

    part: int
    version: int
    seq: int  # of the push or the `Fetch` that it answers; 0: it answers a `Pull`
    squares: float = 0.0  # as in `Norm`, for a worker that it did not reach
    slot: int = -1  # of the shard's shared memory
    statistics: bytes = b""  # what all workers' layers of the part have seen
    decisions: Decisions | None = None
    used: bytes = b""  # where workers update: the pieces that had a gradient on any of them, empty: all
    news: bytes = b""
    skip: bool = False  # the round was skipped: a worker's gradient was not finite


class Delta(Message, tag=9, kw_only=True):
    """What turns version `version - 1` of a part into `version`. Payload: a stream of `codec`."""

    part: int
    version: int
    seq: int
    codec: str  # empty: nothing changed
    last: bool  # the worker is up to date after it
    squares: float = 0.0
    statistics: bytes = b""
    decisions: Decisions | None = None
    used: bytes = b""
    news: bytes = b""
    skip: bool = False


class Norm(Message, tag=10):
    """The sum of squares of a part's mean gradient, so that workers can add up all parts."""

    part: int
    seq: int
    squares: float


class Scale(Message, tag=11):
    """What to multiply the mean gradient of a round with; the same from every worker."""

    seq: int
    scale: float


class Ask(Message, tag=12):
    """No answer to a push yet: is it there?"""

    part: int
    seq: int
    have: int


class Missing(Message, tag=13):
    """The push of round `seq` is not there, send it again; 0: the part's first parameters are not."""

    part: int
    seq: int


class Saved(Message, tag=14):
    """A worker wrote its own file of a checkpoint. Payload: the record of the file."""

    round: int


class Snapped(Message, tag=15):
    """A shard wrote its file of a checkpoint. Payload: the records of all files it knows of."""

    round: int
    error: str = ""


class Beat(Message, tag=16):
    """I am here; a shard sends it back as it came, payload and all, to measure a link by."""

    at: float


class Leave(Message, tag=17):
    """The worker ends; later rounds do without it.

    `moved`: it goes on with this policy as the next model of the run, as all workers do.
    """

    moved: Annotated[str, Meta(max_length=POLICY_LIMIT)] = ""


class Refusal(Message, tag=18):
    """Why the shard will not do what was asked. `stale`: another process has this worker's place."""

    message: str
    hint: str
    stale: bool = False


class Left(Message, tag=19):
    """The worker has left."""


class Recorded(Message, tag=20):
    """The record of a worker's file of a checkpoint has come in."""

    round: int


class AskSnapped(Message, tag=21):
    """No `Snapped` yet: is the shard's file of a checkpoint written, and are all records there?"""

    round: int


class Commit(Message, tag=22):
    """All pushes of a round are made; `skip`: one of them, to whichever shard, was not finite.

    No part is updated before all who push to the round have said so; if one skips it, all parts do.
    It travels with the last push, to other shards by itself, and again with every `Ask`.
    """

    seq: Round
    skip: bool = False
    # What the script has set since the last round, alike on all workers: the parameters of parts, one bit
    # each, empty: none; and whether the optimizer's state is another one.
    changed: Annotated[bytes, Meta(max_length=1 << 16)] = b""
    loads: bool = False


class Wanted(Message, tag=23):
    """All workers have said that they set a part before round `seq`: to what? Asked of the first."""

    part: int
    seq: int


class Put(Message, tag=24):
    """What a part is to be before it is updated in round `seq`. Payload: the vectors named."""

    part: int
    seq: int
    names: Names


class AskState(Message, tag=25):
    """The optimizer's state of a part as it is after `round`."""

    part: int
    round: int


class State(Message, tag=26):
    """The answer to `AskState`. Payload: the vectors named."""

    part: int
    round: int  # that was asked for
    names: Names


class Follow(Message, tag=27, kw_only=True):
    """Ask to read the model and take no part. `knows`: the table is known; only the round is asked for."""

    protocol: int
    run: Annotated[str, Meta(max_length=1024)] = ""  # empty: whichever the shard belongs to
    shard: Count
    shards: Round
    knows: bool = False


class Followed(Message, tag=28):
    """The last round that any part here has begun. Payload: the `Table`, unless it is known.

    -1: no worker has brought the model yet; when one has, this comes again.
    """

    run: str
    round: int


class Fetch(Message, tag=29):
    """Ask for all parts of the shard as they are after `round`, each as soon as it is.

    `whole`: after exactly that round. Else after a later one too, as pushes have left the part by then.
    `follows`: the asker has, or will have, the round before.
    """

    round: Annotated[int, Meta(ge=0, le=ROUND_LIMIT)]
    whole: bool = True
    follows: bool = False


class Passed(Message, tag=30):
    """Some part will not be at the round of a `Fetch` any more; `round` is the last that has begun.

    `whole`: rounds are. Else workers do not wait for each other, and no round is.
    """

    asked: int
    round: int
    whole: bool


class Over(Message, tag=31):
    """The shard ends; nothing comes after it."""


OF_FOLLOWERS = (Follow, Fetch, Beat, Leave)  # all that a key says which may only follow

Any = (
    Hello
    | Welcome
    | Enter
    | Entered
    | Init
    | Pull
    | Push
    | Full
    | Delta
    | Norm
    | Scale
    | Ask
    | Missing
    | Saved
    | Snapped
    | Beat
    | Leave
    | Refusal
    | Left
    | Recorded
    | AskSnapped
    | Commit
    | Wanted
    | Put
    | AskState
    | State
    | Follow
    | Followed
    | Fetch
    | Passed
    | Over
)
