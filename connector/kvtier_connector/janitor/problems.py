# SPDX-License-Identifier: Apache-2.0
"""What the volume refuses is stated, by what was tried, until trying it succeeds again; nothing ends because of it."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator

from kvtier_connector.errors import ConnectorError

logger = logging.getLogger(__name__)

FULL_SECONDS = 60.0
"""For how long a volume that refused a write for want of room counts as full."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Problems:
    """Owned by one thread; `messages` may be copied by any."""

    def __init__(self, tier: str, *, now: Callable[[], float] = time.monotonic) -> None:
        """Start without any."""
        self._tier = tier
        self._now = now
        self._full_until = now()
        self.messages: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether the volume lately refused a write for want of room."""
        return self._now() < self._full_until

    def __contains__(self, what: str) -> bool:
        """Say whether this failed when it was last tried."""
        return what in self.messages

    def state(self, what: str, message: str) -> None:
        """State a problem, or with an empty message that there is none."""
        if not message:
            self.messages.pop(what, None)
            return
        if self.messages.get(what) != message:
            logger.warning("%s: %s", self._tier, message)
        self.messages[what] = message

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """State what the volume refuses, and go on without."""
        try:
            yield
        except (OSError, ConnectorError) as error:
            cause = error.__cause__ if isinstance(error, ConnectorError) else error
            if isinstance(cause, OSError) and cause.errno in _FULL:
                self._full_until = self._now() + FULL_SECONDS
            self.state(what, f"{what}: {error}")
        else:
            self.state(what, "")
