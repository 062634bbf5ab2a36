"""What each worker of `bench split` runs: `FOLDER even|auto GROUP CORE,CORE`. The second is slow."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoestring
from benchmarks.split.suite import MEASURED, STEPS

GLOBAL_BATCH = 128
_INPUTS, _WIDTH = 16, 512


def main(folder: Path, batch: str, group: Path, cores: list[int]) -> None:
    run = shoestring.init()
    os.sched_setaffinity(0, {cores[run.worker]})
    if run.worker == 1:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    source = torch.Generator().manual_seed(0)
    x = torch.randn(GLOBAL_BATCH * STEPS, _INPUTS, generator=source)
    data = TensorDataset(x, x[:, :8].abs().sum(1, keepdim=True))
    torch.manual_seed(1)
    middle = [layer for _ in range(24) for layer in (nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Tanh())]
    trunk = nn.Sequential(*middle)  # frozen: work that grows with the batch, and few values to exchange
    trunk.requires_grad_(False)
    model = nn.Sequential(nn.Linear(_INPUTS, _WIDTH), trunk, nn.Linear(_WIDTH, 1))
    model, optimizer = shoestring.wrap(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.001),
        batch="auto" if batch == "auto" else "even",
    )
    loader = DataLoader(data, batch_sampler=shoestring.batches(data, global_batch=GLOBAL_BATCH))
    share, began = 0, 0.0
    for inputs, wanted in loader:
        if optimizer.steps == STEPS - MEASURED:
            began = time.monotonic()
        share = len(inputs)
        loss: Any = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.monotonic() - began
    told = {
        "share": share,
        "samples_per_s": GLOBAL_BATCH * MEASURED / seconds,
        "hash": optimizer.parameter_hash(),
    }
    (folder / f"worker-{run.worker}.json").write_text(json.dumps(told))
    if run.worker == 0:
        trained = [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]
        np.save(folder / "parameters.npy", torch.cat(trained).numpy(), allow_pickle=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [int(core) for core in sys.argv[4].split(",")])
