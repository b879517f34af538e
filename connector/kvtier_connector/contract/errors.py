# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the connector. Expected outcomes such as a miss, a fault or a refusal are values and are not here.

- ConnectorError
    - ConfigInvalid: the operator's document, or a tier option, cannot be used; an operator of the cluster must act.
    - IdentityMismatch: the directory belongs to another model or layout; an operator of the cluster must act.
    - StoreUnavailable: the volume cannot be used now; trying again later may succeed.
    - LeaseConflict: another process changed the Lease, or it is gone; read it again.
    - LeaseUnavailable: the Lease cannot be read or written now; trying again later may succeed.
"""

from __future__ import annotations


class ConnectorError(Exception):
    """Base of every exception that the connector raises on purpose."""


class ConfigInvalid(ConnectorError):
    """A setting cannot be used; the message names it and the remedy."""


class IdentityMismatch(ConnectorError):
    """The directory holds blocks of another model, layout or key format; the message names the differing field."""

    def __init__(self, message: str, *, field: str = "") -> None:
        """Remember the field of the identity by which the directory is another's; empty if it cannot be read."""
        super().__init__(message)
        self.field = field


class StoreUnavailable(ConnectorError):
    """The volume cannot be used now (missing, read-only, full, failing); the message carries the system's reason."""


class LeaseConflict(ConnectorError):
    """Another process created, changed or deleted the Lease since it was read."""


class LeaseUnavailable(ConnectorError):
    """The API server did not do what it was asked with the Lease; the message carries its answer."""
