"""Waking a thread that waits on sockets."""

import select
import threading

from shoestring.wire.waker import Waker


def is_readable(waker: Waker) -> bool:
    return bool(select.select([waker.fileno()], [], [], 0)[0])


def test_readable_from_wake_to_clear():
    waker = Waker()
    assert not is_readable(waker)
    waker.wake()
    waker.wake()
    assert is_readable(waker)
    waker.clear()
    assert not is_readable(waker)
    waker.clear()
    waker.wake()
    assert is_readable(waker)
    waker.close()


def test_many_wakes_neither_block_nor_outlive_one_clear():
    waker = Waker()
    for _ in range(20_000):
        waker.wake()
    waker.clear()
    assert not is_readable(waker)
    waker.close()


def test_it_ends_a_wait_in_another_thread():
    waker, woke = Waker(), []
    thread = threading.Thread(target=lambda: woke.append(select.select([waker.fileno()], [], [], 30)[0]))
    thread.start()
    waker.wake()
    thread.join(30)
    assert woke == [[waker.fileno()]]
    waker.close()


def test_wake_after_close_does_nothing():
    waker = Waker()
    waker.close()
    waker.wake()
