"""Train a small network on scikit-learn's digits, alone or with several workers.

python examples/digits.py
shoestring run --workers 2 examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py

Against a plain training script it differs in the three lines that say `shoestring`, and in
that each worker takes its own share of the data.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import shoestring

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=16)
arguments = parser.parse_args()

here = shoestring.init()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
split = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
x, test_x, y, test_y = (torch.as_tensor(part) for part in split)
x, test_x = x.float().view(-1, 1, 8, 8), test_x.float().view(-1, 1, 8, 8)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 16, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer = shoestring.wrap(model, optimizer)

batch = 64 // here.workers  # together the workers take the same batch as one alone
for _ in range(arguments.epochs):
    order = torch.randperm(len(x))  # the same on every worker, as the seed is
    steps = len(x) // 64
    for rows in order[here.worker :: here.workers][: steps * batch].split(batch):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if here.worker == 0:
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    print(f"accuracy {accuracy:.4f}")
