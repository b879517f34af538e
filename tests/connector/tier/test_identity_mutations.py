# SPDX-License-Identifier: Apache-2.0
"""Each part of a block's identity does what nothing else does: without it a block is taken for another one.

Every case is tried twice: as it is, where the block must be refused or computed, and with that part left out, where it
must be taken. So the first half of a case fails when somebody leaves the part out, and no part is there for show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fleet import Engines
from engine_parts import prompt_of
from engine_rig import SimulatedEngine
from prompts import restart
from rig import DECLARED, TOKENS_PER_BLOCK, offloading_config
from test_adapters import request_for, write
from test_facts import DIFFERENCES, engine_config
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig
from vllm.v1.request import Request

from kvtier_connector.cascade import attach, requests
from kvtier_connector.cascade.media import Media
from kvtier_connector.contract.errors import IdentityMismatch
from kvtier_connector.store.identity import claim
from kvtier_connector.vllm_adapter import fingerprint
from kvtier_connector.vllm_adapter import lora as adapters
from kvtier_connector.vllm_adapter.fingerprint import LoadedWeights
from kvtier_connector.vllm_adapter.spec import KVTierSpec

PROMPT, OTHER = prompt_of(12), prompt_of(6, seed=2)
Break = Callable[[pytest.MonkeyPatch], None]

# What an engine declares of itself, in tier.json.


def changed(**changes: Any) -> OffloadingConfig:
    return replace(offloading_config(), **changes)


MODEL, PLAIN = OffloadingModelConfig, offloading_config()
LAYERS = OffloadingGroupConfig(TOKENS_PER_BLOCK, layer_names=("layer.0", "layer.1"), group_id=0)
SETTINGS: dict[str, Callable[[], OffloadingConfig]] = {
    "model_name": lambda: changed(model=MODEL(name="org/other", dtype="bfloat16")),
    "kv_dtype": lambda: changed(model=MODEL(name="org/model", dtype="float16")),
    "kv_layout": lambda: changed(kv_cache_layout="HND"),
    "is_layout_canonical": lambda: changed(canonical_layout=True),
    "is_layout_replicated": lambda: changed(replicated_layout=True),
    "groups": lambda: changed(groups=(LAYERS,)),
    "tokens_per_hash": lambda: changed(cache=replace(PLAIN.cache, tokens_per_hash=2 * TOKENS_PER_BLOCK)),
    "blocks_per_chunk": lambda: changed(cache=replace(PLAIN.cache, blocks_per_chunk=2)),
    "topology": lambda: changed(parallel=replace(PLAIN.parallel, tp_size=2, world_size=2)),
}
DECLARATIONS = {
    "weights": replace(DECLARED, weights="others"),
    "backends": replace(DECLARED, backends=("Attention/OTHER",)),
    "layout": replace(DECLARED, layout="another"),
}
VARIABLES = {"layout_env": ("VLLM_SSM_CONV_STATE_LAYOUT", "DS"), "hash_seed": ("PYTHONHASHSEED", "77")}
RESOLVED = {fact.removeprefix(fingerprint.PREFIX): {name: value} for name, (fact, value) in DIFFERENCES.items()}


def claimed(change: str | None) -> dict[str, Any]:
    """Return what an engine says of itself that differs from the others in one fact."""
    with pytest.MonkeyPatch.context() as patch:
        if change in VARIABLES:
            patch.setenv(*VARIABLES[change])
        if change == "block_format":
            patch.setattr(fingerprint, "FORMAT_VERSION", 99)
        spec = KVTierSpec(SETTINGS.get(change or "", offloading_config)())
        spec.engine_config = engine_config(**RESOLVED.get(change or "", {}))
        size = 8192 if change == "bytes_per_chunk" else 4096
        return fingerprint.engine_facts(spec, [DECLARATIONS.get(change or "", DECLARED)], bytes_per_chunk=size)


FACTS = sorted(name.removeprefix(fingerprint.PREFIX) for name in claimed(None))


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_keeps_an_engine_out_that_differs_in_it_and_no_other_fact_would(fact: str, tmp_path: Path) -> None:
    ours, theirs = claimed(None), claimed(fact)
    name = f"{fingerprint.PREFIX}{fact}"
    claim(tmp_path / "d1gest", ours, "d1gest")
    with pytest.raises(IdentityMismatch) as refused:
        claim(tmp_path / "d1gest", theirs, "d1gest")
    assert refused.value.field == name
    for each in (ours, theirs):
        del each[name]
    claim(tmp_path / "0ther", ours, "0ther")
    claim(tmp_path / "0ther", theirs, "0ther")


# What decides under which name a request looks for its blocks.


def computes_all(engine: SimulatedEngine, name: str, **options: Any) -> bool:
    """Serve a request; say whether all of it was computed, and False if wrong values were read, which is noticed."""
    engine.add(name, PROMPT, **options)
    try:
        engine.run()
    except AssertionError as error:
        if "holds other bytes" not in str(error):
            raise
        return False
    return engine.computed[name] == len(PROMPT)


def without_salt(patch: pytest.MonkeyPatch) -> None:
    made = kv_cache_utils.generate_block_hash_extra_keys

    def make(request: Request, *places: int) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return made(request, *places)
        finally:
            request.cache_salt = salt

    patch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", make)


def without_images(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_cache_utils, "_gen_mm_extra_hash_keys", lambda _request, _start, _end, number: ([], number))
    without_content(patch)


def without_content(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Media, "hash_of", lambda _self, block_hash, _end: block_hash)


def without_places(patch: pytest.MonkeyPatch) -> None:
    made = kv_cache_utils._gen_mm_extra_hash_keys

    def make(*arguments: Any) -> Any:
        found, number = made(*arguments)
        return [each[:2] for each in found], number

    patch.setattr(kv_cache_utils, "_gen_mm_extra_hash_keys", make)


def without_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "find_tenant", lambda *_: "")


KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], Break]] = {
    "cache salt": ({"salt": "one"}, {"salt": "two"}, without_salt),
    "no cache salt": ({"salt": "one"}, {}, without_salt),
    "image": ({"image": ("cat", 0)}, {"image": ("dog", 0)}, without_images),
    "no image": ({"image": ("cat", 0)}, {}, without_images),
    "content of an image of the same name": (
        {"image": ("cat", 0, "logo")},
        {"image": ("dog", 0, "logo")},
        without_content,
    ),
    "place of an image": ({"image": ("cat", 8)}, {"image": ("cat", 10)}, without_places),
    "tenant": ({"kvtier_tenant": "alice"}, {"kvtier_tenant": "bob"}, without_tenant),
}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("name", KEYS)
def test_a_request_does_not_find_the_blocks_of_one_that_differs_in_one_thing(
    name: str, engines: Engines, monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    first, second, leave_out = KEYS[name]
    if not is_whole:
        leave_out(monkeypatch)
    assert computes_all(engines.make(tenant_from="Parameter"), "first", **first)
    reader = restart(engines, tenant_from="Parameter")
    assert computes_all(reader, "second", **second) is is_whole


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("part", ["name", "path", "contents"])
def test_what_an_adapter_is_called_where_it_lies_and_what_it_holds_are_in_the_name_of_its_blocks(
    part: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    # By this vLLM's own keys tell name and path apart; ours do so by themselves.
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda _: [])
    identify = adapters._identify

    def leave_out(name: str, path: str, digests: Mapping[int, str]) -> adapters.AdapterIdentity:
        if part == "contents":
            return identify(name, path, {})
        return identify("" if part == "name" else name, "" if part == "path" else path, digests)

    if not is_whole:
        monkeypatch.setattr(adapters, "_identify", leave_out)
    first = write(tmp_path / "first", "one")
    second = write(tmp_path / "second", "one") if part == "path" else first
    assert computes_all(engines.make(), "first", lora=request_for(first))
    if part == "contents":
        write(first, "two")
    reader = restart(engines)
    lora = request_for(second, "law" if part == "name" else "math")
    assert computes_all(reader, "second", lora=lora) is is_whole


@pytest.mark.parametrize("is_noticed", [True, False])
def test_blocks_of_replaced_weights_are_found_only_where_the_change_is_not_noticed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, is_noticed: bool
) -> None:
    if not is_noticed:
        monkeypatch.setattr(LoadedWeights, "has_changed", False)
    replica = engines.make()
    assert computes_all(replica, "first")
    replica.update_weights(7)
    assert computes_all(replica, "second") is is_noticed


@pytest.mark.parametrize("is_known", [True, False])
def test_an_engine_with_other_weights_reads_only_without_their_fingerprint(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    tell = fingerprint.engine_facts
    if not is_known:
        monkeypatch.setattr(attach, "engine_facts", lambda *a, **k: {**tell(*a, **k), "engine.weights": "some"})
    assert computes_all(engines.make(), "first")
    stranger = engines.make(weights=5)
    if not is_known:
        stranger.wait_until_attached()
    assert computes_all(stranger, "second") is is_known
