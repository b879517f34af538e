# SPDX-License-Identifier: Apache-2.0
"""Each part of a block's identity does what nothing else does: without it a block is taken for another one.

Every case is tried twice: as it is, where the block must be refused or computed, and with that part left out, where it
must be taken. So the first half of a case fails when somebody leaves the part out, and no part is there for show.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import pytest
import yaml
from engine_fleet import Engines, restart
from engine_parts import IMAGE_TOKENS, Shape, prompt_of
from engine_rig import SimulatedEngine
from random_engine import LIMIT_SECONDS, RandomOperations, run_random
from rig import DECLARED, TOKENS_PER_BLOCK, offloading_config
from test_adapters import request_for, write
from test_attaching import DIFFERENCES, engine_config
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig
from vllm.v1.request import Request, RequestStatus

from kvtier_connector.cascade import requests
from kvtier_connector.cascade.media import Media
from kvtier_connector.contract.errors import IdentityMismatch
from kvtier_connector.store.identity import claim
from kvtier_connector.vllm_adapter import fingerprint
from kvtier_connector.vllm_adapter import lora as adapters
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
    assert computes_all(restart(engines, tenant_from="Parameter"), "second", **second) is is_whole


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
    assert computes_all(reader, "second", lora=request_for(second, "law" if part == "name" else "math")) is is_whole


EXAMPLES, OPERATIONS = 6, 50
SHAPES = {
    "plenty": Shape(),
    "small": Shape(gpu_blocks=40, cpu_chunks=8),
    "long chunks": Shape(blocks_per_chunk=3, cpu_chunks=10),
    "answers too": Shape(prompt_only=False, cpu_chunks=20),
    "few adapters": Shape(most_loras=1, is_sharing_adapters=False, cpu_chunks=20),
    "split": Shape(is_splitting=True, most_tokens=128, gpu_blocks=60),
    "adapters in pieces": Shape(most_loras=2, is_sharing_adapters=False, most_tokens=48, prompt_only=False),
}
ADAPTERS = ("math", "law", "art")
PARAMS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["params"]
WANTED: dict[str, Sequence[Any]] = {
    "family": range(2),
    "chunks": [12, 9, 4, 1],
    "salt": [None, None, "salt"],
    "adapter": [None, *ADAPTERS],
    "image": [None, None, ("cat", 0), ("dog", 0), ("cat", 40), ("dog", 40)],
    "params": range(len(PARAMS)),
}


class Wanted(NamedTuple):
    family: int
    chunks: int
    salt: str | None
    adapter: str | None
    image: tuple[str, int] | None
    params: int


class Machine(RandomOperations):
    weights: ClassVar = {
        3: "arrive repeat ask_the_other step",
        2: "finish rewrite",
        1: "abort have_copies_lag load_in_place replace_weights reset restart",
    }

    def __init__(self, random: Random, tried: Counter[str]) -> None:
        super().__init__(random, tried)
        self.asked: list[Wanted] = []
        self.shape = replace(SHAPES[random.choice([*SHAPES])], is_async=random.random() < 2 / 3)
        for name in ADAPTERS:
            write(self.directory / name, f"{name} 0")
        self.made = [self.start(), self.start()]
        self.add(Wanted(0, 9, None, None, None, 0))

    def start(self, weights: int = 0) -> SimulatedEngine:
        return self.engines.make(self.shape, weights=weights, refresh_seconds=0.02, tenant_from="Parameter")

    def lora(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        return request_for(self.directory / name, name)

    def any_wanted(self) -> Wanted:
        return Wanted(*map(self.random.choice, WANTED.values()))

    def arrive(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.add(self.any_wanted())

    def repeat(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.add(self.random.choice(self.asked))

    def ask_the_other(self) -> None:
        """Repeat requests where they were not computed, and such as differ from them in one thing."""
        self.finish()
        self.turn = 1 - self.turn
        for _ in range(self.random.randint(1, 4)):
            each, field = self.random.choice(self.asked), self.random.choice([*WANTED])
            self.add(each)
            self.add(each._replace(**{field: self.random.choice(WANTED[field])}))

    def add(self, wanted: Wanted) -> None:
        self.asked.append(wanted)
        self.count += 1
        prompt = prompt_of(wanted.chunks, seed=wanted.family, more=3)
        is_there = wanted.image is not None and wanted.image[1] + IMAGE_TOKENS < len(prompt)
        self.engine.add(
            f"r{self.count}",
            prompt,
            salt=wanted.salt,
            # Requests of all lengths are under way at once.
            answer=1 + self.count % 20,
            lora=self.lora(wanted.adapter),
            image=wanted.image if is_there else None,
            **PARAMS[wanted.params],
        )

    def finish(self) -> None:
        self.engine.run()
        threading.Event().wait(0.05)

    def rewrite(self) -> None:
        adapter = self.random.choice(ADAPTERS)
        write(self.directory / adapter, f"{adapter} {self.random.randrange(3)}")

    def load_in_place(self) -> None:
        if self.shape.is_sharing_adapters:
            # What the GPU has of the old contents is vLLM's affair; what the CPU tier has is ours.
            self.engine.run()
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.engine.execute()
        adapter = self.random.choice(ADAPTERS)
        self.engine.lora_manager.add_adapter(request_for(self.directory / adapter, adapter, inplace=True))

    def replace_weights(self) -> None:
        if self.may_reset():
            connector, data = self.random.choices([True, False], k=2)
            self.engine.update_weights(self.random.randrange(3), resets_connector=connector, by_data=data)

    def reset(self) -> None:
        if self.may_reset():
            self.reset_caches()

    def may_reset(self) -> bool:
        """Say whether vLLM can take the blocks of every request: not yet of one that is being loaded."""
        # Nor beside steps in flight: where a connector loads KV, these keep the blocks of requests that are taken back.
        self.engine.settle()
        requests = self.engine.scheduler.requests.values()
        is_loading = any(
            request.is_finished() or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests
        )
        return not is_loading and not self.engine.scheduler.kv_holding_waiting

    def restart(self) -> None:
        self.engine.run()
        self.note()
        self.engine.close()
        # One that was started with other weights is no engine of this generation, and must find out itself.
        self.made[self.turn] = self.start(self.random.choice([0, 0, 0, 5]))

    def end(self) -> None:
        for turn in range(len(self.made)):
            self.turn = turn
            self.engine.run()
            self.engine.assert_nothing_is_left()
            self.note()


@pytest.mark.timeout(LIMIT_SECONDS)
def test_no_order_of_events_serves_a_block_for_another_identity() -> None:
    tried = run_random(Machine, examples=EXAMPLES, operations=OPERATIONS)
    assert min(tried["requests"], tried["blocks read"], tried["blocks written"], tried["preemptions"]) > 0
