# SPDX-License-Identifier: Apache-2.0
"""Put the real paths and addresses where a container's text names those it would see in a real container. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WILDCARD = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")
_VARIABLE = re.compile(r"\$(\$|\(([A-Za-z0-9_.-]+)\))")


class PathMap:
    """Directories of the machine for mount paths of one container.

    A mount path is replaced where it stands as a path of its own or at the head of one: not inside another path
    (`/data/tmp` for `/tmp`), a longer name (`/tmpfoo`) or the path of a URL with a host, but after `file://`.
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
