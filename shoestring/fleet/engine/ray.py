"""The engine of a Ray cluster: one actor a node, which is the engine of that machine.

The actor asks Ray for all of its node's cores and GPUs, so nothing else is placed on what the
fleet plans with; inside, tasks are started and limited as on one machine (`local.py`). When the
process that runs the fleet ends, Ray ends the actors and with them their tasks.

A node's labels say what it offers:

    shoestring-name    the device's name; with several devices on a node, what their names begin with
    shoestring-kind    the devices' kind; without it a GPU's is what Ray or its driver calls it
    shoestring-cores   the cores of a CPU device, such as `0-3`
    shoestring-share   the share of their time, such as `0.5`

A node that is lost takes its devices along; its tasks count as stopped and go on from their
checkpoints elsewhere. A new node's devices are there for the next plan. A job's folder must be
the same on all nodes: it holds output, event logs and checkpoints.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shoestring.errors import FleetError
from shoestring.fleet.contract import STOPPED
from shoestring.fleet.engine.base import Running, Task
from shoestring.fleet.engine.devices import Device, find_devices, neighbours_of, parse_cpus
from shoestring.fleet.engine.local import OUTPUT, LocalEngine

NAME, KIND, CORES, SHARE = (f"shoestring-{word}" for word in ("name", "kind", "cores", "share"))

_ACCELERATOR = "ray.io/accelerator-type"
_LOOK_S = 5.0
_START_S = 120.0  # for a node's actor: Ray may have to wait for what others use
_WAIT_S = 0.5
_ANSWER_S = 60.0  # `kill` waits for a task that ends slowly
_UNUSABLE = 2  # the exit code of a task that cannot be started here


class Outpost:
    """The engine of one node, inside its actor. One thread: tasks end with the thread that started them."""

    def __init__(self) -> None:
        self._engine = LocalEngine(())
        self._tasks: dict[int, Running] = {}

    def find(self, labels: Mapping[str, str], name: str) -> tuple[tuple[Device, ...], str]:
        """The node's devices as its labels describe them, or what is wrong with them."""
        try:
            return node_devices(labels, name), ""
        except FleetError as error:
            return (), f"{error.message}; {error.hint}"

    def start(self, number: int, task: Task) -> str:
        """Start a task; return why it cannot be."""
        try:
            self._tasks[number] = self._engine.start(task)
        except (FleetError, OSError) as error:
            return str(error)
        return ""

    def poll(self, number: int) -> int | None:
        return self._tasks[number].poll()

    def wait(self, number: int, timeout_s: float) -> int | None:
        return self._tasks[number].wait(timeout_s)

    def ask_stop(self, number: int) -> None:
        self._tasks[number].ask_stop()

    def withdraw_stop(self, number: int) -> None:
        self._tasks[number].withdraw_stop()

    def kill(self, number: int) -> None:
        self._tasks[number].kill()

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class _Post:
    actor: Any
    devices: tuple[Device, ...]


