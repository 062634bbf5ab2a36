"""Codecs by name, their options as text, and codecs of other packages."""

import sys
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.codec import registry
from shoestring.codec.base import Codec, Layout
from shoestring.codec.options import ConfiguredCodec, Option, read_options
from shoestring.codec.plain.float32 import Float32
from shoestring.codec.plain.int8 import Int8
from shoestring.codec.plain.topk import TopK
from shoestring.errors import CodecError, UnknownCodecError, UsageError
from tests.unit.codec.cases import for_each


@dataclass(frozen=True)
class AllKinds:
    count: int = 3
    ratio: float = 0.5
    mode: str = "fast"
    exact: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"`count` is {self.count}, expected 0 or more")


class Other(Float32):
    """Another package's codec.

    With more to say.
    """

    name = "other"
    options_type = AllKinds


@pytest.fixture
def offer(monkeypatch):
    """Pretend that packages offering these entry points are installed."""
    module = types.ModuleType("another_package")
    module.Other, module.number = Other, 1
    monkeypatch.setitem(sys.modules, "another_package", module)

    def install(*pairs: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, registry.GROUP) for name, value in pairs]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.GROUP else [])

    install(("other", "another_package:Other"))
    return install


@for_each(
    ("text", "want"),
    [
        ("dct", ("dct", {})),
        ("dct:block=16,step=1.5", ("dct", {"block": "16", "step": "1.5"})),
        (" dct : block = 16 , step=1.5 ", ("dct", {"block": "16", "step": "1.5"})),
        ("a:b=c=d:e", ("a", {"b": "c=d:e"})),
    ],
)
def test_parse(text, want):
    assert registry.parse(text) == want


@for_each("text", ["", ":", ":a=1", "dct:", "dct:block", "dct:=1", "dct:a=", "dct:a=1,", "dct:a=1,a=2"])
def test_malformed_text_is_refused(text):
    with pytest.raises(UsageError, match="codec `") as caught:
        registry.parse(text)
    assert "dct:block=16,step=1.5" in caught.value.hint


def test_built_in_names():
    assert registry.names()[:6] == ["dct", "float32", "float16", "bfloat16", "int8", "topk"]


@for_each("name", registry.names())
def test_every_codec_is_made_by_its_name(name):
    codec = registry.make(name)
    assert (codec.name, codec.spec) == (name, name)
    assert registry.make(name, threads=2) == codec
    line = registry.describe(name)
    assert line
    assert "\n" not in line
    for option in registry.options(name):
        given_default = registry.make(f"{name}:{option.text}")
        assert given_default == codec
        assert given_default.spec == name


def test_options_change_the_codec():
    assert registry.make("int8:block=16") == Int8(block=16) != Int8()
    assert registry.make("topk:ratio=1") == TopK(ratio=1.0)
    assert hash(registry.make("int8:block=16")) == hash(Int8(block=16))
    assert repr(Int8(block=16)) == "<codec int8:block=16>"
    assert registry.options("topk") == (Option("ratio", "float", 0.01),)
    assert registry.options("float32") == ()


def test_a_codec_is_returned_as_it_is():
    codec = Int8(block=3)
    assert registry.make(codec) is codec


def test_threads_must_be_positive():
    with pytest.raises(UsageError, match="0 threads"):
        registry.make("int8", threads=0)


@for_each(
    ("text", "error", "hint"),
    [
        ("flot16", UnknownCodecError, "did you mean `float16`? the codecs are dct, float32"),
        ("zzz", UnknownCodecError, "the codecs are dct, float32"),
        ("int8:blok=3", UnknownCodecError, "did you mean `block`? `int8` takes `block=64`"),
        ("float32:block=3", UnknownCodecError, "`float32` takes no options"),
        ("int8:block=x", UsageError, "`int8` takes `block=64`"),
        ("int8:block=1.5", UsageError, "`int8` takes `block=64`"),
        ("int8:block=none", UsageError, "`int8` takes `block=64`"),
        ("int8:block=0", UsageError, "1 to 65536"),
        ("topk:ratio=nan", UsageError, "`topk` takes `ratio=0.01`"),
        ("topk:ratio=inf", UsageError, "`topk` takes `ratio=0.01`"),
        ("topk:ratio=2", UsageError, "above 0 and up to 1"),
    ],
)
def test_wrong_names_and_values_are_refused_with_a_hint(text, error, hint):
    with pytest.raises(error) as caught:
        registry.make(text)
    assert hint in caught.value.hint
    assert isinstance(caught.value, UnknownCodecError) == (error is UnknownCodecError)


