# SPDX-License-Identifier: Apache-2.0
"""Takes out of manifests, metrics and logs what support has no business with: secrets, prompts, names of tenants. Pure.

What may carry a secret goes unless it is known to carry none. The same tenant has the same mark everywhere, so that
what belongs together can be told.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

REDACTED: Final = "(redacted)"
_LONGEST_HEAD: Final = 40
_PLAIN_VARIABLE: Final = re.compile(
    r"(KVTIER|VLLM|PYTHON|NCCL|CUDA|OMP|HF_HOME|HF_HUB_OFFLINE|TORCH)[A-Z0-9_]*", re.ASCII
)
_SECRET_NAME: Final = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_NAME: Final = (
    r"[a-z0-9_.-]*(?:token(?!s|iz)|(?:api|access|private|encryption)[-_]?key|secret|passw(?:or)?d|passphrase"
    r"|credential|auth(?![a-z])|(?-i:KEY\b))[a-z0-9_.-]*"
)
"""What names a secret; not counts of tokens, nor tokenizers."""
_VALUE: Final = r"""(?:\[[^\]]*\]?|\\+"[^"]*"?|\\+'[^']*'?|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\S+)"""
_SECRET_KEY: Final = re.compile(rf"(?!secretName$){_NAME}", re.IGNORECASE)
_SECRET_FLAG: Final = re.compile(rf"--?{_NAME}", re.IGNORECASE)
_SECRET_WORDS: Final = (
    re.compile(r"\b(authorization|(set-)?cookie)\b\W+.*", re.IGNORECASE),
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bBearer\s+\S+|\bBasic\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]+"),
    re.compile(r"://[^/\s@]+@"),
    re.compile(rf"""--?{_NAME}\\*["']?[\s,=:]+{_VALUE}""", re.IGNORECASE),
    re.compile(rf"""{_NAME}\\*["']?\s*[=:]\s*{_VALUE}""", re.IGNORECASE),
)
_PROMPT: Final = re.compile(
    r"""prompts?\\*['"]?\s*[:=]|prompt_token_ids|prompt_embeds|(received|generated)\s+(request|response)"""
    r"""|(json|request|response)\s+body"""
    r"""|\b(messages|contents?|inputs?|input_(text|value|ids)|outputs?|output_(text|ids)|texts?|token_ids|completion"""
    r"""|documents?|quer(y|ies)|body|suffix|choices|delta|reasoning(_content)?|instructions)\\*['"]?\s*[:=]""",
    re.IGNORECASE,
)
_TENANT_LABEL: Final = re.compile(r'tenant="([^"]*)"')
_TENANT_PATH: Final = re.compile(r"\btenants/([A-Za-z0-9._-]+)")
_BY_TENANT: Final = frozenset({"quotas"})
_MANAGED: Final = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})


def tenant(name: str) -> str:
    """Return the mark of a tenant."""
    if name in {"", "(other)"}:
        return name
    return f"tenant-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def manifest(node: Any) -> Any:
    """Return an object of Kubernetes, or a part of one, without what may be secret."""
    if isinstance(node, Mapping):
        return {key: _field(str(key), value, node) for key, value in node.items() if key not in _MANAGED}
    if isinstance(node, list):
        return _items(node)
    return _document(node) if isinstance(node, str) else node


def _field(key: str, value: Any, parent: Mapping[str, Any]) -> Any:
    if key == "value" and isinstance(parent.get("name"), str):
        name = parent["name"]
        is_plain = _PLAIN_VARIABLE.fullmatch(name) is not None and _SECRET_NAME.search(name) is None
        return manifest(value) if is_plain else REDACTED
    if key in _BY_TENANT and isinstance(value, Mapping):
        return {tenant(str(name)): manifest(each) for name, each in value.items()}
    if key == "tenant" and isinstance(value, str):
        return tenant(value)
    is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if is_text and (_SECRET_KEY.fullmatch(key) or _PROMPT.fullmatch(f"{key}:")):
        return REDACTED
    return manifest(value)


def _document(content: str) -> str:
    """Return a text; what is JSON, as in ConfigMaps and annotations, holds variables and quotas, too."""
    if content.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return json.dumps(manifest(json.loads(content)))
    return "\n".join(_records(content.split("\n"), is_cut=False))


def _items(items: list[Any]) -> list[Any]:
    """Return the items, but not what follows a flag for a secret."""
    found: list[Any] = []
    follows = False
    for item in items:
        if follows:
            found.append(REDACTED)
        elif isinstance(item, str) and _SECRET_FLAG.match(item) and "=" in item:
            found.append(f"{item.partition('=')[0]}={REDACTED}")
        else:
            found.append(manifest(item))
        follows = not follows and isinstance(item, str) and bool(_SECRET_FLAG.match(item)) and "=" not in item
    return found


def text(lines: str) -> str:
    """Return an exposition, or what else has its lines for themselves, without what may be secret."""
    return "".join(f"{line(each)}\n" for each in lines.splitlines())


def log(lines: str, *, is_cut: bool) -> str:
    """Return a log without what may be secret, and nothing of a prompt that goes on over several lines.

    Args:
        lines: the log.
        is_cut: it may begin in the middle of a record.
    """
    return "".join(f"{each}\n" for each in _records(lines.splitlines(), is_cut=is_cut))


_HEAD: Final = re.compile(
    r"(?:\([^()]*\)\s*)?(?:\[?(?:\d{4}-)?\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:\d\d-\d\d \d\d:\d\d:\d\d\s*)?)\s*(?:\[[^\]]*\])?"
)
"""How a record of vLLM, of its web server or of ours begins. vLLM repeats it on each line of one record."""


def _records(lines: Iterable[str], *, is_cut: bool) -> Iterator[str]:
    """Return lines redacted; of a record that may quote a prompt, no line is left but the beginning of the first."""
    every = list(lines)
    quoting: str | None = "" if is_cut and any(map(_HEAD.match, every)) else None
    for each in every:
        head = _HEAD.match(each)
        if quoting is not None and (head is None or head[0] == quoting):
            yield REDACTED
            continue
        # A line of JSON is a record by itself.
        is_open = _PROMPT.search(each) is not None and not each.startswith("{")
        quoting = ("" if head is None else head[0]) if is_open else None
        yield line(each)


def line(words: str) -> str:
    """Return one line; of one that may quote a prompt, nothing but its beginning is left."""
    found = _PROMPT.search(words)
    kept = words[: found.start()] if found else words
    for pattern in _SECRET_WORDS:
        kept = pattern.sub(REDACTED, kept)
    kept = _TENANT_LABEL.sub(lambda found: f'tenant="{tenant(found[1])}"', kept)
    kept = _TENANT_PATH.sub(lambda found: f"tenants/{tenant(found[1])}", kept)
    return f"{kept[:_LONGEST_HEAD]}{REDACTED}: the rest may quote a prompt" if found else kept
