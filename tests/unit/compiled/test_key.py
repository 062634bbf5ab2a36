"""A kernel's key changes with all that its machine code depends on, and with nothing else."""

import pytest

from shoestring.compiled.key import key_of
from tests.unit.compiled.kernels import SOURCES, edited, load

SAME = [
    ("top", "Sum something.", "Sum something else."),
    ("top", "The module's docstring.", "Another one.\n\nOf several lines."),
    ("top", "  # a comment", ""),
    ("middle", '    """Ask the leaf."""\n', ""),
    ("middle", "@decode_jit\ndef middle", "\n\n# Further below.\n@decode_jit\ndef middle"),
    ("leaf", "Return the negative.", "Return it with the other sign."),
    ("leaf", "Emit an instruction.", "Emit the instruction."),
    ("leaf", "(1, -1), 5", "(1, -1), 6"),
]
OTHER = [
    ("top", "total = 0", "total = 1"),
    ("top", "total = 0", "total = 0.0"),
    ("top", "range(x.size)", "range(x.size - 1)"),
    ("top", "@decode_jit\ndef top", "from shoestring.compiled.jit import encode_jit\n@encode_jit\ndef top"),
    ("middle", "add_one(x)\n\n", "2 * add_one(x)\n\n"),
    ("middle", "x + 1", "x + 2"),
    ("middle", "x + 1", "x + True"),
    ("leaf", "* FACTOR", "// FACTOR"),
    ("leaf", "OFFSET, SIGNS, UNUSED = 3, 7", "OFFSET, SIGNS, UNUSED = 4, 7"),
    ("leaf", "OFFSET, SIGNS, UNUSED = 3, 7", "OFFSET, SIGNS, UNUSED = 3, 8"),
    ("leaf", "(1, -1)", "(-1, -1)"),
    ("leaf", "np.arange(4,", "np.arange(1, 5,"),
    ("leaf", "dtype=np.int64", "dtype=np.int32"),
    ("leaf", "builder.neg", "builder.not_"),
    ("leaf", "signature, args):", "signature, args, x=0):"),
]


@pytest.fixture
def own_key(monkeypatch):
    return key_of(load(monkeypatch, SOURCES).top)


def test_the_same_code_has_the_same_key(monkeypatch, own_key):
    assert key_of(load(monkeypatch, SOURCES).top) == own_key
    for edit in SAME:
        assert key_of(load(monkeypatch, edited(*edit)).top) == own_key, edit


def test_other_code_has_another_key(monkeypatch, own_key):
    keys = {own_key}
    for edit in OTHER:
        key = key_of(load(monkeypatch, edited(*edit)).top)
        assert key not in keys, edit
        keys.add(key)


def test_copies_of_a_template_have_keys_of_their_constants(monkeypatch):
    keys = [
        key_of(load(monkeypatch, edited("top", "width=2", constants)).special)
        for constants in ("width=2", "width=3", "width=2.0", "width=2, middle=top")
    ]
    assert len(set(keys)) == 4
    assert key_of(load(monkeypatch, SOURCES).special) == keys[0]


def test_a_constant_counts_with_its_value_when_a_kernel_is_compiled(monkeypatch, own_key):
    top = load(monkeypatch, SOURCES)
    monkeypatch.setitem(top.middle.py_func.__globals__["leaf"].__dict__, "OFFSET", 8)
    changed = edited("leaf", "OFFSET, SIGNS, UNUSED = 3, 7", "OFFSET, SIGNS, UNUSED = 3, 8")
    assert key_of(top.top) != own_key
    assert key_of(top.top) == key_of(load(monkeypatch, changed).top)


def test_kernels_that_call_each_other_have_keys(monkeypatch):
    circle = "total += middle(x[i])", "total += middle(x[i]) if x.size else top(x)"
    assert key_of(load(monkeypatch, edited("top", *circle)).top)


def test_what_differs_from_process_to_process_is_refused(monkeypatch):
    top = load(monkeypatch, edited("top", "width=2", "width=object()"))
    with pytest.raises(TypeError, match="of which no key can be made"):
        key_of(top.special)
