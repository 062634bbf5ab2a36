"""What a codec can be told, and how that is written as text.

A codec class names a frozen dataclass, `options_type`, whose fields all have
defaults and are `int`, `float`, `str`, `bool` or one of these `| None`. Its
`__post_init__` refuses values out of range. From these fields alone come the
command line's `dct:block=16,step=1.5`, the codec's `spec` and the list of what
exists, so no codec reads or writes text itself.

The text is canonical: options that differ from their default, in field order.
Equal options give equal text, and the text gives equal options back.
"""

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from shoestring.codec.base import Codec
from shoestring.errors import UnknownCodecError, UsageError

_BOOLS = {"true": True, "false": False}
_NONE = "none"


@dataclass(frozen=True)
class NoOptions:
    """The options of a codec that has none."""


@dataclass(frozen=True)
class Option:
    """One thing a codec can be told."""

    name: str
    type: str
    default: object

    @property
    def text(self) -> str:
        """The option as it is written, with its default."""
        return f"{self.name}={_write(self.default)}"


class ConfiguredCodec(Codec):
    """A codec whose options are a dataclass. Equal options make equal codecs.

    `threads` is how many cores a codec may use; it never changes a bit of what
    comes out, so it is no part of `spec` or of equality.
    """

    options_type: ClassVar[type[Any]] = NoOptions
    options: Any

    def __init__(self, *, threads: int = 1, **options: Any) -> None:
        _check_types(self.name, self.options_type, options)
        self.options = self.options_type(**options)
        self.threads = threads

    @cached_property
    def spec(self) -> str:
        text = write_options(self.options)
        return f"{self.name}:{text}" if text else self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfiguredCodec) and (self.name, self.options) == (other.name, other.options)

    def __hash__(self) -> int:
        return hash((self.name, self.options))

    def __repr__(self) -> str:
        return f"<codec {self.spec}>"


def list_options(options_type: type[Any]) -> tuple[Option, ...]:
    """List the fields of an options dataclass, in order."""
    defaults = options_type()
    return tuple(
        Option(name, _type_text(kind, optional), getattr(defaults, name))
        for name, (kind, optional) in _kinds(options_type).items()
    )


def read_options(codec: str, options_type: type[Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Turn the text of each option into its value; refuse what `options_type` refuses."""
    kinds = _kinds(options_type)
    known = ", ".join(f"`{option.text}`" for option in list_options(options_type))
    takes = f"`{codec}` takes {known or 'no options'}"
    values = {}
    for name, text in texts.items():
        if name not in kinds:
            raise UnknownCodecError(
                f"codec `{codec}` has no option `{name}`", hint=suggest(name, kinds) + takes
            )
        kind, optional = kinds[name]
        try:
            values[name] = None if optional and text == _NONE else _read(kind, text)
        except ValueError:
            raise UsageError(
                f"option `{name}` of codec `{codec}` is `{text}`, expected {_type_text(kind, optional)}",
                hint=takes,
            ) from None
    try:
        options_type(**values)
    except ValueError as error:
        raise UsageError(f"codec `{codec}`: {error}", hint=takes) from None
    return values


def write_options(options: Any) -> str:
    """Write what differs from the defaults as `name=value,...`, in field order."""
    defaults = type(options)()
    kinds = _kinds(type(options))
    parts = []
    for name, (kind, _) in kinds.items():
        value = getattr(options, name)
        if value != getattr(defaults, name):
            parts.append(f"{name}={_write(None if value is None else kind(value))}")
    return ",".join(parts)


def suggest(wrong: str, known: Iterable[str]) -> str:
    """Say which known name is closest to a wrong one; nothing where none is close."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"did you mean `{close[0]}`? " if close else ""


def _kinds(options_type: type[Any]) -> dict[str, tuple[type[Any], bool]]:
    """The type of each field, without `None`, and whether `None` is allowed."""
    hints = typing.get_type_hints(options_type)
    kinds = {}
    for field in fields(options_type):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        choices = [kind for kind in typing.get_args(hint) if kind is not type(None)] if union else [hint]
        if len(choices) != 1 or choices[0] not in (int, float, str, bool):
            raise TypeError(
                f"option `{field.name}` is {hint}, expected int, float, str, bool or one `| None`"
            )
        kinds[field.name] = (choices[0], union)
    return kinds


def _check_types(codec: str, options_type: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse values of another type than the field's, which no text could give; an int is a float too."""
    for name, (kind, optional) in _kinds(options_type).items():
        if name not in values or (optional and values[name] is None):
            continue
        if not isinstance(values[name], (int, float) if kind is float else kind):
            expected = _type_text(kind, optional)
            raise UsageError(
                f"option `{name}` of codec `{codec}` is {values[name]!r}, expected {expected}",
                hint=f"give `{name}` as {expected}",
            )


def _type_text(kind: type[Any], optional: bool) -> str:
    return f"{kind.__name__} | None" if optional else kind.__name__


def _read(kind: type[Any], text: str) -> Any:
    if kind is bool:
        if text not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text]
    value = kind(text)
    if kind is float and not math.isfinite(value):
        raise ValueError(text)
    return value


def _write(value: object) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else repr(value)
    if not text or "," in text or text != text.strip():
        raise UsageError(
            f"option value {value!r} cannot be written in a codec's text",
            hint="leave out commas, outer spaces and empty text",
        )
    return text
