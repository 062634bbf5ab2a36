"""Take part in a run whose workers torchrun has started, one shard a host."""

import os
from collections.abc import Mapping

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.launch.rendezvous import Place, meet


def join(settings: Run) -> Run:
    """Meet the other workers at torchrun's own store."""
    return meet(place(os.environ), settings)


def place(environment: Mapping[str, str]) -> Place:
    """Read what torchrun tells its workers."""
    try:
        workers = int(environment["WORLD_SIZE"])
        local_workers = int(environment.get("LOCAL_WORLD_SIZE", workers))
        worker = int(environment["RANK"])
        return Place(
            name=environment.get("SHOESTRING_RUN") or environment.get("TORCHELASTIC_RUN_ID") or "torchrun",
            worker=worker,
            workers=workers,
            local=int(environment.get("LOCAL_RANK", worker)),
            host=int(environment.get("GROUP_RANK", worker // local_workers)),
            hosts=int(environment.get("GROUP_WORLD_SIZE", workers // local_workers)),
            store_host=environment["MASTER_ADDR"],
            store_port=int(environment["MASTER_PORT"]),
            hosts_store=worker == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"the environment looks like torchrun's, but a variable is missing or no number: {error}",
            hint="start the script with `torchrun`, or unset `RANK` and `WORLD_SIZE`",
        ) from None
