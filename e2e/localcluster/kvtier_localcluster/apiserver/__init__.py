# SPDX-License-Identifier: Apache-2.0
"""An in-memory Kubernetes API server: enough of one for kubectl, helm, kopf and the client libraries to be at home.

    ApiServer          for code in an event loop: `url = await server.start()`, `await server.stop()`
    ApiServerThread    for tests: `with ApiServerThread() as api: api.url; api.kubeconfig()`
    ApiError           what a fault injects, and what in-process calls raise
    structural_problems(crd)   what a real server would refuse of a CustomResourceDefinition

Both servers offer `create(manifest)`, `get(resource, namespace, name)` and `list(resource, namespace=None)` without
HTTP, where a resource is named `pods` or `kvcachetiers.kvtier.dev` (on `ApiServer` only `create` is a coroutine), and

    kubeconfig()       the text of a kubeconfig; `ApiServerThread.write_kubeconfig(path)` stores it
    compact()          every resourceVersion handed out so far is expired: resuming a watch from one gives 410
    drop_watches()     every open watch ends, as when a server or a load balancer restarts

and these attributes, on `ApiServer` and on `ApiServerThread.server`:

    faults             list of `fault(request) -> ApiError | None`, asked before each request is served
    audit              list of `AuditEntry` (method, path, query, user_agent, verb, target), one for each request
    pod_logs           `async (namespace, pod, container, tail) -> bytes`; what `kubectl logs` shows
    pod_exec           `async (namespace, pod, container, command, send, given) -> int`; what `kubectl exec` does

No controller runs in here but the garbage collector: Deployments stay without pods and claims unbound until someone
works on them through the API. A pod that has a node or runs is deleted in two steps, as with a kubelet: DELETE sets its
deletionTimestamp, and a second DELETE with gracePeriodSeconds=0 removes it.

Not emulated: authentication (everybody who impersonates nobody may do everything), quotas, attach, admission and
conversion webhooks, following of logs, and Protobuf bodies of kinds that kubectl does not create.
"""

from __future__ import annotations

from kvtier_localcluster.apiserver.admission.structural import structural_problems
from kvtier_localcluster.apiserver.requests import AuditEntry, Target
from kvtier_localcluster.apiserver.server import ApiServer, ApiServerThread
from kvtier_localcluster.apiserver.store.api_errors import ApiError

__all__ = ["ApiError", "ApiServer", "ApiServerThread", "AuditEntry", "Target", "structural_problems"]
