"""An engine without processes: tasks take steps when the test says so, and obey as real ones do."""

from dataclasses import dataclass, field

from shoestring.fleet.contract import BATCH, STOPPED, TrialRequest, TrialResult
from shoestring.fleet.engine.base import Task
from shoestring.fleet.engine.devices import Device
from shoestring.observe.events import EventLog

GIB = 2**30


def cpu(name, core=0, memory_bytes=8 * GIB, kind=None):
    return Device(name, kind or name, memory_bytes, memory_bytes, cores=(core,))


@dataclass
class ScriptedTask:
    task: Task
    code: int | None = None
    is_asked: bool = False
    log: EventLog = None

    def step_to(self, step):
        """Report a step, as a worker does."""
        self.log.write("step", worker=0, step=step)

    def finish(self, code=0):
        self.code = code
        self.log.close()

    def poll(self):
        return self.code

    def wait(self, timeout_s):
        return self.code

    def ask_stop(self):
        self.is_asked = True

    def withdraw_stop(self):
        self.is_asked = False

    def kill(self):
        if self.code is None:
            self.finish(137)

    def obey(self):
        assert self.is_asked
        self.finish(STOPPED)


@dataclass
class ScriptedEngine:
    devices: tuple[Device, ...]
    tasks: list[ScriptedTask] = field(default_factory=list)

    def neighbours(self, device):
        return ()

    def start(self, task):
        found = ScriptedTask(task, log=EventLog(task.folder, "worker-0"))
        self.tasks.append(found)
        return found

    def latest(self, job):
        return [task for task in self.tasks if task.task.name == job][-1]

    def close(self):
        for task in self.tasks:
            task.kill()


@dataclass
class MeasuredEngine:
    """Answers a profiler at once, from a formula: seconds and bytes at a batch size."""

    devices: tuple[Device, ...]
    step_s: object
    peak_bytes: object
    fails_at: tuple[int, ...] = ()
    words: str = ""
    batches: list[int] = field(default_factory=list)

    def neighbours(self, device):
        return ()

    def start(self, task):
        batch = int(task.environment[BATCH])
        self.batches.append(batch)
        done = ScriptedTask(task, log=EventLog(None, "worker-0"))
        task.folder.mkdir(parents=True, exist_ok=True)
        if batch in self.fails_at:
            (task.folder / "output.log").write_text(self.words)
            done.finish(1)
            return done
        result = TrialResult([self.step_s(batch)] * 10, 0.0, 1.0, self.peak_bytes(batch))
        result.write(TrialRequest.of(task.environment).result)
        done.finish(0)
        return done

    def close(self):
        pass
