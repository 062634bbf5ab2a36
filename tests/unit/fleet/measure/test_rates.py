"""The rates of a device: what a task on it prints."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.engine.devices import Rates
from shoestring.fleet.measure.rates import measure_rates
from tests.unit.fleet.scripted import ScriptedEngine, cpu

GOOD = '{"copy_bytes_s": 2e9, "matmul_flop_s": 3e10, "upload_bytes_s": null}'


class PrintingEngine(ScriptedEngine):
    """Its tasks print a text and end at once."""

    text = GOOD

    def start(self, task):
        running = super().start(task)
        with (task.folder / "output.log").open("a") as output:
            output.write(self.text)
        running.finish()
        return running


def test_the_last_line_is_the_rates(tmp_path):
    engine = PrintingEngine((cpu("one"),))
    engine.text = f"a warning\n{GOOD}\n"
    assert measure_rates(engine, cpu("one"), tmp_path) == Rates(2e9, 3e10)
    (started,) = engine.tasks
    assert started.task.command == ["-m", "shoestring.fleet.measure.rates"]
    assert started.task.devices == (cpu("one"),)


@pytest.mark.parametrize("text", ["", "no module named torch\n", '{"copy_bytes_s": 1}\n'])
def test_a_device_that_cannot_be_measured_is_named(tmp_path, text):
    (tmp_path / "output.log").write_text(GOOD)  # of an earlier time
    engine = PrintingEngine((cpu("one"),))
    engine.text = text
    with pytest.raises(FleetError, match=r"`one` could not be measured \(exit code 0\)"):
        measure_rates(engine, cpu("one"), tmp_path)
