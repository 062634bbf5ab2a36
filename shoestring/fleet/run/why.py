"""Say in one sentence why a job is where it is, or what it waits for and about how long."""

import time

from shoestring.fleet.run.database import Entry


def explain(entry: Entry, *, is_run: bool, now: float | None = None) -> str:
    """One sentence about a job; `is_run` says whether a process runs its fleet."""
    now = time.time() if now is None else now
    name, note = entry.job.name, entry.note
    if entry.state == "done":
        return f"`{name}` is done: it took {entry.steps} steps, the last on {entry.device or 'no device'}."
    if entry.state == "failed":
        return f"`{name}` failed: {note or 'nothing is known'}; see `shoestring fleet logs {name}`."
    if not is_run:
        far = f" goes on from a checkpoint at about step {entry.steps}" if entry.steps else " starts"
        return f"`{name}` waits, as no process runs this fleet: it{far} with `shoestring fleet run`."
    if entry.is_unwanted:
        return f"`{name}` is being removed."
    if entry.state == "running":
        until = "" if entry.ends_at is None else f"; done in about {duration(entry.ends_at - now)}"
        return _sentence(note or f"`{name}` runs on {entry.device}") + until + "."
    return _sentence(note or f"`{name}` waits for the next decision") + "."


def duration(seconds: float) -> str:
    """A time for people, in one unit or two."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{round(whole / 60)} min"
    if whole < 172_800:
        return f"{whole / 3600:.1f} h"
    return f"{whole / 86_400:.1f} days"


def _sentence(text: str) -> str:
    return text.strip().rstrip(".")
