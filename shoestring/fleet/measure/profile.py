"""Profiles: the time and memory of a job's steps on a kind of device, measured in trials of its script.

A script is run for some steps at a few batch sizes, smallest first. Before each larger one
the memory it will take is predicted from the smaller ones, and one that would not fit with
margin is not run: so the largest batch that fits is found without running out of memory.
Should a run end out of memory all the same, that size counts as not fitting.

While a job is timed on a CPU device, the machine's other CPU devices train it too: see
`neighbours.py`.

A profile that was not measured on its kind says so: `predicted_from` names the kind it was.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from shoestring.errors import FleetError
from shoestring.fleet.contract import BATCH, TrialRequest, TrialResult
from shoestring.fleet.engine.base import Engine, Task
from shoestring.fleet.engine.devices import Device, Rates
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.fit import Line, fit_line, largest_within, near_line, next_size
from shoestring.fleet.measure.neighbours import start_neighbours
from shoestring.fleet.measure.usage import Usage, watch_usage

VERSION = 2  # of how profiles are taken; in 1 the machine's other CPU devices were idle
MARGIN = 0.05  # of memory that a plan leaves free beyond the error bar
_LONGEST_S = 900.0  # for one run, its start included
_SIZES = 3  # batch sizes to measure: the fewest that tell a line from chance
_LAST_BYTES = 4000
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "memoryerror")


@dataclass(frozen=True)
class Sample:
    """One batch size, measured. `busy` is the part of the device's time that the job used."""

    batch: int
    step_s: float
    spread_s: float  # half of what the middle half of the steps covers
    peak_bytes: int
    startup_s: float
    busy: float
    bandwidth: float = 0.0  # the part of the device's memory bandwidth, where that is known
    steps: int = 0
    missing: tuple[str, ...] = ()  # other CPU devices that should have trained meanwhile, and did not


@dataclass(frozen=True)
class Profile:
    """Step time and memory of a job's code on one kind of device."""

    key: str
    kind: str
    samples: tuple[Sample, ...]
    does_not_fit: tuple[int, ...] = ()  # sizes that would not fit, or did not
    predicted_from: str = ""
    uncertainty: float = 0.0  # of a prediction from another kind, as a part of it
    memory_bytes: int = 0  # of the device it was measured on
    version: int = VERSION

    def step_s(self, batch: int) -> tuple[float, float]:
        """Seconds a step takes, and their error bar: measured if that size was, else from the line."""
        for sample in self.samples:
            if sample.batch == batch:
                noise = 2 * sample.spread_s / math.sqrt(max(1, sample.steps))
                return sample.step_s, noise + self.uncertainty * sample.step_s
        line = self.time_line
        return line.at(batch), line.error(batch) + self.uncertainty * line.at(batch)

    def peak_bytes(self, batch: int) -> tuple[int, int]:
        """The most memory it takes, and the error bar."""
        for sample in self.samples:
            if sample.batch == batch:
                return sample.peak_bytes, 0
        line = near_line([s.batch for s in self.samples], [s.peak_bytes for s in self.samples], batch)
        return math.ceil(line.at(batch)), math.ceil(line.error(batch))

    def fits(self, batch: int, limit_bytes: int) -> bool:
        """Say whether a size stays within a device's memory, with margin."""
        peak, error = self.peak_bytes(batch)
        is_ruled_out = any(size <= batch for size in self.does_not_fit) and limit_bytes <= self.memory_bytes
        return not is_ruled_out and (peak + error) * (1 + MARGIN) <= limit_bytes

    @property
    def time_line(self) -> Line:
        return fit_line([s.batch for s in self.samples], [s.step_s for s in self.samples])

    @property
    def memory_line(self) -> Line:
        return fit_line([s.batch for s in self.samples], [s.peak_bytes for s in self.samples])

    @property
    def startup_s(self) -> float:
        return statistics.median(sample.startup_s for sample in self.samples)

    @property
    def busy(self) -> float:
        return self.samples[-1].busy

    @property
    def bandwidth(self) -> float:
        return self.samples[-1].bandwidth

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        try:
            facts = msgspec.json.decode(text)
            if isinstance(facts, dict):
                facts.setdefault("version", 1)  # profiles of version 1 do not have the field
            return msgspec.convert(facts, cls)
        except msgspec.MsgspecError as error:
            raise FleetError(
                f"a stored profile cannot be read: {error}",
                hint="measure it again: `shoestring fleet profile`",
            ) from None

    def on(self, kind: str, own: Rates, other: Rates) -> "Profile":
        """Predict another kind: slower by the mean of two ratios of rates, unsure by how far they differ."""
        ratios = [own.matmul_flop_s / other.matmul_flop_s, own.copy_bytes_s / other.copy_bytes_s]
        slower = math.sqrt(ratios[0] * ratios[1])
        samples = tuple(
            replace(sample, step_s=sample.step_s * slower, spread_s=sample.spread_s * slower)
            for sample in self.samples
        )
        return Profile(self.key, kind, samples, (), self.kind, max(ratios) / slower - 1 + 0.1)


