# SPDX-License-Identifier: Apache-2.0
"""The environment, paths and addresses of a container. Pure; sources of values are passed in.

Images are not pulled: a table of `ImageProfile` gives containers of some images an environment and an entry point.
Mount paths and the wildcard address in the texts of a container are replaced by real ones.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier_localcluster.errors import ConfigMissing
from kvtier_localcluster.kinds import Json

_WILDCARD = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")
_VARIABLE = re.compile(r"\$(\$|\(([A-Za-z0-9_.-]+)\))")


class PathMap:
    """Directories of the machine for mount paths of one container.

    A mount path is replaced as a path of its own, at the head of one, and after `file://`. It stays inside another path
    (`/data/tmp` for `/tmp`), in a longer name (`/tmpfoo`), and in a URL with a host.
    """

    def __init__(self, directories: Mapping[str, str]) -> None:
        """Prepare for replacing all mount paths in one pass, so that nothing is replaced twice."""
        self._directories = {path.rstrip("/"): directory for path, directory in directories.items() if path != "/"}
        ordered = sorted(self._directories, key=len, reverse=True)
        paths = "|".join(re.escape(path) for path in ordered)
        self._pattern = re.compile(rf"(?:(?<=file://)|(?<![\w./~%-]))(?:{paths})(?![\w-]|\.\w)") if ordered else None

    def rewrite(self, text: str) -> str:
        """Return the text with real paths."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._directories[found[0]], text)


def with_address(text: str, address: str) -> str:
    """Return the text with the pod's own address for the wildcard, so that two pods may use the same port."""
    return _WILDCARD.sub(address, text)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does: `$$` escapes, and unknown names stay as they are."""

    def replacement(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return variables.get(found[2], found[0])

    return _VARIABLE.sub(replacement, text)


@dataclass(frozen=True, kw_only=True)
class ImageProfile:
    """The environment and entry point of all images whose name starts with a prefix."""

    prefix: str
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()


def profile_for(image: str, profiles: Iterable[ImageProfile]) -> ImageProfile:
    """Return the profile with the longest prefix of the image's name, or an empty one."""
    fitting = [profile for profile in profiles if image.startswith(profile.prefix)]
    return max(fitting, key=lambda profile: len(profile.prefix), default=ImageProfile(prefix=""))


Lookup = Callable[[str], Json | None]
"""Returns the object of that name in the pod's namespace, or None."""

_KINDS = ("configMap", "secret")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the values of one pod's variables and files come from."""

    pod: Json
    pod_ip: str
    config_map: Lookup
    secret: Lookup

    def referred(self, kind: str, reference: Json) -> Json | None:
        """Return the ConfigMap or Secret that a reference names; None where it is absent and optional.

        Raises:
            ConfigMissing: it is absent.
        """
        found = (self.secret if kind == "secret" else self.config_map)(reference["name"])
        if found is None and not reference.get("optional"):
            raise ConfigMissing(f'{kind.lower()} "{reference["name"]}" not found')
        return found


def declared(container: Json, sources: Sources) -> dict[str, str]:
    """Return the variables of a container, each seeing those before it.

    Raises:
        ConfigMissing: a ConfigMap, Secret or key that is not optional does not exist.
    """
    variables: dict[str, str] = {}
    for entry in container.get("envFrom") or []:
        prefix = entry.get("prefix", "")
        variables.update({f"{prefix}{name}": value for name, value in _all_of(entry, sources).items()})
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            value = _referred(entry["valueFrom"], sources)
            if value is not None:
                variables[entry["name"]] = value
        else:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
    return variables


def field_value(path: str, sources: Sources) -> str:
    """Return a field of the pod, as the downward API names it; raises ConfigMissing for a field it does not have."""
    if path == "status.podIP":
        return sources.pod_ip
    subscript = _SUBSCRIPT.fullmatch(path)
    value: Any = sources.pod
    for name in ("metadata", *subscript.groups()) if subscript else path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) or (value is None and not subscript):
        raise ConfigMissing(f"field path {path} is not supported")
    return str(value or "")


def texts_of(manifest: Json) -> dict[str, bytes]:
    """Return the entries of a ConfigMap or Secret."""
    data = manifest.get("data") or {}
    if manifest["kind"] == "Secret":
        return {name: base64.b64decode(value) for name, value in data.items()}
    binary = {name: base64.b64decode(value) for name, value in (manifest.get("binaryData") or {}).items()}
    return {**{name: value.encode() for name, value in data.items()}, **binary}


def _all_of(entry: Json, sources: Sources) -> dict[str, str]:
    kind = next(kind for kind in _KINDS if f"{kind}Ref" in entry)
    manifest = sources.referred(kind, entry[f"{kind}Ref"])
    return {} if manifest is None else {name: _text(value) for name, value in texts_of(manifest).items()}


def _referred(source: Json, sources: Sources) -> str | None:
    if "fieldRef" in source:
        return field_value(source["fieldRef"]["fieldPath"], sources)
    kind = next((kind for kind in _KINDS if f"{kind}KeyRef" in source), None)
    if kind is None:
        raise ConfigMissing(f"valueFrom {', '.join(source)} is not supported")
    reference = source[f"{kind}KeyRef"]
    manifest = sources.referred(kind, reference)
    entries = {} if manifest is None else texts_of(manifest)
    if reference["key"] in entries:
        return _text(entries[reference["key"]])
    if reference.get("optional"):
        return None
    where = f"{sources.pod['metadata']['namespace']}/{reference['name']}"
    raise ConfigMissing(f"couldn't find key {reference['key']} in {kind} {where}")


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
