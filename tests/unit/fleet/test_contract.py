"""The contract of a fleet with its scripts: names that are written once, and results that are checked."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoestring
from shoestring.config import Run
from shoestring.errors import FleetError, UsageError
from shoestring.fleet import contract
from shoestring.fleet.contract import TrialRequest, TrialResult, read_number
from shoestring.fleet.engine.base import Task
from shoestring.fleet.engine.local import environment_of
from tests.unit.fleet.scripted import cpu

ROOT = Path(shoestring.__file__).parent
VARIABLES = {
    "SHOESTRING_BATCH",
    "SHOESTRING_MEMORY_BYTES",
    "SHOESTRING_PROBE",
    "SHOESTRING_PROBE_GATE",
    "SHOESTRING_PROBE_SECONDS",
    "SHOESTRING_PROBE_STEPS",
    "SHOESTRING_STOP",
}
GOOD = TrialResult([0.25, 0.5, 0.25], 10.0, 12.5, 1 << 30, 5)


def constants_of(path):
    """Every string and number that a module's code spells out, docstrings aside."""
    tree = ast.parse(path.read_text())
    is_docstring = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if id(node) not in is_docstring}


def test_only_the_contract_spells_its_names_and_its_exit_code():
    """Of a name that is written twice one could change alone: the other side would wait, or see a failure."""
    assert VARIABLES | {75} <= constants_of(ROOT / "fleet" / "contract.py")
    for path in (*ROOT.glob("fleet/**/*.py"), *ROOT.glob("worker/**/*.py"), *ROOT.glob("launch/**/*.py")):
        if path.name != "contract.py":
            assert not constants_of(path) & (VARIABLES | {75}), path


def test_the_contract_lists_its_variables():
    assert all(f"| `{name}` |" in contract.__doc__ for name in VARIABLES)


def test_a_request_reads_back_what_the_environment_says(tmp_path):
    for request in (TrialRequest(tmp_path / "a.json"), TrialRequest(tmp_path / "a", 7, 9, tmp_path / "gate")):
        assert TrialRequest.of(request.to_environment()) == request
        assert request.to_environment().keys() <= VARIABLES
    assert TrialRequest.of({}) is None
    assert TrialRequest.of({"SHOESTRING_PROBE": "x"}) == TrialRequest(Path("x"), 20, 0, None)
    assert TrialRequest(Path("a/b.json")).ready == Path("a/b.ready")


def test_a_setting_that_is_no_number_is_refused():
    assert (read_number({}, "SHOESTRING_EVERY"), read_number({"N": "12"}, "N")) == (0, 12)
    with pytest.raises(UsageError, match="`SHOESTRING_PROBE_STEPS` is `-4`"):
        TrialRequest.of({"SHOESTRING_PROBE": "x", "SHOESTRING_PROBE_STEPS": "-4"})


def test_a_tasks_other_variables_are_settings_of_a_run(tmp_path):
    task = Task("a", ["x.py"], (cpu("one"),), tmp_path, checkpoint=tmp_path, every=3, memory_bytes=9)
    given = environment_of(task, tmp_path / "stop", {})
    own = {name for name in given if name.startswith("SHOESTRING_")}
    assert own - VARIABLES <= Run().to_environment().keys()
    assert Run.here(given) == Run(name="a", folder=tmp_path, checkpoint=tmp_path, every=3)


def test_a_result_reads_back(tmp_path):
    GOOD.write(tmp_path / "a.json")
    assert TrialResult.read(tmp_path / "a.json") == GOOD
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Input data was truncated"),
        ('{"step_s":[1,1,1],"first_at":1,', "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `step_s`"),
        ('{"step_s":[1,1],"first_at":1,"ended_at":2,"peak_bytes":3}', "length >= 3"),
        ('{"step_s":[1,-1,1],"first_at":1,"ended_at":2,"peak_bytes":3}', r">= 0.0 - at `\$.step_s\[1\]`"),
        ('{"step_s":[1,1,1],"first_at":1,"ended_at":2,"peak_bytes":0.5}', "`int`, got `float`"),
        ('{"steps":[1,1,1],"first_at":1,"ended_at":2,"peak_bytes":3}', "unknown field `steps`"),
    ],
)
def test_a_result_that_is_none_is_refused_by_name(tmp_path, text, found):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FleetError, match=rf"a.json` is no result of a trial: .*{found}") as caught:
        TrialResult.read(tmp_path / "a.json")
    assert "shoestring fleet profile" in caught.value.hint


def test_a_result_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FleetError, match="is no result of a trial: .*No such file"):
        TrialResult.read(tmp_path / "a.json")


def test_a_script_reads_the_contract_without_the_fleets_libraries():
    source = "import sys, shoestring.fleet.contract\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"scipy", "lmdb", "numba", "numpy", "torch", "psutil", "pynvml"}