@dataclass
class Profiler:
    """Measures jobs on an engine's devices."""

    engine: Engine
    folder: Path
    say: Callable[[str], None] = field(default=lambda text: None)
    steps: int = 20  # to time at least, and for how long
    seconds: int = 5

    def profile(self, job: Job, device: Device, busy: Collection[str] = ()) -> Profile:
        """Measure a job on a device, at a few batch sizes; on `busy` devices a job trains already."""
        others = [other for other in self.engine.neighbours(device) if other.name not in busy]
        samples: list[Sample] = []
        refused: list[int] = []
        for batch in sizes_to_measure(job.batches):
            if refused or (len(samples) > 1 and not _will_fit(samples, batch, device)):
                refused.append(batch)
                continue
            sample = self.measure(job, device, batch, others)
            if sample is None:
                refused.append(batch)
            else:
                samples.append(sample)
                self.say(
                    f"`{job.name}` on {device.kind}, batch {batch}: {1e3 * sample.step_s:.3g} ms a step, "
                    f"{sample.peak_bytes / 2**30:.2f} GiB"
                )
        if not samples:
            raise FleetError(
                f"job `{job.name}` runs out of memory on `{device.kind}` at batch size {refused[0]}",
                hint="allow a smaller batch size, or name the `kinds` it may use",
            )
        if refused:
            self._measure_largest(job, device, others, samples, refused)
        samples.sort(key=lambda sample: sample.batch)
        return Profile(
            job.key(), device.kind, tuple(samples), tuple(refused), memory_bytes=device.usable_bytes
        )

    def measure(self, job: Job, device: Device, batch: int, others: Sequence[Device] = ()) -> Sample | None:
        """Time some steps at one batch size while others train too; None if it ran out of memory."""
        result = self.folder / f"{job.name}-{device.name}-{batch}.json"
        result.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        log = self.folder / f"{job.name}-{device.name}-{batch}"
        task = Task(
            name=f"profile-{job.name}",
            command=job.command(batch),
            devices=(device,),
            folder=log,
            memory_bytes=device.usable_bytes,
            environment={
                BATCH: str(batch),
                **TrialRequest(result, self.steps, self.seconds).to_environment(),
            },
        )
        started_at = time.time()
        with watch_usage(device) as usage:
            code, missing = self._run(task, others)
        said = _last_words(log)
        if result.exists():
            for name, why in missing.items():
                self.say(f"`{job.name}` on {device.kind}, batch {batch}: timed without `{name}`: {why}")
            return replace(_read(result, batch, device, started_at, usage), missing=tuple(missing))
        if code == 137 or any(sign in said.lower() for sign in _OUT_OF_MEMORY):
            return None
        raise FleetError(
            f"job `{job.name}` ended with exit code {code} before {self.steps} steps were timed"
            + (f"; its last words:\n{said}" if said else ""),
            hint="it must train through `shoestring.init()` and `shoestring.wrap`, for more steps than that",
        )

    def _measure_largest(
        self,
        job: Job,
        device: Device,
        others: Sequence[Device],
        samples: list[Sample],
        refused: list[int],
    ) -> None:
        """Go up to the largest allowed size that should fit; each one measured makes the next guess surer."""
        while True:
            allowed = [batch for batch in job.batches if batch < min(refused)]
            sizes, peaks = [s.batch for s in samples], [s.peak_bytes for s in samples]
            batch = next_size(sizes, peaks, device.usable_bytes, allowed, margin=MARGIN)
            if batch is None:
                return
            sample = self.measure(job, device, batch, others)
            if sample is None:
                refused.append(batch)
            else:
                samples.append(sample)

    def _run(self, task: Task, others: Sequence[Device]) -> tuple[int, dict[str, str]]:
        """Run a task to its end; return its exit code, and which of the others did not train and why."""
        deadline = time.monotonic() + _LONGEST_S
        with start_neighbours(self.engine, task, others) as neighbours:
            running = self.engine.start(neighbours.timed)
            try:
                neighbours.gather(running, _LONGEST_S)
                code = running.wait(max(0.0, deadline - time.monotonic()))
                missing = neighbours.missing()
            finally:
                running.kill()
        if code is None:
            raise FleetError(
                f"`{task.name}` took more than {_LONGEST_S:.0f} s for a few steps",
                hint="look at its output, or give it smaller batch sizes",
            )
        return code, missing


def sizes_to_measure(allowed: Sequence[int]) -> list[int]:
    """Choose sizes to measure: smallest, largest and between; smaller ones where few are allowed."""
    sizes = sorted(set(allowed))
    while len(sizes) < _SIZES and sizes[0] > 1:
        sizes.insert(0, sizes[0] // 2)
    if len(sizes) > _SIZES:
        middle = min(sizes[1:-1], key=lambda size: abs(math.log(size * size / (sizes[0] * sizes[-1]))))
        sizes = sorted({sizes[0], middle, sizes[-1]})
    return sizes


def _will_fit(samples: Sequence[Sample], batch: int, device: Device) -> bool:
    line = fit_line([s.batch for s in samples], [s.peak_bytes for s in samples])
    return largest_within(line, device.usable_bytes, [batch], margin=MARGIN) is not None


def _read(path: Path, batch: int, device: Device, started_at: float, usage: Usage) -> Sample:
    result = TrialResult.read(path)
    times = sorted(result.step_s)
    lower, _, upper = statistics.quantiles(times, n=4)
    total_s = sum(times)
    busy, bandwidth = 1.0, 0.0  # a CPU job counts as always busy: time that it leaves, other processes took
    if device.is_gpu:
        busy, bandwidth = usage.between(result.ended_at - total_s, result.ended_at)
    return Sample(
        batch=batch,
        # Not the median: a share of a core comes in slices, between which steps fall or do not.
        step_s=statistics.fmean(times[len(times) // 10 : len(times) - len(times) // 10]),
        spread_s=(upper - lower) / 2,
        peak_bytes=result.peak_bytes + max(0, result.beside_bytes - usage.used_before),
        startup_s=max(0.0, result.first_at - started_at),
        busy=busy,
        bandwidth=bandwidth,
        steps=len(times),
    )


def _last_words(log: Path) -> str:
    try:
        with (log / "output.log").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            return file.read(_LAST_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
