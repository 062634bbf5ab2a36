"""Record the parameters that short runs end with: `python -m tests.golden.runs.record OUT.json`.

Run it before and after a change that must not change a bit, on one machine, and compare the two files.
Those with `float32` are the same on every processor; `recorded.json` holds some of them for a test.
"""

import itertools
import json
import sys
from pathlib import Path

import torch

from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.golden.runs.schedule import run
from tests.golden.runs.training import Bowl, train
from tests.unit.worker.cluster import Cluster

CODECS = ("float32", "dct")
TRAINING = [
    *itertools.product(CODECS, ("every", "every:delay=1", "local:3"), (1, 2, 3, 4), (1, 2, 3)),
    *itertools.product(CODECS, ("every:warmup=2", "local:h=2,outer=nesterov"), (2,), (2,)),
    *itertools.product(CODECS, ("bounded:2", "async"), (1,), (1, 2)),
]
SCHEDULES = list(itertools.product(CODECS, (1, 3, 1 << 30), (2, 3, 4)))


def hash_of(codec: str, policy: str, workers: int, shards: int) -> str:
    """What all workers' parameters hash to after a training."""

    def be_worker(here: Session) -> str:
        model = Bowl(here.run.worker)
        optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.5)
        model, optimizer = join(here, model, optimizer, codec=codec, policy=policy)
        train(model, optimizer)
        return optimizer.parameter_hash()

    with Cluster(workers, shards) as cluster:
        (only,) = set(cluster.train(be_worker))
    return only


def main(target: Path) -> None:
    found = {
        "training": {" ".join(map(str, case)): hash_of(*case) for case in TRAINING},
        "schedule": {f"{codec} {bound} {n}": run(n, bound, codec) for codec, bound, n in SCHEDULES},
    }
    target.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
