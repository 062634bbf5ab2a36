"""Devices: how CPU devices are written, what is refused, and that the file gives back what was saved."""

import os

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.engine import devices
from shoestring.fleet.engine.devices import Device, Rates, find_sockets, load, parse_cpus, save

FIRST = min(os.sched_getaffinity(0))


@pytest.fixture
def cores(monkeypatch):
    """A machine of eight cores, whatever this one has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_cpu_devices_have_names_cores_and_shares(cores):
    fast, slow = parse_cpus("fast=0-2,5,slow=6:0.33")
    assert (fast.name, fast.kind, fast.cores, fast.share) == ("fast", "fast", (0, 1, 2, 5), 1.0)
    assert (slow.name, slow.cores, slow.share) == ("slow", (6,), 0.33)
    assert not fast.is_gpu
    assert fast.memory_bytes == pytest.approx(4 * slow.memory_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1", "does not say which CPU devices"),
        ("fast=x", "does not say which CPU devices"),
        ("fast=", "does not say which CPU devices"),
        ("fast=3-1", "does not say which CPU devices"),
        ("fast=0:zero", "does not say which CPU devices"),
        ("fast=0-99999999999999999999", "does not say which CPU devices"),
        ("fast=0,fast=1", "`fast` is given twice"),
        ("a=0,b=0", "core 0 of device `b` is in two devices"),
        ("a=77", "core 77 of device `a` is not one this process may use"),
        ("a=0:0", "share of 0.0"),
        ("a=0:nan", "share of nan"),
        ("../a=0", "cannot be called `../a`"),
    ],
)
def test_what_names_no_devices_is_refused(cores, text, message):
    with pytest.raises(FleetError, match=message):
        parse_cpus(text)


def test_sockets_cover_the_cores_this_process_may_use():
    found = find_sockets()
    assert {core for device in found for core in device.cores} == os.sched_getaffinity(0)
    assert [device.name for device in found] == [f"cpu{n}" for n in range(len(found))]


def test_a_file_gives_back_what_was_saved(tmp_path):
    one = Device("gpu0", "h200", 10**11, 10**10, "9.0", "GPU-1", rates=Rates(1.5e12, 7e14, 5e10))
    two = Device("slow", "slow", 10**9, 10**8, cores=(FIRST,), share=0.25)
    path = tmp_path / "deep" / "devices.json"
    save([one, two], path)
    assert load(path) == [one, two]
    assert [file.name for file in path.parent.iterdir()] == ["devices.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"name": "a"}]', "[" * 100_000, '[{"name":"a","kind":"a","memory_bytes":1,'
             '"free_bytes":1,"uuid":"u"},{"name":"a","kind":"a","memory_bytes":1,"free_bytes":1,"uuid":"v"}]']
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "devices.json"
    path.write_text(text)
    with pytest.raises(FleetError, match="devices.json"):
        load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FleetError, match="there is no device file"):
        load(tmp_path / "devices.json")


def test_only_visible_gpus_are_lent():
    gpus = [Device(f"gpu{n}", "v100", 1, 1, uuid=f"GPU-{n}abc") for n in range(3)]
    names = lambda setting: [gpu.name for gpu in devices._visible(gpus, setting)]  # noqa: E731
    assert names(None) == ["gpu0", "gpu1", "gpu2"]
    assert names("2,0") == ["gpu2", "gpu0"]
    assert names("GPU-1") == ["gpu1"]
    assert names("") == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("???", "gpu"),
    ],
)
def test_a_gpus_name_becomes_its_kind(name, kind):
    assert devices._slug(name) == kind
