"""A worker whose steps take a time by a timer; it notes when each ended and what the parameters were.

Run as `python -m benchmarks.follow.training OUT STEPS STEP_MS VALUES`, by `benchmarks.follow`.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoestring

SIDE = 512


class Wide(nn.Module):
    """Square matrices, each of which multiplies by itself what its gradient is to be."""

    def __init__(self, values: int) -> None:
        super().__init__()
        count = max(1, values // SIDE**2)
        self.matrices = nn.ParameterList(0.02 * torch.randn(SIDE, SIDE) for _ in range(count))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        products = [(own * other).sum() for own, other in zip(self.matrices, gradients, strict=True)]
        return torch.stack(products).sum()


def main() -> None:
    out, steps, step_s, values = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]) / 1e3,
        int(sys.argv[4]),
    )
    run = shoestring.init()
    torch.manual_seed(0)
    model = Wide(values)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, shared = shoestring.wrap(model, optimizer)
    torch.manual_seed(1 + run.worker)
    sets = [[0.01 * torch.randn(SIDE, SIDE) for _ in model.matrices] for _ in range(4)]
    hashes: dict[int, str] = {}
    ended: list[float] = []
    for step in range(steps):
        began = time.monotonic()
        if run.worker == 0:  # instead of computing: the timer is longer
            hashes.setdefault(shared.driver.rounds, shared.parameter_hash())
        time.sleep(max(0.0, began + step_s - time.monotonic()))
        model(sets[step % len(sets)]).backward()
        shared.step()
        shared.zero_grad()
        ended.append(time.monotonic())
    hashes.setdefault(shared.driver.rounds, shared.parameter_hash())
    report = {"hashes": hashes, "ended": ended, "traffic": shared.traffic.down}
    (out / f"worker-{run.worker}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
