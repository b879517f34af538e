# SPDX-License-Identifier: Apache-2.0
"""The exception that the API server answers with, and its `Status` object on the wire.

`ApiError` is an HTTP error of the Kubernetes API with code, reason, message and details; injected faults return it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ApiError(Exception):
    """An error answer of the API: it is sent as a `Status` object with the given HTTP code."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        """Keep what the client will see; `details` goes into `Status.details` as it is."""
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> dict[str, Any]:
        """Return the `Status` object that the client receives."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def qualified(plural: str, group: str) -> str:
    """Return `deployments.apps`, or `pods` for the core group, as error messages name a resource."""
    return f"{plural}.{group}" if group else plural


def unknown_path() -> ApiError:
    """Return the 404 for a path that is not served."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def not_found(plural: str, group: str, name: str) -> ApiError:
    """Return the 404 for an object that does not exist."""
    message = f'{qualified(plural, group)} "{name}" not found'
    return ApiError(404, "NotFound", message, name=name, group=group, kind=plural)


def already_exists(plural: str, group: str, name: str) -> ApiError:
    """Return the 409 of a create whose name is taken."""
    message = f'{qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, name=name, group=group, kind=plural)


def conflict(plural: str, group: str, name: str, why: str | None = None) -> ApiError:
    """Return the 409 of a write that is based on an older object."""
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, name=name, group=group, kind=plural)


def invalid(kind: str, group: str, name: str, problems: Iterable[str]) -> ApiError:
    """Return the 422 that lists every problem; each problem reads `field: what is wrong`."""
    listed = list(problems)
    text = listed[0] if len(listed) == 1 else "[" + ", ".join(listed) + "]"
    causes = []
    for problem in listed:
        field, _, message = problem.partition(": ")
        causes.append({"reason": "FieldValueInvalid", "message": message or problem, "field": field})
    message = f'{qualified(kind, group)} "{name}" is invalid: {text}'
    return ApiError(422, "Invalid", message, name=name, group=group, kind=kind, causes=causes)


def bad_request(message: str) -> ApiError:
    """Return the 400 of a request that cannot be understood."""
    return ApiError(400, "BadRequest", message)


def expired(asked: int | str, current: int) -> ApiError:
    """Return the 410 of a watch or list that asks for a resourceVersion which is gone."""
    return ApiError(410, "Expired", f"too old resource version: {asked} ({current})")
