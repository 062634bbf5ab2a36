"""Is anything alive? Seconds, the first thing to run after a change."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoestring

COMMAND = Path(sys.executable).with_name("shoestring")


def test_import_gives_the_public_names():
    assert all(hasattr(shoestring, name) for name in shoestring.__all__)


def test_command_prints_the_version():
    done = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"shoestring {shoestring.__version__}\n"


def test_command_prints_help():
    done = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert "codecs" in done.stdout


@pytest.mark.parametrize("spec", ["dct", "float32"])
def test_what_is_sent_plus_what_is_kept_is_what_came_in(spec):
    layout = shoestring.Layout.of([(24, 3, 3, 3), (24,)])
    # Quarters: exact under every codec's rounding to its own grid.
    gradient = (np.random.default_rng(0).integers(-40, 41, layout.total) / 4).astype(np.float32)
    codec = shoestring.make_codec(spec)
    feedback = shoestring.Feedback(codec, layout)

    payload = feedback.encode(gradient)

    assert payload.nbytes <= codec.max_bytes(layout)
    sent = np.empty_like(gradient)
    codec.decode(payload, layout, sent)
    np.testing.assert_array_equal(sent + feedback.kept, gradient)
