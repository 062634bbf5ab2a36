"""Pushes of several workers that wait for nobody, in a fixed order, and what all end with."""

import hashlib

import numpy as np

from shoestring.codec.registry import make
from shoestring.wire import messages as say
from tests.unit.server.talk import PARTS, Talk

ROUNDS = 8
NO_BOUND = 1 << 30


def run(workers: int, bound: int, codec: str) -> str:
    """The hash of all parameters, the shard's and then each worker's, when all have pushed every round."""
    talk = Talk(workers).begin()
    held = [[np.zeros(part.size, np.float32) for part in PARTS] for _ in range(workers)]
    versions = [[0] * len(PARTS) for _ in range(workers)]
    pushed = [[0] * len(PARTS) for _ in range(workers)]
    answered = [[0] * len(PARTS) for _ in range(workers)]

    def take(said: list) -> None:
        for (who, message), payload in zip(said, talk.payloads, strict=True):
            worker = int(who.partition(".")[0])
            if isinstance(message, say.Full):
                held[worker][message.part][:] = np.frombuffer(payload, np.float32)
            elif isinstance(message, say.Delta):
                if message.codec:
                    layout = PARTS[message.part].layout
                    values = np.frombuffer(payload, np.uint8)
                    make(message.codec).decode(values, layout, held[worker][message.part], 1.0)
            else:
                continue
            versions[worker][message.part] = message.version
            answered[worker][message.part] = max(answered[worker][message.part], message.seq)

    order = np.random.default_rng((workers, bound % 97))
    while min(min(counts) for counts in pushed) < ROUNDS:
        worker, part = int(order.integers(workers)), int(order.integers(len(PARTS)))
        seq = pushed[worker][part] + 1
        if seq > ROUNDS or answered[worker][part] < seq - 1:
            take(talk.work())
            continue
        pushed[worker][part] = seq
        changed = {"bound": bound, "codec": codec, "have": versions[worker][part]}
        take(talk.push(part, worker, seq, **changed))
        if order.integers(2):  # a few pushes may come before there is time for any
            take(talk.work())
    take(talk.work())
    digest = hashlib.sha256(b"".join(talk.params()))
    for parts in held:
        for values in parts:
            digest.update(values.data)
    return digest.hexdigest()
