"""Run the tests on random fleets with far more examples than a test run has time for.

    python benchmarks/fleet/random_fleets.py --examples 100000 --output benchmarks/results/fleet_random.json

Half as many small fleets are compared with the best found by trying every
choice, and half as many with the soonest end that is known by a formula. Stops
with the failing fleet if there is one; the JSON says how many were checked.
"""

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ["SHOESTRING_EXAMPLES"] = str(args.examples)  # read where the tests are defined
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
        "examples_asked": args.examples,
        "fleets_checked": dict(checked),
        "failures": 0,
        "seconds": round(time.monotonic() - start, 1),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.output:
        args.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
