"""Variables by which a worker's script may open a process group of torch's beside the run.

Shoestring needs none. But scripts that were written for torchrun read `RANK` and `WORLD_SIZE`,
call `torch.distributed.init_process_group` and use `DistributedSampler`: under `shoestring run`
they find what torchrun would have told them. What the launcher's own environment says of
another run, torchrun's among them, does not reach the workers.
"""

import secrets
import socket
from collections.abc import Mapping

from shoestring.config import Run

_TORCHRUNS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_FIRST_PORT, _PORTS = 20_000, 12_000  # below those the kernel hands out


def group_variables(run: Run, local_workers: int, host: str, port: int) -> dict[str, str]:
    """What torchrun would tell this worker; the group meets at a port on the first worker's host."""
    return {
        "RANK": str(run.worker),
        "WORLD_SIZE": str(run.workers),
        "LOCAL_RANK": str(run.local),
        "LOCAL_WORLD_SIZE": str(local_workers),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def without_torchruns(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what torchrun told this process: its store is not for these workers."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUNS and not name.startswith("TORCHELASTIC_")
    }


def some_port() -> int:
    """A port for a host on which none can be kept free: most likely nobody has it."""
    return _FIRST_PORT + secrets.randbelow(_PORTS)


class KeptPort:
    """A port of this machine that nobody is given by chance while it is kept.

    A socket that is bound and does not listen keeps the kernel from handing the port out, and lets
    the first worker's store listen on it, as both say `SO_REUSEADDR`.
    """

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((self.host, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let go of it. May be called again."""
        self._socket.close()
