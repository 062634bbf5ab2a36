"""The shapes of known models' parameters, in the order in which they are registered."""

from collections.abc import Callable
from itertools import pairwise

Shapes = list[tuple[int, ...]]


def resnet18() -> Shapes:
    """He et al., 2015: 11.7 million values."""
    return _resnet((2, 2, 2, 2), _basic, widening=1)


def resnet50() -> Shapes:
    """He et al., 2015: 25.6 million values."""
    return _resnet((3, 4, 6, 3), _bottleneck, widening=4)


def vgg16() -> Shapes:
    """Simonyan and Zisserman, 2014: 138 million values, 103 of them in one tensor."""
    channels = (3, 64, 64, 128, 128, *(256,) * 3, *(512,) * 6)
    features = (512 * 7 * 7, 4096, 4096, 1000)
    convolutions = [_biased(made, taken, 3, 3) for taken, made in pairwise(channels)]
    dense = [_biased(made, taken) for taken, made in pairwise(features)]
    return [shape for layer in [*convolutions, *dense] for shape in layer]


def gpt2() -> Shapes:
    """Radford et al., 2019, the smallest: 124 million values; the head is the embedding."""
    width, layers = 768, 12
    norm: Shapes = [(width,), (width,)]
    attention = [*_biased(3 * width, width), *_biased(width, width)]
    feed_forward = [*_biased(4 * width, width), *_biased(width, 4 * width)]
    layer = [*norm, *attention, *norm, *feed_forward]
    return [(50257, width), (1024, width), *layer * layers, *norm]


MODELS: dict[str, Callable[[], Shapes]] = {
    "ResNet-18": resnet18,
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "GPT-2": gpt2,
}


def _biased(made: int, *taken: int) -> Shapes:
    return [(made, *taken), (made,)]


def _convolution(made: int, taken: int, side: int) -> Shapes:
    """A convolution without bias, and BatchNorm."""
    return [(made, taken, side, side), (made,), (made,)]


def _basic(taken: int, inner: int) -> Shapes:
    return _convolution(inner, taken, 3) + _convolution(inner, inner, 3)


def _bottleneck(taken: int, inner: int) -> Shapes:
    return _convolution(inner, taken, 1) + _convolution(inner, inner, 3) + _convolution(4 * inner, inner, 1)


def _resnet(depths: tuple[int, ...], block: Callable[[int, int], Shapes], *, widening: int) -> Shapes:
    shapes, taken = _convolution(64, 3, 7), 64
    for stage, depth in enumerate(depths):
        inner = 64 << stage
        for _ in range(depth):
            made = widening * inner
            shapes += block(taken, inner)
            if taken != made:  # the way past the block
                shapes += _convolution(made, taken, 1)
            taken = made
    return [*shapes, *_biased(1000, taken)]
