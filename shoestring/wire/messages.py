"""What workers and shards say to each other.

A message is a header (one of the classes below) and one payload, possibly empty.
Workers speak `Hello, Enter, Init, Pull, Push, Scale, Ask, Saved, Beat, Leave`; shards
answer with `Welcome, Entered, Full, Delta, Norm, Missing, Snapped, Refusal, Beat`.

The order of a worker's life: `Hello` with the table of the model as payload, answered
by `Welcome`; `Enter`, naming the first round it will take part in, answered by
`Entered`; then, for each part, `Init` where the shard holds nothing yet, else `Pull`.
After that a `Push` a part and round, each answered by a `Full` or a `Delta`.

A push is named by `(worker, incarnation, seq)`; `seq` is the round it belongs to. The
answer to it is its acknowledgement. All fields are data with fixed types: decoding a
message runs nothing.
"""

import msgspec

PROTOCOL = 4

WHOLE_ROUND = -1  # `Push.bound` of a push that is summed with those of all workers


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The base of all headers."""


class Hello(Message, tag=1):
    """Ask to take part. Payload: the `Table` of the model."""

    protocol: int
    run: str
    worker: int
    workers: int
    incarnation: int
    shard: int
    shards: int
    shared: str = ""  # the name of memory the worker writes, where both are on one machine


class Welcome(Message, tag=2):
    """The worker fits. `round` is the last one any part here has begun; `empty`: no parameters yet."""

    protocol: int
    round: int
    empty: bool
    lease_s: float
    shared: str = ""  # the name of memory the shard writes, if it has opened the worker's


class Enter(Message, tag=3):
    """Take part from this round on. `shares`: the worker has opened the shard's memory."""

    round: int
    shares: bool = False


class Entered(Message, tag=4):
    """Agreed, or too late (`round` then is the earliest that may be asked for)."""

    round: int
    agreed: bool


class Init(Message, tag=5):
    """The first parameters of a part. Payload: float32."""

    part: int


class Pull(Message, tag=6):
    """Ask for a part as it is after `round`; the answer is a `Full`."""

    part: int
    round: int


class Push(Message, tag=7):
    """One worker's gradient of one part. Payload: a stream of `codec`, empty where `skip`."""

    part: int
    incarnation: int
    seq: int
    have: int  # the version of the part this worker holds
    weight: float  # how much it counts in the mean, usually its number of samples
    codec: str
    reply: str  # the codec the worker would like the answer in
    reply_cost: float  # the cheapest wish of a round is granted
    hyper: list[list[float]]  # for each parameter group
    used: bytes  # one bit a piece, empty: all
    bound: int = WHOLE_ROUND  # or how many pushes the slowest worker may be behind
    skip: bool = False  # it holds NaN or infinity: this round leaves the part as it is
    save: bool = False  # snapshot the part after this round
    plan: str = ""  # what all workers will do from some later round on, as decided by the first
    slot: int = -1  # of the worker's shared memory, where the values are there and not in the payload
    statistics: bytes = b""  # what this worker's layers of the part have seen since its last push
    pace: float = 0.0  # seconds that the worker's own work took it of late; 0: not said


class Full(Message, tag=8):
    """A whole part. Payload: float32."""

    part: int
    version: int
    seq: int
    plan: str = ""
    squares: float = 0.0  # as in `Norm`, for a worker that it did not reach
    slot: int = -1  # of the shard's shared memory
    statistics: bytes = b""  # what all workers' layers of the part have seen
    paces: list[float] = []  # of all who took part, in their order


class Delta(Message, tag=9):
    """What turns version `version - 1` of a part into `version`. Payload: a stream of `codec`."""

    part: int
    version: int
    seq: int
    codec: str  # empty: nothing changed
    last: bool  # the worker is up to date after it
    plan: str = ""
    squares: float = 0.0
    statistics: bytes = b""
    paces: list[float] = []


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
    """It is not there; send it again."""

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
    """The worker ends; later rounds do without it."""


class Refusal(Message, tag=18):
    """Why the shard will not do what was asked. `stale`: another process has this worker's place."""

    message: str
    hint: str
    stale: bool = False


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
)
