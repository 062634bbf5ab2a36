"""Find codecs by name and build them from text such as `dct:block=16,step=1.5`.

Built-in codecs are imported when first asked for. Other packages add theirs
through the entry point group `shoestring.codecs`: the name of the entry point
is the codec's name, its object a `Codec` subclass whose constructor takes
`threads` and its options as keywords and which names them in `options_type`
(deriving from `ConfiguredCodec` gives all of that). A built-in name always
means the built-in codec, whatever is installed.
"""

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shoestring.codec.base import Codec
from shoestring.codec.options import NoOptions, Option, list_options, read_options, suggest
from shoestring.errors import CodecError, UnknownCodecError, UsageError

GROUP = "shoestring.codecs"
LOSSLESS = "float32"  # values as they are: a push or an answer of them needs no feedback

_BUILT_IN = {
    "dct": "shoestring.codec.dct:Dct",
    "float32": "shoestring.codec.plain.float32:Float32",
    "float16": "shoestring.codec.plain.float16:Float16",
    "bfloat16": "shoestring.codec.plain.bfloat16:BFloat16",
    "int8": "shoestring.codec.plain.int8:Int8",
    "topk": "shoestring.codec.plain.topk:TopK",
}


def names() -> list[str]:
    """List every codec: the built-in ones, then those of other packages."""
    return [*_BUILT_IN, *sorted(_others())]


def describe(name: str) -> str:
    """Say in one line what a codec does."""
    lines = (_find(name).__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def options(name: str) -> tuple[Option, ...]:
    """List what a codec can be told, with types and defaults."""
    return list_options(_options_type(_find(name)))


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:option=value,...` into the name and its options, all still text."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    texts: dict[str, str] = {}
    for piece in rest.split(",") if colon else []:
        option, _, value = (part.strip() for part in piece.partition("="))
        if not option or not value:
            raise _malformed(text, f"`{piece.strip()}` where `option=value` was expected")
        if option in texts:
            raise _malformed(text, f"`{option}` given twice")
        texts[option] = value
    if not name:
        raise _malformed(text, "no name")
    return name, texts


def make(spec: str | Codec, *, threads: int = 1) -> Codec:
    """Build the codec that `spec` names; a codec that is already built is returned as it is."""
    if isinstance(spec, Codec):
        return spec
    if threads < 1:
        raise UsageError(f"a codec cannot use {threads} threads", hint="give `threads` as 1 or more")
    name, texts = parse(spec)
    kind = _find(name)
    codec: Codec = kind(threads=threads, **read_options(name, _options_type(kind), texts))
    return codec


def _malformed(text: str, problem: str) -> UsageError:
    return UsageError(f"codec `{text}` has {problem}", hint="write it like `dct` or `dct:block=16,step=1.5`")


def _options_type(codec: Any) -> type[Any]:
    kind: type[Any] = getattr(codec, "options_type", NoOptions)
    return kind


def _others() -> dict[str, list[EntryPoint]]:
    """The entry points of other packages, by name; more than one means a clash."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name not in _BUILT_IN:
            found.setdefault(entry.name, []).append(entry)
    return found


def _find(name: str) -> Any:
    """Import a codec's class. `Any`: only the registry's own contract types its constructor."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    others = _others()
    if name not in others:
        known = names()
        raise UnknownCodecError(
            f"there is no codec `{name}`", hint=f"{suggest(name, known)}the codecs are {', '.join(known)}"
        )
    return _load(name, others[name])


def _load(name: str, entries: list[EntryPoint]) -> Any:
    where = sorted({entry.value for entry in entries})
    if len(where) > 1:
        raise CodecError(
            f"codec `{name}` is offered more than once: {', '.join(where)}",
            hint="uninstall all but one of the packages that offer it",
        )
    try:
        codec = entries[0].load()
    except Exception as error:  # another package's import can fail in any way
        raise CodecError(
            f"codec `{name}` cannot be loaded from `{where[0]}`: {error}",
            hint="repair or uninstall the package that offers it",
        ) from error
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise CodecError(
            f"codec `{name}` is `{where[0]}`, which is no subclass of `Codec`",
            hint="repair or uninstall the package that offers it",
        )
    return codec


_codecs: dict[str, Codec] = {}


def codec_of(text: str) -> Codec:
    """Like `make` for a text alone, but one that was built before is returned again."""
    codec = _codecs.get(text)
    if codec is None:
        if len(_codecs) > 256:  # a worker that names ever new options must not fill the memory
            _codecs.clear()
        codec = _codecs[text] = make(text)
    return codec
