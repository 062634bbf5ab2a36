"""A run travels through the environment unchanged."""

from pathlib import Path

import pytest

from shoestring.config import Run
from shoestring.errors import UsageError


def test_the_environment_gives_the_run_back() -> None:
    run = Run(
        name="r",
        worker=1,
        workers=3,
        local=1,
        shards=("tcp://127.0.0.1:1", "ipc:///a/b"),
        folder=Path("/f"),
        keys=Path("/k"),
        checkpoint=Path("/c"),
        every=7,
        keep=2,
        resume=Path("/c/step-000000007"),
        codec="dct:block=8,step=2.0",
        policy="local:16",
        timeout_s=12.5,
    )
    assert Run.here(run.to_environment()) == run
    assert Run.here(Run().to_environment()) == Run()
    assert Run.here({}) == Run()


@pytest.mark.parametrize(
    "change", [{"WORKER": "x"}, {"WORKER": "3"}, {"WORKER": "-1"}, {"WORKERS": "2"}, {"TIMEOUT_S": "soon"}]
)
def test_nonsense_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Run.here({f"SHOESTRING_{name}": value for name, value in change.items()})
