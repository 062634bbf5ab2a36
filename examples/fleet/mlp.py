"""Train a wide perceptron on scikit-learn's digits; goes on where a checkpoint ends.

python examples/fleet/mlp.py --batch 256 --steps 400
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import shoestring

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--steps", type=int, default=400)
arguments = parser.parse_args()

shoestring.init()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.as_tensor(images / 16).float(), torch.as_tensor(labels))

model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
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
