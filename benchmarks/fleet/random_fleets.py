"""`python -m benchmarks.fleet.random_fleets`: the tests on random fleets with far more examples.

A test run has no time for so many. Half as many small fleets are compared with
the best found by trying every choice, and half as many with the soonest end that
is known by a formula. Stops with the failing fleet if there is one; the JSON says
how many were checked.
"""

import os
import time
from typing import Annotated

import typer

from benchmarks.command import Command
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver


def random_fleets(
    examples: Annotated[int, typer.Option(min=2, help="How many fleets are drawn.")] = 100_000,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Check every promise of a plan on random fleets, small ones against the best of all choices."""
    check_output(output)
    os.environ["SHOESTRING_EXAMPLES"] = str(examples)  # read where the tests are defined
    from shoestring.cli import env
    from tests.unit.fleet.allocate.fleets import checked
    from tests.unit.fleet.allocate.test_allocator import test_promises_hold
    from tests.unit.fleet.allocate.test_decide import test_small_choices_are_the_best_of_all
    from tests.unit.fleet.allocate.test_fluid import test_one_kind_ends_when_mcnaughton_says

    start = time.monotonic()
    test_promises_hold()
    test_small_choices_are_the_best_of_all()
    test_one_kind_ends_when_mcnaughton_says()
    result = {
        "machine": env.collect(),
        "examples_asked": examples,
        "fleets_checked": dict(checked),
        "failures": 0,
        "seconds": round(time.monotonic() - start, 1),
    }
    deliver(result, output, as_json)
    if not as_json:
        typer.echo(f"{sum(checked.values()):,} fleets checked in {result['seconds']} s, no failure")


main = Command(
    random_fleets,
    "benchmarks.fleet.random_fleets",
    examples=("--examples 1000", "--json --output fleet_random.json"),
)

if __name__ == "__main__":
    main()