@for_each("value", [1.5, "16", None])
def test_python_values_of_another_type_are_refused(value):
    with pytest.raises(UsageError, match=r"`block` of codec `int8` is .*, expected int"):
        Int8(block=value)


def test_every_kind_of_option_is_read():
    texts = {"count": "7", "ratio": "1e-3", "mode": "slow", "exact": "true", "limit": "2"}
    want = {"count": 7, "ratio": 0.001, "mode": "slow", "exact": True, "limit": 2.0}
    assert read_options("other", AllKinds, texts) == want
    assert read_options("other", AllKinds, {"limit": "none"}) == {"limit": None}


@for_each("texts", [{"exact": "yes"}, {"exact": "True"}, {"limit": "None"}, {"count": "-1"}])
def test_values_no_field_takes_are_refused(texts):
    with pytest.raises(UsageError, match="other"):
        read_options("other", AllKinds, texts)


finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8", exclude_characters=","), min_size=1).filter(
    lambda x: x == x.strip()
)


@settings(max_examples=100)
@given(st.builds(AllKinds, st.integers(0), finite, words, st.booleans(), st.none() | finite))
def test_spec_builds_an_equal_codec(options):
    codec = Other(**vars(options))
    name, texts = registry.parse(codec.spec)
    again = Other(**read_options(name, AllKinds, texts))
    assert again == codec
    assert again.spec == codec.spec


def test_spec_is_canonical():
    assert Other().spec == "other"
    assert Other(limit=1, exact=True, count=3, ratio=2).spec == "other:ratio=2.0,exact=true,limit=1.0"


@for_each("mode", ["a,b", " a", ""])
def test_text_that_spec_cannot_hold_is_refused(mode):
    with pytest.raises(UsageError, match="cannot be written"):
        _ = Other(mode=mode).spec


def test_codec_of_another_package(offer):
    assert registry.names()[-1] == "other"
    assert registry.describe("other") == "Another package's codec."
    assert registry.options("other")[-1] == Option("limit", "float | None", None)
    assert registry.make("other:mode=slow", threads=3) == Other(mode="slow")


def test_built_in_name_cannot_be_replaced(offer):
    offer(("int8", "another_package:Other"))
    assert registry.names().count("int8") == 1
    assert type(registry.make("int8")) is Int8


@for_each(
    ("pairs", "message"),
    [
        ([("other", "another_package:Other"), ("other", "second:Other")], "more than once"),
        ([("other", "another_package:Missing")], "cannot be loaded"),
        ([("other", "no_such_package:Other")], "cannot be loaded"),
        ([("other", "another_package:number")], "no subclass"),
    ],
)
def test_broken_entry_points_are_refused(offer, pairs, message):
    offer(*pairs)
    assert "other" in registry.names()
    with pytest.raises(CodecError, match=message):
        registry.make("other")


def test_codec_without_options_type(offer):
    class Bare(Codec):
        """Bare."""

        name = spec = "bare"

        def __init__(self, *, threads: int) -> None:
            self.threads = threads

        def max_bytes(self, layout: Layout) -> int:
            return 0

        _encode = _decode = None

    sys.modules["another_package"].Bare = Bare
    offer(("bare", "another_package:Bare"))
    assert registry.make("bare", threads=2).threads == 2
    assert registry.options("bare") == ()


def test_unsupported_field_type_is_our_own_mistake():
    @dataclass(frozen=True)
    class Wrong:
        sides: tuple = ()

    class Broken(ConfiguredCodec):
        options_type = Wrong

    with pytest.raises(TypeError, match="`sides`"):
        registry.list_options(Broken.options_type)
