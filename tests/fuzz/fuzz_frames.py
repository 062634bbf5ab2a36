"""Fuzz the one decoder of messages: whatever comes is a message or a `WireError`.

    python tests/fuzz/fuzz_frames.py --messages 1000000 --seed 7

Half of the mutants carry a checksum that matches, or no mutation would get past it.
A decoded mutant must survive being encoded and decoded again.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from random import Random

import psutil

from shoestring.errors import WireError
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.fuzz.summary import Summary as Common
from tests.unit.wire.samples import SAMPLES

# The first bytes of all kinds of MessagePack values.
_BYTES = (0x00, 0x7F, 0x80, 0x90, 0x91, 0x9F, 0xA1, 0xC0, 0xC1, 0xC4, 0xC9, 0xCA, 0xCB, 0xCF, 0xD3, 0xD9,
          0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF)  # fmt: skip


@dataclass
class Summary(Common):
    """What the decoder did with the messages."""

    messages: int = 0


def mutate(data: bytes, random: Random) -> bytes:
    """Change some bytes, or cut, repeat, insert, or nest them."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        place = random.randrange(len(out) + 1)
        match random.randrange(8):
            case 0 if out:
                out[place % len(out)] ^= 1 << random.randrange(8)
            case 1 if out:
                out[place % len(out)] = random.choice(_BYTES)
            case 2:
                out[place:place] = bytes([random.choice(_BYTES)])
            case 3:
                del out[place:]
            case 4:
                del out[place : place + random.randrange(1, 5)]
            case 5:
                out[place:place] = out[: random.randrange(1, 20)]
            case 6:
                out[place:place] = random.randbytes(random.randrange(1, 9))
            case _:
                out[place:place] = bytes([random.choice((0x91, 0x92, 0x81))]) * random.choice((1, 50, 3000))
    return bytes(out)


def mutant(random: Random) -> list[bytes]:
    """A message that was tampered with."""
    header, payload = frames.encode(random.choice(SAMPLES), random.randbytes(random.choice((0, 1, 30))))
    payload = bytes(payload)
    if random.random() < 0.6:
        body = mutate(header[4:], random)
        return [frames._CRC.pack(frames._checksum(body, payload)) + body, payload]
    parts = [header, payload]
    match random.randrange(4):
        case 0:
            parts[0] = mutate(header, random)
        case 1:
            parts[1] = mutate(payload, random)
        case 2:
            parts += [random.randbytes(3)] * random.randrange(1, 4)
        case _:
            del parts[random.randrange(2) :]
    return parts


def attempt(received: list[bytes], summary: Summary) -> str:
    """Decode one message; return what was wrong, or nothing."""
    summary.messages += 1
    begin = time.perf_counter()
    try:
        message, payload = frames.decode(received)
    except WireError:
        summary.errors += 1
        return ""
    except Exception as error:  # exactly what is looked for
        summary.foreign_exceptions += 1
        return f"{type(error).__name__}: {error}"
    finally:
        summary.slowest_s = max(summary.slowest_s, time.perf_counter() - begin)
    summary.decoded += 1
    first = frames.encode(message, payload)
    again = frames.encode(*frames.decode(first))
    # As bytes, not as values: NaN does not equal itself.
    if not isinstance(message, say.Message) or again[0] != first[0] or bytes(payload) != received[1]:
        summary.broken_promises += 1
        return "it comes back as another message"
    return ""


def fuzz(messages: int, seed: int) -> Summary:
    summary, random = Summary(seed=seed), Random(seed)
    begin, memory = time.monotonic(), 0
    for number in range(messages):
        received = mutant(random)
        found = attempt(received, summary)
        if found:
            summary.findings.append(f"seed {seed} message {number}: {found} {[p.hex() for p in received]}")
        if number % 1000 == 0:
            rss = psutil.Process().memory_info().rss
            memory = memory or rss
            summary.memory_growth_mb = max(summary.memory_growth_mb, (rss - memory) / 2**20)
    summary.seconds = round(time.monotonic() - begin, 3)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the decoder of messages.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    summary = fuzz(args.messages, args.seed)
    print(json.dumps(asdict(summary), indent=1))
    return 0 if summary.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
