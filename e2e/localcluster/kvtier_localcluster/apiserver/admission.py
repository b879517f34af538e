# SPDX-License-Identifier: Apache-2.0
"""Call the admission webhooks that are registered in the cluster: mutating ones first, then validating ones.

A webhook of a Service is called on 127.0.0.1 at the Service's port. Not emulated: namespaceSelector, objectSelector,
matchConditions and reinvocation.
"""

from __future__ import annotations

import base64
import json
import ssl
import uuid
from dataclasses import dataclass
from typing import Final

import aiohttp
import jsonpatch

from kvtier_localcluster.apiserver.api_errors import ApiError
from kvtier_localcluster.apiserver.objects import Json
from kvtier_localcluster.apiserver.resources import Resource
from kvtier_localcluster.apiserver.storage import Storage

_GROUP: Final = "admissionregistration.k8s.io"
_DEFAULT_TIMEOUT_SECONDS = 10
_HTTPS_PORT = 443


@dataclass(frozen=True, kw_only=True)
class Admission:
    """One write that asks to be admitted."""

    resource: Resource
    operation: str
    subresource: str | None
    new: Json | None
    old: Json | None
    is_dry_run: bool

    def review(self, new: Json | None) -> Json:
        """Return the AdmissionReview to send."""
        resource = self.resource
        metadata = (new or self.old or {}).get("metadata", {})
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        target = {"group": resource.group, "version": resource.version, "resource": resource.plural}
        request = {
            "uid": str(uuid.uuid4()),
            "kind": kind,
            "resource": target,
            "requestKind": kind,
            "requestResource": target,
            "operation": self.operation,
            "name": metadata.get("name"),
            "namespace": metadata.get("namespace"),
            "userInfo": {"username": "kubernetes-admin", "groups": ["system:masters"]},
            "object": new,
            "oldObject": self.old,
            "dryRun": self.is_dry_run,
            "options": {},
        }
        if self.subresource:  # handlers compare it strictly, so an empty one must be absent
            request["subResource"] = self.subresource
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}

    def is_for(self, rule: Json) -> bool:
        """Tell whether a webhook's rule covers this write."""
        name = f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural
        names = {name, "*/*", f"*/{self.subresource}"} if self.subresource else {name, "*", "*/*"}
        return (
            bool({self.operation, "*"} & set(rule["operations"]))
            and bool({self.resource.group, "*"} & set(rule["apiGroups"]))
            and bool({self.resource.version, "*"} & set(rule.get("apiVersions") or ["*"]))
            and bool(names & set(rule["resources"]))
        )


async def admit(storage: Storage, admission: Admission, warnings: list[str]) -> Json | None:
    """Return the object as the mutating webhooks leave it.

    Raises:
        ApiError: a webhook denies the write, or cannot be called and its failurePolicy is Fail.
    """
    new = admission.new
    for plural in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        for configuration in storage.all((_GROUP, plural)):
            for webhook in configuration.get("webhooks") or []:
                if not any(admission.is_for(rule) for rule in webhook.get("rules") or []):
                    continue
                response = await _ask(webhook, admission.review(new))
                if response is None:
                    continue
                warnings += response.get("warnings") or []
                if not response.get("allowed"):
                    raise _denied(webhook, response)
                if plural.startswith("mutating") and response.get("patch"):
                    new = jsonpatch.apply_patch(new, json.loads(base64.b64decode(response["patch"])))
    return new


def _denied(webhook: Json, response: Json) -> ApiError:
    status = response.get("status") or {}
    message = f'admission webhook "{webhook["name"]}" denied the request: {status.get("message", "")}'
    return ApiError(status.get("code", 403), status.get("reason", "Forbidden"), message)


async def _ask(webhook: Json, review: Json) -> Json | None:
    client = webhook["clientConfig"]
    service = client.get("service") or {}
    url = client.get("url") or f"https://127.0.0.1:{service.get('port', _HTTPS_PORT)}{service.get('path', '')}"
    trust: ssl.SSLContext | bool = False
    if client.get("caBundle"):
        trust = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    seconds = webhook.get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS)
    # As the real API server does, to inform the webhook.
    asked = f"{url}{'&' if '?' in url else '?'}timeout={seconds}s"
    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(asked, ssl=trust, json=review) as got,
        ):
            response: Json = (await got.json(content_type=None))["response"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        if webhook.get("failurePolicy", "Fail") == "Ignore":
            return None
        message = f'Internal error occurred: failed calling webhook "{webhook["name"]}": {error!r}'
        raise ApiError(500, "InternalError", message) from error
    return response