class RayEngine:
    """Runs tasks on the nodes of a cluster that this process is connected to. One thread."""

    def __init__(self, ray: Any, say: Callable[[str], None] = lambda text: None) -> None:
        self._ray = ray
        self._say = say
        self._posts: dict[str, _Post] = {}  # by node
        self._passed_over: set[str] = set()
        self._looked_at = -_LOOK_S
        self._started = 0
        self._look()

    @property
    def devices(self) -> Sequence[Device]:
        """The devices of all nodes that are there now."""
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._look()
        return tuple(device for post in self._posts.values() for device in post.devices)

    def neighbours(self, device: Device) -> Sequence[Device]:
        """The CPU devices of the same node. Two nodes on one machine do not know of each other."""
        for post in self._posts.values():
            if any(other.name == device.name for other in post.devices):
                return neighbours_of(device, post.devices)
        return ()

    def start(self, task: Task) -> Running:
        names = {device.name for device in task.devices}
        self._started += 1
        for post in self._posts.values():
            if names <= {device.name for device in post.devices}:
                running = _Remote(self._ray, post.actor, self._started)
                running.start(task)
                return running
        # The plan counts kinds, not nodes: what it chose may be apart, or gone since.
        return _Unstarted(task, f"its devices {', '.join(sorted(names))} are not all on one node")

    def close(self) -> None:
        for post in self._posts.values():
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(post.actor.close.remote(), timeout=_ANSWER_S)
            self._ray.kill(post.actor)
        self._posts.clear()

    def _look(self) -> None:
        """Take in nodes that came, and let go of those that went."""
        self._looked_at = time.monotonic()
        rows = {row["NodeID"]: row for row in self._ray.nodes() if row["Alive"]}
        for node in self._posts.keys() - rows.keys():
            self._say(f"lost {', '.join(device.name for device in self._posts.pop(node).devices)}")
        new = sorted(rows.keys() - self._posts.keys() - self._passed_over)
        actors = {node: self._post(node, rows[node]["Resources"]) for node in new}
        deadline = time.monotonic() + _START_S
        for node, actor in actors.items():
            labels = {str(key): str(value) for key, value in rows[node].get("Labels", {}).items()}
            name = _slug(labels.get(NAME, "") or f"node-{node[:8]}")
            try:
                left_s = max(0.0, deadline - time.monotonic())
                devices, problem = self._ray.get(actor.find.remote(labels, name), timeout=left_s)
            except self._ray.exceptions.RayError:
                devices, problem = (), "its cores or GPUs are in use by others"
            taken = {device.name for post in self._posts.values() for device in post.devices}
            if not problem and taken & {device.name for device in devices}:
                problem = f"another node has the same `{NAME}`"
            if problem:
                self._say(f"passing over node {node[:8]}: {problem}")
                self._passed_over.add(node)
                self._ray.kill(actor)
            else:
                self._posts[node] = _Post(actor, devices)

    def _post(self, node: str, resources: Mapping[str, float]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return (
            self._ray.remote(Outpost)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )


class _Remote:
    """A task on a node."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        self._ray = ray
        self._actor = actor
        self._number = number
        self._code: int | None = None

    def start(self, task: Task) -> None:
        problem = self._ask(self._actor.start, task)
        if isinstance(problem, str) and problem:
            self._code = _Unstarted(task, problem).poll()

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._ask(self._actor.poll)
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        # In short waits: the actor is to hear of other tasks in between.
        deadline = time.monotonic() + timeout_s
        while self._code is None and (left_s := deadline - time.monotonic()) > 0:
            self._code = self._ask(self._actor.wait, min(left_s, _WAIT_S))
        return self.poll()

    def ask_stop(self) -> None:
        if self._code is None:
            self._ask(self._actor.ask_stop)

    def withdraw_stop(self) -> None:
        if self._code is None:
            self._ask(self._actor.withdraw_stop)

    def kill(self) -> None:
        if self._code is None:
            self._ask(self._actor.kill)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return self._ray.get(method.remote(self._number, *arguments), timeout=_ANSWER_S)
        except self._ray.exceptions.RayError:
            self._code = STOPPED  # its node is gone: it goes on from its checkpoint
            return STOPPED


class _Unstarted:
    """A task that cannot be started; its output says why."""

    def __init__(self, task: Task, why: str) -> None:
        task.folder.mkdir(parents=True, exist_ok=True)
        with (task.folder / OUTPUT).open("a") as output:
            output.write(f"shoestring: {task.name} cannot be started: {why}\n")

    def poll(self) -> int | None:
        return _UNUSABLE

    def wait(self, timeout_s: float) -> int | None:
        return _UNUSABLE

    def ask_stop(self) -> None:
        pass

    def withdraw_stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


def node_devices(labels: Mapping[str, str], name: str) -> tuple[Device, ...]:
    """This machine's devices, named and kinded as a node's labels say."""
    kind = _slug(labels.get(KIND, ""))
    if labels.get(CORES):
        share = f":{labels[SHARE]}" if SHARE in labels else ""
        found = parse_cpus(f"cpu={labels[CORES]}{share}")
        found = [replace(device, kind=kind or f"cpu-{len(device.cores)}") for device in found]
    else:
        found = find_devices()
        called = kind or _slug(labels.get(_ACCELERATOR, "") if any(d.is_gpu for d in found) else "")
        found = [replace(device, kind=called or device.kind) for device in found]
    if len(found) == 1:
        return (replace(found[0], name=name),)
    return tuple(replace(device, name=f"{name}-{device.name}"[:64]) for device in found)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_.-]+", "-", text.lower()).strip("-._")[:40]
