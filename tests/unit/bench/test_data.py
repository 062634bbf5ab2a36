"""Reading IDX files: what is whole is read, what is damaged is named."""

import gzip
import struct

import numpy as np
import pytest

from shoestring.bench import data
from shoestring.errors import UsageError

PIXELS = np.random.default_rng(3).integers(0, 256, (5, 28, 28), np.uint8)
LABELS = np.array([0, 9, 3, 3, 1], np.uint8)


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def put(folder, pixels, labels, *, packed=False):
    for name, content in (("images-idx3", pixels), ("labels-idx1", labels)):
        path = folder / f"train-{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_variable", [False, True])
def test_fashion_mnist_is_read_from_a_named_folder(tmp_path, monkeypatch, packed, by_variable):
    put(tmp_path, idx(PIXELS), idx(LABELS), packed=packed)
    if by_variable:
        monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    images = data.load_images(None if by_variable else tmp_path)
    assert images.source == "fashion-mnist"
    np.testing.assert_array_equal(images.pixels, PIXELS)
    np.testing.assert_array_equal(images.labels, LABELS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "begins with ``"),
        (b"\x89PNG0000", "not an IDX file"),
        (struct.pack(">HBBI", 0, 0x0D, 1, 5), "not an IDX file"),
        (idx(PIXELS)[:9], "ends within its header"),
        (idx(PIXELS)[:-1], "has 3919 values where its header says 3920"),
        (idx(PIXELS) + b"0", "has more values where its header says 3920"),
        (struct.pack(">HBBIII", 0, 8, 3, 1 << 31, 28, 28), "more than 1073741824"),
        (idx(PIXELS[:, :27]), "expected (n, 28, 28)"),
        (idx(PIXELS[:3]), "expected (n, 28, 28) and (n,)"),
    ],
)
def test_damaged_file_is_refused(tmp_path, content, problem):
    with pytest.raises(UsageError) as error:
        data.load_images(put(tmp_path, content, idx(LABELS)))
    assert problem in error.value.message
    assert "Fashion-MNIST" in error.value.hint


def test_damaged_compression_is_refused(tmp_path):
    put(tmp_path, idx(PIXELS), idx(LABELS), packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"no gzip", whole[:40] + b"\xff" * 40 + whole[80:]):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="cannot be read"):
            data.load_images(tmp_path)


def test_unknown_label_and_missing_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match="a label 10, expected 0 to 9"):
        data.load_images(put(tmp_path, idx(PIXELS), idx(LABELS + 1)))
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(UsageError, match="has neither `train-labels-idx1-ubyte` nor"):
        data.load_images(tmp_path)


def test_digits_stand_in_where_there_is_no_fashion_mnist(tmp_path, monkeypatch):
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "nowhere")
    images = data.load_images()
    assert images.source == "digits"
    assert images.pixels.shape == (1797, 28, 28)
    assert images.pixels.max() == 240
    assert set(images.labels.tolist()) == set(range(10))


def test_text_is_python_source_of_bounded_size():
    text = data.load_text(1 << 17)
    assert text.size == 1 << 17
    assert b"def " in text.tobytes()


def test_a_python_without_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match="holds 0 bytes of Python source"):
        data.load_text()
