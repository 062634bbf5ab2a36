"""The training whose parameters are recorded: every number in it is exact, so any machine gets the same bits.

Gradients are elementwise and made of small fractions; learning rate and momentum are powers of
two. So neither the order of torch's sums nor fused operations can change a bit.
"""

import torch
from torch import nn

SHAPES = ((64, 32, 3, 3), (256, 128), (300,), (130, 257), (5,), (96, 96))
STEPS = 12


class Bowl(nn.Module):
    """Parameters that are drawn towards a target of each worker and step."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker
        self.values = nn.ParameterList([nn.Parameter(fractions(shape, 7 + worker)) for shape in SHAPES])

    def forward(self, step: int) -> torch.Tensor:
        loss = torch.zeros(())
        for place, parameter in enumerate(self.values):
            target = fractions(tuple(parameter.shape), 1000 * step + 100 * place + self.worker)
            loss = loss + (parameter - target).square().sum()
        return loss


def fractions(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 1/512 between -1 and 1 that look like noise."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int64)
    mixed = (index * 2654435761 + seed * 40503 + (index // 97) * 69069) % 4294967291
    return ((mixed % 1024 - 512).to(torch.float32) / 512).view(shape)


def train(model: Bowl, optimizer: "torch.optim.Optimizer") -> None:
    for step in range(1, STEPS + 1):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
