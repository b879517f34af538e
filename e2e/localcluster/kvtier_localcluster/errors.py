# SPDX-License-Identifier: Apache-2.0
"""Errors of the embedded cluster, all below LocalClusterError.

- ApiFailure: the API server answered with an error, or could not be reached
    - NotFound, Conflict
    - Expired: the resource version is too old to watch from; list again
- ConfigMissing, VolumeMissing: a container or its pod waits for an object
- StartFailed: the command of a container cannot be executed
- ClusterUnavailable: the cluster cannot be started, or is not running; the user must act
"""

from __future__ import annotations


class LocalClusterError(Exception):
    """Base of every error of this package."""


class ApiFailure(LocalClusterError):
    """The API server answered with an error status."""

    def __init__(self, message: str, status: int = 0) -> None:
        """Keep the HTTP status beside the message; 0 where there was no answer."""
        super().__init__(message)
        self.status = status


class NotFound(ApiFailure):
    """The object does not exist."""


class Conflict(ApiFailure):
    """The object changed in between, or its name is taken."""


class Expired(ApiFailure):
    """The server no longer knows the changes since that resource version."""


class ConfigMissing(LocalClusterError):
    """A ConfigMap, a Secret or a key of one does not exist; the container waits for it."""


class VolumeMissing(LocalClusterError):
    """A volume cannot be set up yet; the pod waits for it."""


class StartFailed(LocalClusterError):
    """The command of a container cannot be executed."""


class ClusterUnavailable(LocalClusterError):
    """The cluster cannot be started, or none is running."""


def failure_for(status: int, message: str) -> ApiFailure:
    """Return the error that stands for an HTTP status."""
    classes: dict[int, type[ApiFailure]] = {404: NotFound, 409: Conflict, 410: Expired}
    return classes.get(status, ApiFailure)(message, status)
