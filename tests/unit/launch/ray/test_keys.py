"""Each process gets the keys it needs and no other's secret; they work as a folder of keys."""

from shoestring.launch.ray.keys import RunKeys
from shoestring.launch.ray.process import write_keys
from shoestring.wire.keys import keys_from_folder


def test_every_process_gets_its_own_secret_alone(tmp_path):
    made = RunKeys.make(3)
    assert {name for name in made.for_shard() if name.endswith(".secret")} == {"shard.secret"}
    assert set(made.for_worker(1)) == {"worker-1.secret", "shard.public"}
    shard = keys_from_folder(write_keys(made.for_shard(), tmp_path / "shard"), "shard")
    workers = [
        keys_from_folder(write_keys(made.for_worker(n), tmp_path / str(n)), "worker", f"worker-{n}")
        for n in range(3)
    ]
    assert shard.allowed == {worker.pair.public for worker in workers}
    assert {worker.shard_public for worker in workers} == {shard.pair.public}


def test_keys_are_new_each_time_and_not_shown():
    first, second = RunKeys.make(1), RunKeys.make(1)
    assert not set(first.files.values()) & set(second.files.values())
    assert repr(first) == "RunKeys()"
