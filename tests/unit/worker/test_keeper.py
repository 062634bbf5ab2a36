"""A worker's part of checkpoints: reports of shards in whatever order they come."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch
from torch import nn

from shoestring.checkpoint.owner import take_over
from shoestring.checkpoint.snapshot import TensorFileWriter, newest, step_folder
from shoestring.config import Run
from shoestring.model.rules import Rule
from shoestring.model.table import Table
from shoestring.observe.events import EventLog
from shoestring.wire import messages as say
from shoestring.worker.keeper import Keeper
from shoestring.worker.session import Session


class Reports:
    """Stands for the exchange: hands over the reports it was given."""

    def __init__(self) -> None:
        self.snapped: list[tuple[say.Snapped, bytes]] = []

    def poll_reports(self):
        taken, self.snapped = self.snapped, []
        return taken

    def expect_reports(self, seq: int) -> None: ...

    def send_record(self, seq: int, record: bytes) -> None:
        self.own = msgspec.json.decode(record)

    def wait_report(self, timeout_s: float) -> None: ...


def write_shard(root: Path, seq: int, index: int) -> object:
    folder = step_folder(root, seq)
    folder.mkdir(parents=True, exist_ok=True)
    with TensorFileWriter(folder / f"shard-{index}.safetensors", {}) as writer:
        return msgspec.to_builtins(writer.finish({"parts": {}}))


def make_keeper(root: Path, exchange: Reports) -> Keeper:
    here = Session(Run(checkpoint=root, every=4), "1", EventLog(None, "test"))
    model = nn.Linear(1, 1)
    coder = SimpleNamespace(exchange=exchange, state=dict)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Keeper(here, model, optimizer, coder, Table((), Rule("sgd"), 1, 0.0), shards=2, is_local=False)


def test_what_is_left_of_a_run_completes_no_checkpoint_after_another_took_over(tmp_path, capsys):
    take_over(tmp_path)
    exchange = Reports()
    keeper = make_keeper(tmp_path, exchange)
    keeper.round_ended(4, 4)
    keeper.step_begins()
    for thread in keeper._writers:
        thread.join()
    take_over(tmp_path)
    for index in range(2):
        exchange.snapped.append((say.Snapped(4), msgspec.json.encode([write_shard(tmp_path, 4, index)])))
    keeper.close()
    assert newest(tmp_path)[0] is None
    assert "another run has taken over" in capsys.readouterr().err


def test_a_shard_that_is_done_before_the_worker_ended_the_round_is_remembered(tmp_path):
    exchange = Reports()
    keeper = make_keeper(tmp_path, exchange)
    exchange.snapped.append((say.Snapped(4), msgspec.json.encode([write_shard(tmp_path, 4, 1)])))
    keeper.round_ended(4, 4)  # the second shard had written its file by now
    keeper.step_begins()
    for thread in keeper._writers:
        thread.join()
    assert newest(tmp_path)[0] is None
    files = [write_shard(tmp_path, 4, 0), exchange.own]
    exchange.snapped.append((say.Snapped(4), msgspec.json.encode(files)))
    keeper.close()
    snapshot, _ = newest(tmp_path)
    assert snapshot is not None
    assert snapshot.folder == step_folder(tmp_path, 4)
    exchange.snapped.append((say.Snapped(4), msgspec.json.encode(files)))  # said again: nothing happens
    keeper.close()
