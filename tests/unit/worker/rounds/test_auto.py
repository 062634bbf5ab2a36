"""What `auto` chooses, given what it measures."""

import math
import random

import pytest

from shoestring.worker.rounds.auto import Auto

MBIT = 125_000.0


class Links:
    """Stands for an exchange: links of known rates, in bytes a second."""

    def __init__(self, *rates: float, rtt_s: float = 0.001) -> None:
        self.now = list(rates)
        self.rtt_s = rtt_s

    def measure_links(self) -> None:
        pass

    measure_links_soon = measure_links

    def rates(self) -> list[float]:
        return self.now


def settle(auto: Auto, compute_s: float, rounds: int = 400, first: int = 1) -> str:
    """Let rounds go by that wait as long as the links make them."""
    for seq in range(first, first + rounds):
        exposed_s = auto.predict(auto.level)
        auto.measure(compute_s=compute_s, exposed_s=exposed_s, seq=seq, now=float(seq))
    return auto.setting().push


@pytest.mark.parametrize(
    ("mbit", "compute_s", "want"),
    [
        (10_000, 0.1, "float32"),
        (1000, 1.0, "float32"),
        (1000, 0.1, "dct:step=1.5"),
        (100, 0.5, "dct:step=1.5"),
        (20, 0.1, "dct:step=3"),
    ],
)
def test_it_compresses_as_little_as_the_link_allows(mbit: float, compute_s: float, want: str) -> None:
    auto = Auto(Links(mbit * MBIT), [1_000_000], 4, free_delay=False)
    auto.start(0.0)
    assert settle(auto, compute_s) == want


@pytest.mark.parametrize(
    ("rates", "want"),
    [
        ([math.inf, math.inf], "shards on this machine, 0.1 ms there and back"),
        ([95.6, math.inf, 0.42], "links of 96, 0.42 Mbit/s, 0.1 ms there and back"),
    ],
)
def test_links_are_told_with_their_rates(rates: list[float], want: str) -> None:
    told: list[str] = []
    links = Links(*(rate * MBIT for rate in rates), rtt_s=1e-4)
    sizes = [1000 if rate < math.inf else 0 for rate in rates]
    Auto(links, sizes, 4, free_delay=False, explain=lambda codec, why: told.append(why)).start(0.0)
    assert told[0].endswith("; " + want)


def test_it_changes_its_mind_when_the_link_does_and_says_why() -> None:
    told: list[tuple[str, str]] = []
    links = Links(10_000 * MBIT)
    auto = Auto(links, [1_000_000], 4, free_delay=False, explain=lambda codec, why: told.append((codec, why)))
    auto.start(0.0)
    assert settle(auto, 0.1, 50) == "float32"
    links.now = [20 * MBIT]
    assert settle(auto, 0.1, 50, first=51) == "dct:step=3"
    links.now = [10_000 * MBIT]
    assert settle(auto, 0.1, 2000, first=101) == "float32"
    assert told[0][0] == "float32"
    assert "20 Mbit/s" in told[1][1]


def test_waiting_that_is_not_for_bytes_changes_nothing() -> None:
    auto = Auto(Links(float("inf"), rtt_s=0.0001), [1_000_000], 4, free_delay=False)
    auto.start(0.0)
    for seq in range(1, 100):
        auto.measure(compute_s=0.05, exposed_s=0.5, seq=seq, now=float(seq))
    assert auto.setting().push == "float32"


@pytest.mark.parametrize(("is_free", "want"), [(True, 1), (False, 0)])
def test_a_delay_comes_last_and_only_if_the_policy_leaves_it_open(is_free: bool, want: int) -> None:
    auto = Auto(Links(0.2 * MBIT), [1_000_000], 4, free_delay=is_free)
    auto.start(0.0)
    settle(auto, 0.05, 100)
    assert auto.decide_delay(0) == want


def test_where_delay_takes_the_time_it_leaves_out_no_more_than_it_must() -> None:
    auto = Auto(Links(100 * MBIT, rtt_s=0.2), [1_000_000], 4, free_delay=False)
    auto.start(0.0)
    assert settle(auto, 0.02) == "dct:step=1.5"


