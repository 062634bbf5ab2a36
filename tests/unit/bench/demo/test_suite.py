"""The demo's own parts; `make demo` runs the whole."""

from pathlib import Path

import torch

from shoestring.bench.demo.suite import DemoRow, draw, expect
from shoestring.bench.demo.training import build_net, split_digits


def test_it_says_what_to_expect() -> None:
    assert "20 Mbit/s" in expect(20.0)
    assert "about 107 s" in expect(20.0)


def test_the_net_fits_the_digits_and_has_batchnorm() -> None:
    x, y, test_x, test_y = split_digits()
    assert len(x) == len(y) == 1200
    assert len(test_x) == len(test_y) == 597
    net = build_net()
    assert net(x[:4]).shape == (4, 10)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in net.modules())


def test_charts_are_written(tmp_path: Path) -> None:
    rows = [
        DemoRow("float32", 80.0, 700_000_000, 0.99, [(0.0, 2.0), (80.0, 0.1)]),
        DemoRow("auto", 9.0, 12_000_000, 0.99, [(0.0, 2.0), (9.0, 0.1)]),
    ]
    picture, page = draw(rows, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "auto: 9 s, 12.0 MB" in text
    assert 'src="http' not in text  # it works offline
