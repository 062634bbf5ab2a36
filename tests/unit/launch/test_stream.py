"""Lines are passed on whole, and the last are remembered."""

import os

from shoestring.launch.stream import KEPT_LINES, Stream


def read(content: bytes) -> tuple[list[str], list[str]]:
    reader, writer = os.pipe()
    shown: list[str] = []
    stream = Stream(os.fdopen(reader, "rb"), shown.append)
    os.write(writer, content)
    os.close(writer)
    stream.join(10.0)
    return shown, list(stream.last)


def test_lines_are_passed_on_in_order_and_the_last_are_kept():
    lines = [f"line {number}" for number in range(KEPT_LINES + 5)]
    assert read("\n".join(lines).encode()) == (lines, lines[-KEPT_LINES:])


def test_a_progress_bar_shows_its_last_state():
    assert read(b"1%\r50%\r100%\r\nend\n")[0] == ["100%", "end"]


def test_bytes_that_are_no_text_do_not_stop_it():
    assert read(b"\xff\xfe\nend")[0] == ["\ufffd\ufffd", "end"]
