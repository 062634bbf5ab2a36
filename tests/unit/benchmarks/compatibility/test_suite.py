"""Scripts of every kind come out as the committed results say, and none of them wrong."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.compatibility import suite, worker, worlds
from benchmarks.compatibility.__main__ import main
from benchmarks.compatibility.case import case
from benchmarks.compatibility.cases import CASES
from benchmarks.compatibility.compare import EXACT, MismatchError, check_alike
from benchmarks.compatibility.outcome import Facts, Outcome, flatten
from benchmarks.compatibility.suite import QUICK, SETTINGS

RESULTS = Path(suite.__file__).parents[1] / "results" / "compatibility.json"


@pytest.fixture(scope="module")
def known():
    rows = json.loads(RESULTS.read_text())["rows"]
    return {(row["case"], row["mode"], row["codec"]): row["result"] for row in rows}


def test_names_of_cases_are_unique():
    with pytest.raises(ValueError, match="two cases"):
        case("SGD")(lambda world: {})


def test_the_committed_results_are_of_all_cases_and_none_is_wrong(known):
    wanted = {
        (name, setting.mode, setting.codec)
        for name, one in CASES.items()
        for setting in SETTINGS
        if setting.mode in one.modes
    }
    assert known.keys() == wanted
    assert set(known.values()) == {"equal", "trains", "refused"}


class Unwrapped(worlds.WrapModelWorld):
    """`wrap` does nothing: each worker trains by itself."""

    def model(self, model, *, unused=False):
        bare = worlds.bare(model)
        object.__setattr__(bare, "no_sync", nullcontext)
        if not hasattr(bare, "module"):
            object.__setattr__(bare, "module", bare)
        return model

    def meet(self):
        pass  # the first worker has run to its end before the second begins


# Those that talk by themselves, and those that a compiler would take long for.
LEFT_OUT = [name for name in CASES if "process group" in name or "DDP model" in name or "ompiled" in name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
def test_without_any_exchange_no_case_passes(name, tmp_path):
    outcomes = []
    for rank in range(2):
        torch.manual_seed(1)
        world = Unwrapped(rank, tmp_path)
        found = {key: worker.inner(value) for key, value in CASES[name].script(world).items()}
        outcomes.append(Outcome(Facts([*world.losses]), flatten(found)))
    with pytest.raises(MismatchError, match="workers differ"):
        check_alike(tuple(outcomes))


@pytest.mark.slow
def test_scripts_come_out_as_committed(known, tmp_path):
    chosen = [setting for setting in SETTINGS if setting.codec == EXACT or setting.mode == "wrap-model"]
    rows = suite.measure(QUICK, chosen, tmp_path, print)
    assert len(rows) == sum(setting.mode in CASES[name].modes for name in QUICK for setting in chosen)
    for row in rows:
        assert row.result == known[row.case, row.mode, row.codec], row


def test_no_case_of_that_name(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--case", "no such case"])
    assert left.value.code == 2
    assert "no case is left" in capsys.readouterr().err
