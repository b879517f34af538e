# SPDX-License-Identifier: Apache-2.0
"""Each part of a block's identity does what nothing else does: without it a block is taken for another one.

Every case is tried twice: as it is, where the block must be refused or computed, and with that part left out, where it
must be taken. So the first half of a case fails when somebody leaves the part out, and no part is there for show.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fleet import Engines
from engine_parts import prompt_of
from engine_rig import SimulatedEngine
from rig import DECLARED, TOKENS_PER_BLOCK, offloading_config
from test_adapters import request_for, write
from test_facts import DIFFERENCES, engine_config
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig
from vllm.v1.request import Request

from kvtier_connector.cascade import attach, requests
from kvtier_connector.cascade.media import Media
from kvtier_connector.contract.errors import IdentityMismatch
from kvtier_connector.store import crypto, reading
from kvtier_connector.store.blockstore import BlockStore, Hit
from kvtier_connector.store.header import HEADER_BYTES, Header, decode_header, encode_header, misplaced
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import BlockKey, Home, Lineage, block_path
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


# What a block file says of itself.

MINE = BlockKey(b"mine" * 8, 0, "alice")
STRANGERS: dict[str, tuple[BlockKey, Home]] = {
    "hash": (MINE._replace(hash=b"your" * 8), Home("d1gest", "w1")),
    "group": (MINE._replace(group=1), Home("d1gest", "w1")),
    "tenant": (MINE._replace(tenant="bob"), Home("d1gest", "w1")),
    "digest": (MINE, Home("0ther", "w1")),
    "epoch": (MINE, Home("d1gest", "w2")),
}
PLACES = {
    "hash": (44, 80),
    "group": (40, 44),
    "tenant": (120, 152),
    "digest": (268, 332),
    "epoch": (332, 364),
    "parent": (80, 84, 88, 120),
    "position": (84, 88),
    "adapter": (364, 396),
}
"""Of the fields in a header, as FORMAT.md has them."""


def store_of(tmp_path: Path, home: Home, *, is_encrypted: bool) -> BlockStore:
    root = tmp_path / "tier" / str(home)
    claim(root, {}, str(home))
    keys = tmp_path / "keys"
    keys.mkdir(exist_ok=True)
    (keys / "k1").write_bytes(bytes(range(32)))
    store = BlockStore(root, direct=False, keys_dir=str(keys) if is_encrypted else "")
    if store.keyring is not None:
        store.keyring.activate("k1")
    return store


def is_taken(store: BlockStore, key: BlockKey) -> bool:
    return isinstance(store.get(key, memoryview(bytearray(4096))), Hit)


def without(field: str, header: Header, key: BlockKey, home: Home) -> Any:
    """Do as `misplaced`, without a look at one field."""
    if field in {"digest", "epoch"}:
        return misplaced(header._replace(home=header.home._replace(**{field: getattr(home, field)})), key, home)
    return misplaced(header._replace(key=header.key._replace(**{field: getattr(key, field)})), key, home)


@pytest.mark.parametrize("field", STRANGERS)
def test_a_file_in_the_place_of_another_block_is_no_hit_by_its_header_alone(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home("d1gest", "w1")
    store = store_of(tmp_path, home, is_encrypted=False)
    store.put(MINE, memoryview(bytes(4096)))
    key, other_home = STRANGERS[field]
    stranger = store_of(tmp_path, other_home, is_encrypted=False)
    file, copied = store_path(tmp_path, home, MINE), store_path(tmp_path, other_home, key)
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, copied)
    assert not is_taken(stranger, key)
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, copied)
    monkeypatch.setattr(reading, "misplaced", functools.partial(without, field))
    assert is_taken(stranger, key)


def store_path(tmp_path: Path, home: Home, key: BlockKey) -> Path:
    return tmp_path / "tier" / str(home) / block_path(key)


def associated_but(field: str, page: bytes) -> bytes:
    """Return what the tag covers, without one field."""
    forged = bytearray(page)
    for begin, end in zip(PLACES[field][::2], PLACES[field][1::2], strict=True):
        forged[begin:end] = bytes(end - begin)
    return page_of_tag(bytes(forged))


page_of_tag = crypto._associated


@pytest.mark.parametrize("is_covered", [True, False])
@pytest.mark.parametrize("field", PLACES)
def test_a_header_that_was_rewritten_without_the_key_is_no_hit_because_the_tag_covers_it(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_covered: bool
) -> None:
    if not is_covered:
        monkeypatch.setattr(crypto, "_associated", functools.partial(associated_but, field))
    home = Home("d1gest", "w1")
    store_of(tmp_path, home, is_encrypted=True).put(MINE, memoryview(bytes(4096)), Lineage(b"parent" * 4, 3, "a" * 32))
    content = store_path(tmp_path, home, MINE).read_bytes()
    header = decode_header(content)
    assert isinstance(header, Header)
    key, other_home = STRANGERS.get(field, (MINE, home))
    other = {"parent": Lineage(b"others" * 4, 3, "a" * 32), "position": header.lineage._replace(position=4)}
    lineage = other.get(field, header.lineage._replace(adapter="b" * 32) if field == "adapter" else header.lineage)
    forged = encode_header(header._replace(key=key, home=other_home, lineage=lineage))
    place = store_path(tmp_path, other_home, key)
    stranger = store_of(tmp_path, other_home, is_encrypted=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(forged + content[HEADER_BYTES:])
    assert is_taken(stranger, key) is not is_covered


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
    reader = engines.make(tenant_from="Parameter")
    reader.wait_until_known(1)
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
    reader = engines.make()
    reader.wait_until_known(1)
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
        stranger.wait_until_known(1)
    assert computes_all(stranger, "second") is is_known
