"""Agreed draws are equal whatever was drawn before, and leave no trace."""

import random

import numpy as np
import torch

from shoestring.worker.data.agreement import AgreedRandom


class Owner:
    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator


def draw(owner: Owner) -> list[float]:
    return [
        random.random(),
        float(np.random.random()),
        float(torch.rand(())),
        float(torch.rand((), generator=owner.generator)),
    ]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def agreed_draws(seed: int, entropy: tuple[int, ...], owner: Owner) -> list[list[float]]:
    seed_all(seed)
    agreed = AgreedRandom(entropy, owner)
    found = []
    for _ in range(3):
        with agreed:
            found.append(draw(owner))
        draw(owner)
    return found


def test_draws_follow_from_the_entropy_alone() -> None:
    first = agreed_draws(1, (5, 0), Owner(torch.Generator().manual_seed(1)))
    assert agreed_draws(2, (5, 0), Owner(torch.Generator().manual_seed(2))) == first
    assert len({value for found in first for value in found}) == 12
    for other in ((5, 1), (6, 0), (5, 0, 1)):
        assert agreed_draws(1, other, Owner(None))[0][:3] != first[0][:3]


def test_everything_is_as_before() -> None:
    def run(*, is_agreeing: bool) -> list[list[float]]:
        seed_all(3)
        owner = Owner(torch.Generator().manual_seed(3))
        agreed = AgreedRandom((7,), owner)
        found = [draw(owner)]
        if is_agreeing:
            with agreed:
                draw(owner)
        return [*found, draw(owner)]

    assert run(is_agreeing=True) == run(is_agreeing=False)


def test_an_error_inside_leaves_everything_as_before() -> None:
    seed_all(4)
    owner = Owner(torch.Generator().manual_seed(4))
    own, agreed = owner.generator, AgreedRandom((7,), owner)
    want = random.getstate()
    try:
        with agreed:
            draw(owner)
            raise RuntimeError
    except RuntimeError:
        pass
    assert (owner.generator, random.getstate()) == (own, want)


def test_agreed_draws_may_lie_within_others() -> None:
    outer, inner, owner = AgreedRandom((1,)), AgreedRandom((2,)), Owner(None)
    with outer:
        draw(owner)
        with inner:
            first = draw(owner)
        rest = draw(owner)
    outer, inner = AgreedRandom((1,)), AgreedRandom((2,))
    with inner:
        assert draw(owner) == first
    with outer:
        draw(owner)
        assert draw(owner) == rest
