# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the operator. A legal "no" (a refused plan, a failed check) is a value and is not here.

- `OperatorError`
    - `SpecInvalid`: a KVCacheTier holds a field that cannot be honoured; its author must act.
    - `SettingsInvalid`: the operator's own environment; its installer must act.
    - `ClusterError`: the API server did not do what it was asked.
        - `ClusterUnavailable`: no answer, or 5xx or 429; passes by itself.
        - `ClusterConflict`: another client changed the object meanwhile; passes with the next read.
        - `ClusterExpired`: the version to go on from is forgotten; passes with a new list.
        - `ClusterForbidden`: the operator may not do this; its installer must act.
        - `ClusterRejected`: the object is invalid here; the author of the tier must act.
        - `KindMissing`: the API server does not know the kind (the CRD is not installed).

``retry_after`` is the number of seconds after which trying again may succeed; None means that only the user can fix it.
"""

from __future__ import annotations

from typing import ClassVar, Final

_SOON_SECONDS: Final = 5.0


class OperatorError(Exception):
    """Base of every exception that the operator raises on purpose."""

    retry_after: ClassVar[float | None] = None


class SpecInvalid(OperatorError):
    """A field of a KVCacheTier cannot be honoured; the author of the resource must change it."""

    def __init__(self, field: str, message: str) -> None:
        """Remember the path of the field, as the API server writes it, and what to do about it."""
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SettingsInvalid(OperatorError):
    """A variable of the operator's own environment cannot be used."""


class ClusterError(OperatorError):
    """The API server did not do what it was asked; the message says what that was and how it answered."""

    retry_after: ClassVar[float] = 15.0

    @property
    def passes_soon(self) -> bool:
        """Whether trying again may succeed within seconds."""
        return self.retry_after <= _SOON_SECONDS


class ClusterUnavailable(ClusterError):
    """The API server cannot be reached, is overloaded or failed; trying again helps."""

    retry_after = 1.0


class ClusterConflict(ClusterError):
    """Another client changed the object between our read and our write; the next read sees that."""

    retry_after = 0.2


class ClusterExpired(ClusterError):
    """The API server does not remember the version that a list or a watch was to go on from."""

    retry_after = 0.2


class ClusterForbidden(ClusterError):
    """The operator's role does not allow the call, or admission denied it."""

    retry_after = 60.0


class ClusterRejected(ClusterError):
    """The API server refuses the object as invalid: a value of the tier that no schema could check."""

    retry_after = 300.0


class KindMissing(ClusterError):
    """The API server does not serve the kind."""

    retry_after = 30.0
