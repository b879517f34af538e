# SPDX-License-Identifier: Apache-2.0
"""LMCache's own client of Redis, with a password from the environment; LMCache loads this class by its name.

LMCache takes a password for ``redis://`` in the URL alone, which it writes to the log. Its other client, ``resp://``,
reads the environment, but does not survive the loss of its connections. A lookup then waits for an answer that never
comes, and every request of the engine waits for LMCache's time-out. Nothing is found any more, even in host memory.
This client is the first one with the password added where it is not logged. Without its Redis, blocks are computed.

Runs in the engine's process, with LMCache's event loop. Imports LMCache, so nothing else imports this module.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

from kvtier_connector.contract.engine import LMCACHE_URL_SETTING, REDIS_PASSWORD_VARIABLE


class PasswordRedisConnector(RedisConnector):
    """LMCache's ``redis://``, which also says who asks."""

    def __init__(self, *, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        """Connect when first asked."""
        parts = urlsplit(str(config.extra_config[LMCACHE_URL_SETTING]))
        password = quote(os.environ[REDIS_PASSWORD_VARIABLE], safe="")
        super().__init__(urlunsplit(parts._replace(netloc=f":{password}@{parts.netloc}")), loop, local_cpu_backend)