def test_it_goes_back_where_compressing_turns_out_to_be_no_quicker() -> None:
    """Coding may take longer than it was thought to: on a slow or busy CPU."""
    auto = Auto(Links(1000 * MBIT), [600_000], 4, free_delay=False)
    auto.start(0.0)
    tried = set()
    for seq in range(1, 400):
        level = auto.level
        tried.add(level)
        exposed_s = auto.predict(0) if level == 0 else 0.1
        auto.measure(compute_s=0.05, exposed_s=exposed_s, seq=seq, now=float(seq))
    assert tried == {0, 1}
    assert auto.setting().push == "float32"


def test_it_does_not_compress_where_that_saves_less_than_it_costs_in_steps() -> None:
    auto = Auto(Links(1000 * MBIT), [600_000], 4, free_delay=False)
    auto.start(0.0)
    uncompressed_s, compressed_s = (0.1 + auto.predict(level) for level in (0, 1))
    assert 1.15 < uncompressed_s / compressed_s < 1.3  # quicker, but not by as much
    assert settle(auto, 0.1) == "float32"


def test_it_tries_uncompressed_rounds_where_compute_takes_most_of_the_time() -> None:
    """Where it began compressed, as an uncompressed round takes long, but a step takes far longer."""
    auto = Auto(Links(100 * MBIT), [1_000_000], 4, free_delay=False)
    auto.start(0.0)
    assert auto.setting().push != "float32"
    assert settle(auto, 10.0) == "float32"


def test_one_long_wait_changes_nothing() -> None:
    """Another worker may stop to look at its model, or to write it."""
    auto = Auto(Links(100 * MBIT), [700_000], 8, free_delay=False)
    auto.start(0.0)
    level = settle(auto, 0.026, 50)
    assert level != "float32"
    for seq in range(51, 250):
        exposed_s = 20.0 if seq % 20 == 0 else auto.predict(auto.level)
        auto.measure(compute_s=0.026, exposed_s=exposed_s, seq=seq, now=float(seq))
        assert auto.setting().push == level


def test_the_first_round_that_is_measured_decides_nothing() -> None:
    """After a warm-up, or a resume, that is not the first of all."""
    auto = Auto(Links(100 * MBIT), [700_000], 8, free_delay=False)
    auto.start(0.0)
    level = auto.setting()
    auto.measure(compute_s=0.026, exposed_s=10.0, seq=1000, now=0.0)
    assert auto.setting() == level


def test_compressing_gets_another_chance() -> None:
    """Coding was slow once, as the machine was busy."""
    auto = Auto(Links(1000 * MBIT), [600_000], 4, free_delay=False)
    auto.start(0.0)
    found = []
    for seq in range(1, 1500):
        level = auto.level
        exposed_s = auto.predict(level) if level == 0 or seq > 200 else 0.1
        auto.measure(compute_s=0.05, exposed_s=exposed_s, seq=seq, now=float(seq))
        found.append(level)
    assert 0 in found[50:200]
    assert found[-1] == 1


def test_levels_that_are_about_equal_do_not_take_turns() -> None:
    """Waits that go up and down by a few milliseconds, as on a busy machine."""
    told: list[str] = []
    auto = Auto(
        Links(11 * MBIT), [95_000], 8, free_delay=False, explain=lambda codec, why: told.append(codec)
    )
    auto.start(0.0)
    noise = random.Random(0)
    for seq in range(1, 1000):
        exposed_s = noise.uniform(0.003, 0.014)
        auto.measure(compute_s=noise.uniform(0.022, 0.032), exposed_s=exposed_s, seq=seq, now=float(seq))
    assert len(told) <= 3


def test_a_codec_is_prepared_before_it_is_used() -> None:
    links, prepared = Links(10_000 * MBIT), []
    auto = Auto(links, [1_000_000], 4, free_delay=False, prepare=prepared.append)
    auto.start(0.0)
    assert settle(auto, 0.1) == "float32"
    links.now[0] = 20 * MBIT
    assert settle(auto, 0.1, first=401) == "dct:step=3"
    assert prepared[0] == "float32"
    assert prepared[-1] == "dct:step=3"
