"""Two small trainings, run for the gradients they produce on the way.

`conv` is a residual net with BatchNorm on images, `gpt` a byte-level transformer on
Python source: convolutions and fully connected layers, SGD and AdamW. The seed is
fixed, so a recipe and its data give the same gradients on the same machine.

This module imports torch; whoever imports it does so when a capture is asked for.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoestring.bench.data import Images
from shoestring.bench.recipe import Progress, Recipe

Gradients = list[tuple[str, NDArray[np.float32]]]


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, around them a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if inner != outer or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def residual_net(w: int) -> nn.Module:
    """Build a net of six residual blocks; 2.8 million parameters at `w` 64."""
    widths = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1), (2 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
    return nn.Sequential(
        nn.Conv2d(1, w, 3, 1, 1, bias=False),
        nn.BatchNorm2d(w),
        nn.ReLU(),
        *(ResidualBlock(*sizes) for sizes in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * w, 10),
    )


class TransformerBlock(nn.Module):
    """Causal attention and a two-layer perceptron, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.attention(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [b, heads, t, d / heads] each
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(b, t, d))
        deeper: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + deeper


class Transformer(nn.Module):
    """A byte-level language model; 1.9 million parameters at width 192 and 4 layers."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def capture_conv(recipe: Recipe, images: Images, progress: Progress) -> dict[int, Gradients]:
    """Train the residual net by SGD with momentum; return the gradients of the wanted steps."""
    with _torch_set_up(recipe.seed):
        model = residual_net(recipe.width)
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        pixels = torch.from_numpy(images.pixels.copy())
        labels = torch.from_numpy(images.labels.astype(np.int64))

        def loss_of_batch() -> Tensor:
            chosen = torch.randint(len(labels), (recipe.batch,))
            x = (pixels[chosen].unsqueeze(1).float() / 255 - 0.286) / 0.353
            return nn.functional.cross_entropy(model(x), labels[chosen])

        optimizer = torch.optim.SGD(model.parameters(), recipe.learning_rate, momentum=0.9)
        return _train(recipe, model, optimizer, loss_of_batch, progress)


def capture_gpt(recipe: Recipe, text: NDArray[np.uint8], progress: Progress) -> dict[int, Gradients]:
    """Train the transformer by AdamW; return the gradients of the wanted steps."""
    with _torch_set_up(recipe.seed):
        model = Transformer(recipe.width, recipe.layers, recipe.heads, recipe.context)
        corpus = torch.from_numpy(text.astype(np.int64))
        window = torch.arange(recipe.context + 1)

        def loss_of_batch() -> Tensor:
            starts = torch.randint(len(corpus) - recipe.context, (recipe.batch, 1))
            pieces = corpus[starts + window]
            logits = model(pieces[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())

        optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate)
        return _train(recipe, model, optimizer, loss_of_batch, progress)


def _train(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Any,
    loss_of_batch: Callable[[], Tensor],
    progress: Progress,
) -> dict[int, Gradients]:
    captured = {}
    for step in range(1, recipe.steps + 1):
        progress(f"capturing `{recipe.model}` gradients", step - 1, recipe.steps)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of_batch())
        if step in recipe.captures:
            captured[step] = [(name, _gradient_of(p)) for name, p in model.named_parameters()]
        optimizer.step()
    return captured


def _gradient_of(parameter: nn.Parameter) -> NDArray[np.float32]:
    assert parameter.grad is not None
    # Contiguous, as torch's own order of a convolution may be channels last; a copy of its own.
    return np.array(parameter.grad.contiguous().numpy(), np.float32)


@contextmanager
def _torch_set_up(seed: int) -> Iterator[None]:
    """Fix the seed and use every core; leave torch as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
