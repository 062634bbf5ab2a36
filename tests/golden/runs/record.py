"""Record the parameters that short runs end with: `python tests/golden/runs/record.py OUT.json`.

Run it before and after a change that must not change a bit, and compare the two files.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = Path(__file__).with_name("training.py")
CASES = [
    *itertools.product(("float32", "dct"), ("every", "every:delay=1", "local:3"), (1, 2, 4), (1, 3)),
    *itertools.product(("float32", "dct"), ("every:warmup=2", "local:h=2,outer=nesterov"), (2,), (2,)),
    *itertools.product(("float32", "dct"), ("bounded:2", "async"), (1,), (1, 2)),
]


def record(codec: str, policy: str, workers: int, shards: int, folder: Path) -> list[str]:
    """Return each worker's hash after a run in processes of its own."""
    out = folder / "hash"
    command = [sys.executable, "-m", "shoestring", "run", "--workers", str(workers), "--shards", str(shards)]
    settings = ["--codec", codec, "--policy", policy, "--folder", str(folder / "log")]
    subprocess.run([*command, *settings, str(TRAINING), str(out)], check=True, capture_output=True)
    return [Path(f"{out}.{worker}").read_text() for worker in range(workers)]


def main(target: Path) -> None:
    found = {}
    for codec, policy, workers, shards in CASES:
        with tempfile.TemporaryDirectory() as folder:
            hashes = record(codec, policy, workers, shards, Path(folder))
        name = f"{codec} {policy} workers={workers} shards={shards}"
        found[name] = hashes[0] if len(set(hashes)) == 1 else hashes
        print(name, found[name], file=sys.stderr, flush=True)
    target.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
