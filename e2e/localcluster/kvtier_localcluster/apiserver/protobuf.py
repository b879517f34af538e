# SPDX-License-Identifier: Apache-2.0
"""Decode the few Protobuf bodies that typed Go clients (kubectl create, helm) send. Pure.

Only the kinds in `_MESSAGES` are known; any other body is answered with 415, so that a Go client says what is wrong.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

from kvtier_localcluster.apiserver.errors import ApiError, bad_request
from kvtier_localcluster.apiserver.objects import Json

Message = dict[int, tuple[str, Any]]
"""The fields of a message: number -> name and kind."""

MAGIC: Final = b"k8s\x00"
"""How a Protobuf body of Kubernetes starts."""

# Kinds: text, texts, integer, flag, text_map, bytes_map, or a nested message, alone or in a list of one (repeated).
_OWNER_REFERENCE: Message = {
    1: ("kind", "text"),
    3: ("name", "text"),
    4: ("uid", "text"),
    5: ("apiVersion", "text"),
    6: ("controller", "flag"),
    7: ("blockOwnerDeletion", "flag"),
}
_METADATA: Message = {
    1: ("name", "text"),
    2: ("generateName", "text"),
    3: ("namespace", "text"),
    5: ("uid", "text"),
    6: ("resourceVersion", "text"),
    11: ("labels", "text_map"),
    12: ("annotations", "text_map"),
    13: ("ownerReferences", [_OWNER_REFERENCE]),
    14: ("finalizers", "texts"),
}
_DELETE_OPTIONS: Message = {
    1: ("gracePeriodSeconds", "integer"),
    2: ("preconditions", {1: ("uid", "text"), 2: ("resourceVersion", "text")}),
    3: ("orphanDependents", "flag"),
    4: ("propagationPolicy", "text"),
    5: ("dryRun", "texts"),
}
_RESOURCE_ATTRIBUTES: Message = {
    1: ("namespace", "text"),
    2: ("verb", "text"),
    3: ("group", "text"),
    4: ("version", "text"),
    5: ("resource", "text"),
    6: ("subresource", "text"),
    7: ("name", "text"),
}
_MESSAGES: dict[str, Message] = {
    "Secret": {
        1: ("metadata", _METADATA),
        2: ("data", "bytes_map"),
        3: ("type", "text"),
        4: ("stringData", "text_map"),
        5: ("immutable", "flag"),
    },
    "ConfigMap": {
        1: ("metadata", _METADATA),
        2: ("data", "text_map"),
        3: ("binaryData", "bytes_map"),
        4: ("immutable", "flag"),
    },
    "Namespace": {1: ("metadata", _METADATA)},
    "ServiceAccount": {1: ("metadata", _METADATA)},
    "DeleteOptions": _DELETE_OPTIONS,
    "Eviction": {1: ("metadata", _METADATA), 2: ("deleteOptions", _DELETE_OPTIONS)},
    "SelfSubjectAccessReview": {
        1: ("metadata", _METADATA),
        2: ("spec", {1: ("resourceAttributes", _RESOURCE_ATTRIBUTES)}),
    },
}


_CONTINUES: Final = 0x80
_LENGTH_DELIMITED: Final = 2


def _varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte % _CONTINUES) << shift
        shift += 7
        if byte < _CONTINUES:
            return value, start


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, place = _varint(data, place)
            yield number, value
        elif wire_type == _LENGTH_DELIMITED:
            size, place = _varint(data, place)
            yield number, data[place : place + size]
            place += size
        else:
            place += 8 if wire_type == 1 else 4


def _decode_message(data: bytes, message: Message) -> Json:
    decoded: Json = {}
    for number, value in _fields(data):
        if number in message:
            name, kind = message[number]
            _decode_field(decoded, name, kind, value)
    return decoded


def _decode_field(decoded: Json, name: str, kind: Any, value: Any) -> None:
    if isinstance(kind, dict):
        decoded[name] = _decode_message(value, kind)
    elif isinstance(kind, list):
        decoded.setdefault(name, []).append(_decode_message(value, kind[0]))
    elif kind in ("text_map", "bytes_map"):
        entry = dict(_fields(value))
        content = entry.get(2, b"")
        text = content if kind == "text_map" else base64.b64encode(content)
        decoded.setdefault(name, {})[entry.get(1, b"").decode()] = text.decode()
    elif kind == "texts":
        decoded.setdefault(name, []).append(value.decode())
    elif kind == "text":
        if value:
            decoded[name] = value.decode()
    else:
        decoded[name] = bool(value) if kind == "flag" else value


def decode(body: bytes) -> Json:
    """Return the object in a Protobuf request body.

    Raises:
        ApiError: the body is damaged (400), or of a kind that is not known here (415).
    """
    try:
        envelope = dict(_fields(body[len(MAGIC) :]))
        type_meta = {number: value.decode() for number, value in _fields(envelope[1])}
        api_version, kind = type_meta[1], type_meta[2]
        if kind in _MESSAGES:
            return {"apiVersion": api_version, "kind": kind, **_decode_message(envelope.get(2, b""), _MESSAGES[kind])}
    except (KeyError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise bad_request(f"the Protobuf body cannot be read: {error!r}") from error
    raise ApiError(415, "UnsupportedMediaType", f"Protobuf bodies of kind {kind} are not emulated: send JSON")
