"""How the pool and its workers talk: frames of JSON, four bytes of length before each.

JSON and not pickle, so that a worker that hostile text has taken over cannot run anything in the parent.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct(">I")
HEADER = _LENGTH.size
MAX_FRAME = 64 * 2**20
_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def encode(value: Any) -> bytes:
    """A frame. Tuples and keys that are not texts survive; values that JSON has no form for arrive as their `str`."""
    body = json.dumps(_marked(value), default=str).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Any:
    """The value of a frame's body. Raises ValueError for anything but JSON."""
    return _unmarked(json.loads(body))


def body_length(header: bytes) -> int:
    """Length of the body that follows. Raises ValueError when no frame of ours is so long."""
    length = int(_LENGTH.unpack(header)[0])
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
    return length


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(item) for item in value]}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _marked(item) for key, item in value.items()}
        return {_PAIRS: [[_marked(key), _marked(item)] for key, item in value.items()]}
    return value


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_unmarked(item) for item in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {_unmarked(key): _unmarked(item) for key, item in value[_PAIRS]}
    return {key: _unmarked(item) for key, item in value.items()}
