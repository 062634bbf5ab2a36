"""A byte-level GPT on Python's own source, with local steps.

    shoestring run --workers 2 --codec dct examples/gpt.py
    python examples/gpt.py --steps 200            # alone

Each worker takes 16 steps with its own AdamW, then all exchange what their parameters
moved by: with `dct` a few hundred times fewer bytes than exchanging every step.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

import shoestring

WIDTH, LAYERS, HEADS, CONTEXT = 128, 3, 4, 96


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places
        return self.head(self.norm(self.layers(x, mask=self.mask, is_causal=True)))


def read_source() -> torch.Tensor:
    """The standard library's files, in the order of their names, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def loss_of(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=640)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--local-steps", type=int, default=16)
    options.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    wanted = options.parse_args()

    world = shoestring.init()
    torch.manual_seed(0)
    text = read_source()
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    model = Gpt()
    adam = torch.optim.AdamW(model.parameters(), wanted.rate, betas=(0.9, 0.95), weight_decay=0.01)
    model, optimizer = shoestring.wrap(model, adam, policy=shoestring.LocalSteps(wanted.local_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / wanted.steps))
    )
    source = torch.Generator().manual_seed(1 + world.worker)
    while optimizer.steps < wanted.steps:
        loss = loss_of(model, train, torch.randint(len(train) - CONTEXT, (wanted.batch,), generator=source))
        loss.backward()
        optimizer.report(loss=loss.item(), samples=wanted.batch, total=wanted.steps)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.train(False)
    with torch.no_grad():
        places = torch.arange(0, len(held_out) - CONTEXT - 1, CONTEXT * 5)
        losses = [loss_of(model, held_out, some).item() * len(some) for some in places.split(64)]
    sent = optimizer.traffic
    if world.worker == 0:
        count, plain = sent.up + sent.down, 8 * optimizer.values * wanted.steps
        print(f"validation loss {sum(losses) / len(places):.4f}")
        print(f"sent and received {count} bytes, {plain / count:.0f} x fewer than float32 every step")


if __name__ == "__main__":
    main()
