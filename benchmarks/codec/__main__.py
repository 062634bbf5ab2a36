"""`python -m benchmarks.codec`: the bits of codecs at an equal error, with the transform and without."""

import os
from typing import Annotated

import typer

from benchmarks.command import Command
from shoestring.cli.bench.codec import Gradients, SizeMb, read_names
from shoestring.cli.bench.options import AsJson, Data, Output, check_output, deliver, describe_machine


def codec(
    quick: Annotated[bool, typer.Option("--quick", help="`conv` of a short training alone.")] = False,
    as_json: AsJson = False,
    gradients: Gradients = None,
    size_mb: SizeMb = None,
    data: Data = None,
    output: Output = None,
) -> None:
    """Compare bits at an equal error: `dct`, `dct` without its transform, and top-k.

    Gradients are those that `shoestring bench codec` measures on.
    """
    check_output(output)

    from dataclasses import asdict

    from benchmarks.codec.transform import ERRORS, EqualError, compare, show
    from shoestring.bench.codec import gradients as sets
    from shoestring.bench.codec import report

    known = sets.names(quick)
    names = read_names(gradients, known) or (["conv"] if quick else list(filter(sets.is_captured, known)))
    load_before = os.getloadavg()[0]
    found: list[EqualError] = []
    with report.show_progress() as progress:
        for name in names:
            bucket = sets.load(name, quick=quick, size_mb=size_mb, folder=data, progress=progress)
            for error in ERRORS:
                progress(f"bits at an equal error on `{bucket.name}`", len(found), len(ERRORS) * len(names))
                found.append(compare(bucket, error))
    machine = describe_machine(load_before, quick=quick)
    deliver({"machine": machine, "transform": [asdict(one) for one in found]}, output, as_json)
    if not as_json:
        show(found)


main = Command(
    codec,
    "benchmarks.codec",
    examples=("--quick", "--gradients conv,gpt --json --output codec_transform.json"),
)

if __name__ == "__main__":
    main()
