# SPDX-License-Identifier: Apache-2.0
"""What an image would bring: images are not pulled, so a table says what containers of some images get. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


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
