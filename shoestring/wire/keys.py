"""CURVE keys in files: who a process is, and whom it talks to.

`NAME.secret` is readable by its owner alone, is never overwritten and is refused
when others can read it; `NAME.public` is there to be copied. Both are a first line
that says what the file is, then lines of `field: value` with a key in Z85, the text
form ZeroMQ takes. Reading one runs nothing and has a limit.

A run keeps its keys in one folder, named by `SHOESTRING_KEYS` where it is not given:

    shard.secret, shard.public   the shards of a run share one key
    worker-0.secret, ...         a key a worker, so that one can be revoked alone
    worker-0.public, ...         on a shard's host: the allow-list
    follower-eval.secret, ...    a key that may only read; so may any whose name begins like this

A shard's host needs `shard.secret` and every worker's public file; a worker's host
its own secret file and `shard.public`. No secret needs to be on two kinds of host.
"""

import os
import re
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, overload

import zmq
from zmq.utils import z85

from shoestring.errors import KeyFileError

SHARD = "shard"
FOLLOWER = "follower"  # so a key is named, or it begins with this and `-`, that may read and not push

_SECRET, _PUBLIC = ".secret", ".public"
_SECRET_TITLE = "shoestring secret key, format 1; keep it to yourself"
_PUBLIC_TITLE = "shoestring public key, format 1"
_FILE_LIMIT = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class KeyPair:
    """A process's own keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ShardKeys:
    """What a shard listens with: its own keys, and the public keys that may join."""

    pair: KeyPair
    allowed: frozenset[bytes]
    followers: frozenset[bytes] = frozenset()  # those of them that may only read


@dataclass(frozen=True)
class WorkerKeys:
    """What a worker connects with: its own keys, and the one shard key it trusts."""

    pair: KeyPair
    shard_public: bytes


def secret_file(name: str, folder: Path) -> Path:
    """Return where the secret key of `name` is kept."""
    return folder / (_checked(name) + _SECRET)


def public_file(name: str, folder: Path) -> Path:
    """Return where the public key of `name` is kept."""
    return folder / (_checked(name) + _PUBLIC)


def is_follower(name: str) -> bool:
    """Whether a key of this name may only read."""
    return name == FOLLOWER or name.startswith(f"{FOLLOWER}-")


def new(name: str, folder: Path) -> KeyPair:
    """Write a new NAME.secret and NAME.public; refuse to replace either."""
    secret, public = secret_file(name, folder), public_file(name, folder)
    pair = KeyPair(*zmq.curve_keypair())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(
            f"the folder `{folder}` cannot be made: {error.strerror}", hint="give another with `--dir`"
        ) from None
    text = f"public: {pair.public.decode()}\n"
    _write(secret, f"{_SECRET_TITLE}\n{text}secret: {pair.secret.decode()}\n", 0o600, name)
    try:
        _write(public, f"{_PUBLIC_TITLE}\n{text}", 0o644, name)
    except KeyFileError:
        secret.unlink()
        raise
    return pair


def load_pair(path: Path) -> KeyPair:
    """Read a secret file, unless others can read it too."""
    public, secret = _read(path, _SECRET_TITLE, ("public", "secret"), private=True)
    if zmq.curve_public(secret) != public:
        raise _broken(path, "its two keys do not belong together")
    return KeyPair(public, secret)


def load_public(path: Path) -> bytes:
    """Read a public file."""
    return _read(path, _PUBLIC_TITLE, ("public",), private=False)[0]


def load_named(folder: Path) -> dict[str, bytes]:
    """Read all public files of a folder: names and keys, sorted by name."""
    if not folder.is_dir():
        raise KeyFileError(
            f"there is no folder `{folder}`",
            hint=f"write a first key with `shoestring keys new {SHARD} --dir {folder}`",
        )
    files = sorted(folder.glob(f"*{_PUBLIC}"))
    return {_checked(file.name.removesuffix(_PUBLIC)): load_public(file) for file in files}


def load_allowed(path: Path) -> frozenset[bytes]:
    """Read an allow-list: one public file, or all those of a folder."""
    return frozenset(load_named(path).values()) if path.is_dir() else frozenset({load_public(path)})


@overload
def keys_from_folder(folder: Path, role: Literal["shard"], name: str = SHARD) -> ShardKeys: ...


@overload
def keys_from_folder(folder: Path, role: Literal["worker"], name: str) -> WorkerKeys: ...


def keys_from_folder(
    folder: Path, role: Literal["shard", "worker"], name: str = SHARD
) -> ShardKeys | WorkerKeys:
    """Read what a shard or the worker `name` needs from a folder laid out as above."""
    pair = load_pair(secret_file(name, folder))
    if role == "worker":
        return WorkerKeys(pair, load_public(public_file(SHARD, folder)))
    allowed = load_allowed(folder) - {pair.public}
    if not allowed:
        raise KeyFileError(
            f"`{folder}` holds no worker's public key, so none could join",
            hint=f"write one with `shoestring keys new worker-0 --dir {folder}`, or copy it there",
        )
    followers = (key for name, key in load_named(folder).items() if is_follower(name))
    return ShardKeys(pair, allowed, frozenset(followers) & allowed)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name.endswith((_SECRET, _PUBLIC)):
        raise KeyFileError(
            f"`{name}` is no name for a key",
            hint="take letters, digits, `-`, `_` and `.`, like `worker-3`; the folder goes into `--dir`",
        )
    return name


def _write(path: Path, text: str, mode: int, name: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise KeyFileError(
            f"`{path}` already exists",
            hint=f"choose another name, or remove it to replace the key of `{name}`",
        ) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise _unwritable(path, error) from None


def _read(path: Path, title: str, fields: tuple[str, ...], *, private: bool) -> list[bytes]:
    try:
        # Non-blocking, as a named pipe would otherwise wait here for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(
            f"the key file `{path}` cannot be read: {error.strerror}",
            hint="write one with `shoestring keys new`, or copy it here from where it was written",
        ) from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise _broken(path, "it is not a plain file")
        if private and mode & 0o077:
            raise KeyFileError(
                f"`{path}` holds a secret key, but its mode {mode & 0o777:o} lets others in",
                hint=f"run `chmod 600 {path}`; if someone may have read it, replace the key",
            )
        content = os.read(fd, _FILE_LIMIT + 1)
    finally:
        os.close(fd)
    # What it says instead is not repeated: a secret must not end up in a log.
    lines = content.split(b"\n")
    if len(content) > _FILE_LIMIT or len(lines) != len(fields) + 2 or lines[-1] != b"":
        raise _broken(path, f"it is not {len(fields) + 1} whole lines")
    if lines[0] != title.encode():
        raise _broken(path, f"its first line is not `{title}`")
    keys = []
    for name, line in zip(fields, lines[1:], strict=False):
        prefix, key = line[: len(name) + 2], line[len(name) + 2 :]
        if prefix != f"{name}: ".encode() or not _is_key(key):
            raise _broken(path, f"there is no `{name}: ` with a key of 40 characters where it should be")
        keys.append(key)
    return keys


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, struct.error):  # a character that is not in Z85; five of them past 32 bits
        return False


def _broken(path: Path, what: str) -> KeyFileError:
    return KeyFileError(
        f"`{path}` is no key file: {what}",
        hint="copy it again, or write a new key with `shoestring keys new`",
    )


def _unwritable(path: Path, error: OSError) -> KeyFileError:
    return KeyFileError(
        f"`{path}` cannot be written: {error.strerror}", hint="give a folder of your own with `--dir`"
    )
