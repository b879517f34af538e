# SPDX-License-Identifier: Apache-2.0
"""Decode the Protobuf bodies that typed Go clients (kubectl create, helm) send. Pure.

Messages are described in protobuf_messages.txt; a body of any other kind is answered with 415. Values that JSON omits
when they are empty are omitted here, too: a zero that is no pointer in Go, an empty struct. Times are dropped: in what
kubectl and helm create, the server sets them.
"""

from __future__ import annotations

import base64
import functools
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvtier_localcluster.apiserver.store.api_errors import ApiError, bad_request
from kvtier_localcluster.apiserver.store.objects import Json

MAGIC: Final = b"k8s\x00"
"""How a Protobuf body of Kubernetes starts."""

_SIGN_BIT: Final = 1 << 63
_EMBEDDED: Final = "~"


@dataclass(frozen=True)
class _Field:
    name: str
    type: str
    is_pointer: bool
    is_list: bool
    is_map: bool


@functools.cache
def _messages() -> dict[str, dict[int, _Field]]:
    text = (importlib.resources.files(__package__) / "protobuf_messages.txt").read_text()
    messages: dict[str, dict[int, _Field]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            message, *fields = line.split()
            messages[message] = dict(_parse_field(field) for field in fields)
    return messages


def _parse_field(text: str) -> tuple[int, _Field]:
    number, name, kind = text.split(":")
    return int(number), _Field(name, kind.lstrip("!*%"), kind[0] == "!", "*" in kind[:2], "%" in kind[:2])


@functools.cache
def _message_name(api_version: str, kind: str) -> str | None:
    """Return the message of a kind: its group's first word stands before it; options and scales are in every group."""
    group = api_version.rpartition("/")[0].partition(".")[0] or "core"
    known = {"DeleteOptions": "meta.DeleteOptions", "Scale": "scale.Scale"}.get(kind, f"{group}.{kind}")
    return known if known in _messages() else None


def wire_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of every field of an encoded Protobuf message; values are integers or bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:  # noqa: PLR2004 (the bit that says that more follows)
                return value

    while place < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7) or varint()
        yield tag >> 3, data[place : place + size]
        place += size


def _message(data: bytes, name: str) -> Json:
    decoded: Json = {}
    fields = _messages()[name]
    for number, value in wire_fields(data):
        field = fields.get(number)
        if field is None:
            continue
        if field.is_map:
            entry = dict(wire_fields(value))
            decoded.setdefault(field.name, {})[entry.get(1, b"").decode()] = _value(entry.get(2, b""), field.type)
        elif field.is_list:
            decoded.setdefault(field.name, []).append(_value(value, field.type))
        elif field.name == _EMBEDDED:
            decoded |= _message(value, field.type)
        elif (found := _value(value, field.type)) or (field.is_pointer and found is not None):
            decoded[field.name] = found
    return decoded


def _value(value: Any, kind: str) -> Any:
    match kind:
        case "s":
            return value.decode()
        case "b":
            return base64.b64encode(value).decode()
        case "t":
            return bool(value)
        case "i":
            return value - 2 * _SIGN_BIT if value >= _SIGN_BIT else value
        case "q":
            return dict(wire_fields(value)).get(1, b"").decode()
        case "o":
            choice = dict(wire_fields(value))
            return choice.get(3, b"").decode() if choice.get(1) else _value(choice.get(2, 0), "i")
        case "T":
            return None
    return _message(value, kind)


def decode(body: bytes) -> Json:
    """Return the object in a Protobuf request body.

    Raises:
        ApiError: the body is damaged (400), or of a kind that is not known here (415).
    """
    try:
        envelope = dict(wire_fields(body[len(MAGIC) :]))
        type_meta = {number: value.decode() for number, value in wire_fields(envelope[1])}
        api_version, kind = type_meta[1], type_meta[2]
        name = _message_name(api_version, kind)
        if name is not None:
            return {"apiVersion": api_version, "kind": kind, **_message(envelope.get(2, b""), name)}
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise bad_request(f"the Protobuf body cannot be read: {error!r}") from error
    raise ApiError(415, "UnsupportedMediaType", f"Protobuf bodies of kind {kind} are not emulated: send JSON")
