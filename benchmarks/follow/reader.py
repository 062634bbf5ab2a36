"""A follower that reads every round for a while, is away as long, and so on until the run ends.

Run as `python -m benchmarks.follow.reader OUT RUN_FOLDER SECONDS [CONTROL_GROUP]`, by `benchmarks.follow`.
It notes the hash of every version, and when it was there.
"""

import json
import os
import sys
import time
from pathlib import Path

import shoestring


def main() -> None:
    out, run, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 4:
        (Path(sys.argv[4]) / "cgroup.procs").write_text(str(os.getpid()))
    visits: list[dict[str, object]] = []
    while True:
        try:
            with shoestring.follow(run) as follower:
                hashes: dict[int, str] = {}
                began, cpu = time.monotonic(), time.process_time()
                for version in follower:
                    hashes[version.round] = version.parameter_hash()
                    if time.monotonic() - began >= seconds:
                        break
                else:
                    break
        except shoestring.ShoestringError:
            break
        used = time.process_time() - cpu
        visits.append({"began": began, "ended": time.monotonic(), "hashes": hashes, "cpu_s": used})
        time.sleep(seconds)
    (out / "follower.json").write_text(json.dumps(visits))


if __name__ == "__main__":
    main()
