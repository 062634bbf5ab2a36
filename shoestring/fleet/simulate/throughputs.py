"""Gavel's throughput file: how fast each kind of work runs on each kind of device, alone and in pairs.

The file is JSON: `{device kind: {"('WORK', devices)": {"null": steps/s alone,
"('OTHER', devices)": [steps/s of WORK, steps/s of OTHER]}}}`; two zeros mean
that the pair cannot run together. It has no memory figures. What is read is
checked once, so the rest of the fleet can trust it.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoestring.errors import FleetError
from shoestring.fleet.allocate.plan import Demand

MAX_BYTES = 256 << 20

_WORK = re.compile(r"\('(?P<name>[^']*)', (?P<devices>[0-9]{1,6})\)")

Work = tuple[str, int]


class Throughputs:
    """Speeds by device kind, kind of work and number of devices. Serves as `Pairs`."""

    def __init__(
        self,
        alone: Mapping[str, Mapping[Work, float]],
        pairs: Mapping[str, Mapping[tuple[Work, Work], tuple[float, float]]],
    ) -> None:
        self._alone = alone
        self._pairs = pairs

    @property
    def kinds(self) -> list[str]:
        return list(self._alone)

    def works(self, kind: str, devices: int = 1) -> list[str]:
        """List the kinds of work that run on `devices` devices of `kind`."""
        return sorted(
            name for (name, count), speed in self._alone[kind].items() if count == devices and speed
        )

    def speeds(self, name: str, devices: int, kinds: Iterable[str]) -> dict[str, float]:
        """Return the steps/s alone on each of `kinds`; a kind it cannot run on is left out."""
        found = {kind: self._alone.get(kind, {}).get((name, devices), 0.0) for kind in kinds}
        return {kind: speed for kind, speed in found.items() if speed > 0}

    def together(self, a: Demand, b: Demand, kind: str) -> tuple[float, float] | None:
        one, other = (a.kind_of_work, a.devices), (b.kind_of_work, b.devices)
        table = self._pairs.get(kind, {})
        if (one, other) in table:
            return table[one, other]
        if (other, one) in table:
            return table[other, one][::-1]
        return None


def read_throughputs(path: Path) -> Throughputs:
    """Read and check a throughput file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FleetError(f"`{path.name}` has more than {MAX_BYTES} bytes", hint="give a throughput file")
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise FleetError(f"`{path}` cannot be read: {error.strerror}", hint="check the path") from None
    except (ValueError, RecursionError):
        raise FleetError(
            f"`{path.name}` is no JSON", hint="give a throughput file in Gavel's format"
        ) from None
    return parse_throughputs(table, path.name)


def parse_throughputs(table: Any, name: str = "throughputs") -> Throughputs:
    """Check what a throughput file holds and turn it into `Throughputs`."""
    alone: dict[str, dict[Work, float]] = {}
    pairs: dict[str, dict[tuple[Work, Work], tuple[float, float]]] = {}
    for kind, rows in _mapping(table, name).items():
        alone[kind], pairs[kind] = {}, {}
        for text, row in _mapping(rows, f"{name}: {kind}").items():
            where = f"{name}: {kind}: {text}"
            work = _parse_work(text, where)
            for other, value in _mapping(row, where).items():
                if other == "null":
                    alone[kind][work] = _speed(value, where)
                    continue
                partner = _parse_work(other, where)
                if not isinstance(value, list) or len(value) != 2:
                    raise _broken(f"{where}, {other}", "two speeds", value)
                both = _speed(value[0], where), _speed(value[1], where)
                if min(both) > 0:
                    pairs[kind][work, partner] = both
            if work not in alone[kind]:
                raise _broken(where, 'a speed alone under "null"', row)
    return Throughputs(alone, pairs)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _broken(where, "an object", value)
    return value


def _parse_work(text: str, where: str) -> Work:
    found = _WORK.fullmatch(text)
    if found is None:
        raise _broken(where, "names like ('ResNet-18 (batch size 64)', 1)", text)
    return found["name"], int(found["devices"])


def _speed(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
        raise _broken(where, "a speed of 0 or more", value)
    return float(value)


def _broken(where: str, expected: str, found: object) -> FleetError:
    return FleetError(
        f"`{where}` has `{str(found)[:60]}`, expected {expected}",
        hint="give a throughput file in Gavel's format",
    )
