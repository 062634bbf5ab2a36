"""Train a convolutional net on scikit-learn's digits; goes on where a checkpoint ends.

python examples/fleet/conv.py --batch 128 --steps 400
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import shoestring

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=400)
arguments = parser.parse_args()

shoestring.init()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
pixels = torch.as_tensor(images / 16).float().view(-1, 1, 8, 8)
data = torch.utils.data.TensorDataset(pixels, torch.as_tensor(labels))

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 16, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = shoestring.wrap(model, optimizer, codec="float32")
loader = torch.utils.data.DataLoader(data, batch_sampler=shoestring.batches(data, arguments.batch))

for _ in shoestring.epochs(-(-arguments.steps // len(loader))):
    for x, y in loader:
        if optimizer.steps < arguments.steps:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.report(loss=loss.item(), samples=len(x), total=arguments.steps)
            optimizer.step()
            optimizer.zero_grad()
print(f"loss {loss.item():.4f} after {optimizer.steps} steps")
