# SPDX-License-Identifier: Apache-2.0
"""An in-memory Kubernetes API server that kubectl, helm, kopf and the client libraries can talk to.

- `ApiServer`: for code in an event loop, with `url = await server.start()` and `await server.stop()`
- `ApiServerThread`: for tests, with `with ApiServerThread() as api: api.url; api.kubeconfig()`
- `ApiError`: raised by in-process calls, and returned by injected faults
- `structural_problems(crd)`: the reasons why a real server would refuse a CustomResourceDefinition

Both servers offer these calls without HTTP; a resource is named `pods` or `kvcachetiers.kvtier.dev`. Only `create` of
`ApiServer` is a coroutine.

- `create(manifest)`, `get(resource, namespace, name)`, `list(resource, namespace=None)`, `kubeconfig()`
- `compact()`: expire every resourceVersion so far; `drop_watches()`: end every watch, as a restarting server does

`ApiServer` and `ApiServerThread.server` have `faults` (functions `fault(request) -> ApiError | None`, called before a
request is served), `audit` (one `AuditEntry` for each request), `pod_logs` and `pod_exec` (behind `kubectl logs` and
`kubectl exec`).

The garbage collector is the only controller here. A pod that has a node or runs is deleted in two steps, as with a
kubelet. DELETE sets its deletionTimestamp; a second DELETE with gracePeriodSeconds=0 removes it.
"""

from __future__ import annotations

from kvtier_localcluster.apiserver.admission.structural import structural_problems
from kvtier_localcluster.apiserver.requests import AuditEntry, RequestTarget
from kvtier_localcluster.apiserver.server import ApiServer, ApiServerThread
from kvtier_localcluster.apiserver.store.api_errors import ApiError

__all__ = ["ApiError", "ApiServer", "ApiServerThread", "AuditEntry", "RequestTarget", "structural_problems"]
