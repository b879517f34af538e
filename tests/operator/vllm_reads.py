# SPDX-License-Identifier: Apache-2.0
"""What vLLM makes of command lines: reads lists of words from stdin as JSON, by name, and says what each becomes.

Run with vLLM on the path, whichever release. Each list goes through the server's own parser and AsyncEngineArgs; the
connector's document becomes a KVTransferConfig, its class is found as the engine finds it, and the classes behind
OffloadingConnector are asked whether they take what they are given. Last it says what all this has started: nothing.
"""

from __future__ import annotations

import gc
import inspect
import json
import sys
import threading
from typing import Any

# A fifth of what importing vLLM takes goes into looking for garbage among a million objects that stay.
gc.disable()

import torch  # noqa: E402 - see above
from vllm.config import KVTransferConfig  # noqa: E402 - see above
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402 - see above
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402 - see above
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402 - see above
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402 - see above
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402 - see above

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # since 0.33
except ModuleNotFoundError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

_OF_FACTORY = {"type", "module_path", "backpressure"}


def describe(transfer: KVTransferConfig) -> dict[str, Any]:
    """Return what the engine would make of one connector, children included."""
    extra = transfer.kv_connector_extra_config
    try:
        made = KVConnectorFactory.get_connector_class(transfer)
        name, has_whole_graphs = made.__name__, not made.requires_piecewise_for_cudagraph(extra)
        hybrid_kv = KVConnectorFactory.supports_hma_config(transfer)
    except ModuleNotFoundError as error:
        # vLLM knows the connector, and its module is written against a package that is not installed here.
        name, has_whole_graphs, hybrid_kv = f"needs {error.name}", None, None
    found: dict[str, Any] = {
        "class": name,
        "whole_graphs": has_whole_graphs,
        "hybrid_kv": hybrid_kv,
        "role": transfer.kv_role,
        "policy": transfer.kv_load_failure_policy,
    }
    if "connectors" in extra:
        found["children"] = [describe(KVTransferConfig(**child)) for child in extra["connectors"]]
    if "spec_name" in extra:
        spec = OffloadingSpecFactory.get_spec_cls(extra)
        spec.build_metric_definitions(extra)
        found["spec"] = spec.__name__
        found["tiers"] = {tier["type"]: unknown_settings(tier) for tier in extra.get("secondary_tiers", ())}
    return found


def unknown_settings(tier: dict[str, Any]) -> list[str]:
    """Return the settings of a tier that its constructor does not take."""
    takes = inspect.signature(SecondaryTierFactory.get_tier_class(tier).__init__).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return []
    return sorted(set(tier) - set(takes) - _OF_FACTORY)


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    answers: dict[str, Any] = {}
    for name, words in json.load(sys.stdin).items():
        args = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
        transfer = args.kv_transfer_config
        assert isinstance(transfer, KVTransferConfig)
        answers[name] = {
            **describe(transfer),
            "document": {
                key: getattr(transfer, key) for key in ("kv_connector", "kv_role", "kv_connector_extra_config")
            },
            "keeps_hybrid_kv": args.disable_hybrid_kv_cache_manager is False,
        }
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier")]
    ours = sorted(name for name in sys.modules if name.startswith("kvtier_connector.vllm_adapter."))
    started = {"modules": ours, "threads": threads, "cuda": torch.cuda.is_initialized()}
    json.dump({"read": answers, "started": started}, sys.stdout)


if __name__ == "__main__":
    main()
