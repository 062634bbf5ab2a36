"""Train a small transformer to predict the next byte of Python's own source; goes on where a checkpoint ends.

python examples/fleet/text.py --batch 16 --steps 200
"""

import argparse
import argparse as some_source
from pathlib import Path

import torch
from torch import nn

import shoestring

LENGTH, WIDTH = 64, 96

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

shoestring.init()
torch.manual_seed(0)
text = torch.frombuffer(bytearray(Path(some_source.__file__).read_bytes()), dtype=torch.uint8).long()
rows = text[: (len(text) - 1) // LENGTH * LENGTH].view(-1, LENGTH)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH - 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        return self.head(self.layers(self.bytes(x) + self.places, mask=mask, is_causal=True))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = shoestring.wrap(model, optimizer, codec="float32")
loader = torch.utils.data.DataLoader(rows, batch_sampler=shoestring.batches(rows, arguments.batch))

for _ in shoestring.epochs(-(-arguments.steps // len(loader))):
    for x in loader:
        if optimizer.steps < arguments.steps:
            scores = model(x[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.report(loss=loss.item(), samples=len(x), total=arguments.steps)
            optimizer.step()
            optimizer.zero_grad()
print(f"loss {loss.item():.4f} after {optimizer.steps} steps")
