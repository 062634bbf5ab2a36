"""How busy a device was, from the moments it was looked at."""

from shoestring.fleet.measure.usage import Usage, watch_usage
from tests.unit.fleet.scripted import cpu


def test_the_mean_of_the_moments_within_a_time():
    usage = Usage(moments=[(1.0, 0.0, 0.0), (2.0, 0.5, 0.25), (3.0, 1.0, 0.5), (4.0, 0.0, 0.0)])
    assert usage.between(1.5, 3.0) == (0.75, 0.375)


def test_a_device_that_was_not_looked_at_counts_as_busy():
    assert Usage().between(0.0, 9.0) == (1.0, 0.0)
    assert Usage(moments=[(1.0, 0.5, 0.5)]).between(2.0, 3.0) == (1.0, 0.0)


def test_a_cpu_device_is_not_looked_at():
    with watch_usage(cpu("one")) as usage:
        assert usage == Usage()
