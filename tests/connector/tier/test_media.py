# SPDX-License-Identifier: Apache-2.0
"""Blocks of a prompt with pictures are found by what the pictures hold, whatever name a client gives them."""

from __future__ import annotations

from typing import Any

import torch
from engine_fleet import Engines
from engine_parts import images_of, prompt_of
from engine_rig import SimulatedEngine
from rig import Rigs, key, keys, note_positions
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import ReqContext, get_offload_block_hash
from vllm.v1.request import Request

from kvtier_connector.cascade import media
from kvtier_connector.cascade.media import KnownMedia, Media, digest_of

PROMPT = prompt_of(12)
REST = len(PROMPT) - 12 * 16
CAT, DOG_NAMED_CAT = ("cat", 0), ("dog", 0, "cat")


def computed(engine: SimulatedEngine, name: str, image: tuple[Any, ...] | None) -> int:
    """Serve a request, and return how many tokens were computed; the engine checks what it builds upon."""
    engine.add(name, PROMPT, image=image)
    engine.run()
    return engine.computed[name]


def item(**fields: Any) -> MultiModalKwargsItem:
    field = MultiModalSharedField(batch_size=1)
    return MultiModalKwargsItem({name: MultiModalFieldElem(data, field) for name, data in fields.items()})


def test_another_engine_finds_a_picture_by_its_content(engines: Engines) -> None:
    assert computed(engines.make(), "first", CAT) == len(PROMPT)
    assert computed(engines.make(), "second", CAT) == REST


def test_a_name_seen_with_two_contents_keeps_its_requests_off_the_volume_and_the_cpu_tier(engines: Engines) -> None:
    engine = engines.make()
    assert computed(engine, "liar", DOG_NAMED_CAT) == len(PROMPT)
    files = engines.count()
    engine.scheduler.reset_prefix_cache()
    assert computed(engine, "honest", CAT) == len(PROMPT)
    assert engines.count() == files
    assert engine.metric("vllm:kvtier_disk_misses", "media") == 1
    assert computed(engine, "text", None) == len(PROMPT)
    assert engines.count() == files + 12


def test_what_is_computed_after_another_content_came_under_the_name_is_not_stored(engines: Engines) -> None:
    engine = engines.make()
    engine.add("honest", PROMPT, image=CAT)
    # vLLM may encode the picture of the second before that of the first, and uses it for both.
    engine.add("liar", prompt_of(3, seed=2), image=DOG_NAMED_CAT)
    engine.run()
    assert engines.count() == 0


def test_the_text_before_a_picture_is_shared_by_prompts_with_other_pictures(engines: Engines) -> None:
    assert computed(engines.make(), "cat", ("cat", 6 * 16)) == len(PROMPT)
    reader = engines.make()
    assert computed(reader, "dog", ("dog", 6 * 16)) == len(PROMPT) - 6 * 16
    assert computed(engines.make(), "text", None) == len(PROMPT) - 6 * 16


def test_a_request_whose_content_cannot_be_read_is_served_without_the_volume(engines: Engines) -> None:
    engine = engines.make()
    request = engine.add("elsewhere", PROMPT, image=CAT)
    (picture,) = images_of(CAT)
    assert digest_of(picture.data) is not None
    assert digest_of(None) is None
    assert digest_of(item(pixels=None)) is None
    assert digest_of(item(address=4096, monotonic_id=7, signature=[1, 2])) is None
    assert digest_of(item(pixels=object())) is None
    known = KnownMedia()
    picture.data = None
    assert Media([picture], known).is_mixed
    engine.abort(request.request_id)


def test_type_shape_order_and_names_of_what_was_processed_are_in_the_digest() -> None:
    ones = torch.ones(2, 8, dtype=torch.bfloat16)
    contents = [
        item(pixels=ones),
        item(pixels=ones.view(torch.int16)),
        item(pixels=ones.reshape(8, 2)),
        item(sizes=ones),
        item(pixels=[ones[0], ones[1]]),
        item(pixels=ones, sizes=torch.tensor(3)),
        item(pixels=ones, sizes=3),
        item(pixels=ones, sizes="3"),
        item(pixels=torch.empty(0)),
    ]
    assert len({digest_of(each) for each in contents}) == len(contents)
    assert digest_of(item(pixels=ones.clone())) == digest_of(item(pixels=ones))


def test_a_session_that_begins_without_a_picture_has_blocks_by_the_content_of_those_that_it_adds(rigs: Rigs) -> None:
    names = []
    for content in ("cat", "dog"):
        rig = rigs.make()
        request = Request("session", [0], SamplingParams(), None, resumable=True)
        context = ReqContext(req_id="session")
        context.set_state(request)
        note_positions(context, keys(4))
        before = rig.manager.request(context).block_key(key(3))
        request.mm_features.extend(images_of((content, 40, "name")))
        found = rig.manager.request(context)
        assert found.block_key(key(1)).hash == get_offload_block_hash(key(1))
        names.append(found.block_key(key(3)))
        assert before.hash == get_offload_block_hash(key(3))
    assert len({before, *names}) == 3


def test_content_that_vllm_still_has_is_digested_once_and_few_names_are_remembered(monkeypatch: Any) -> None:
    digested: list[Any] = []

    def note(data: Any) -> bytes | None:
        digested.append(data)
        return digest_of(data)

    monkeypatch.setattr(media, "digest_of", note)
    known = KnownMedia(remembered=2)
    (cat,), (dog,), (bird,) = images_of(("cat", 0)), images_of(("dog", 0)), images_of(("bird", 0))
    for each in (cat, dog, cat, cat):
        known.note(each)
    assert digested == [cat.data, dog.data]
    known.note(bird)
    known.note(dog)
    assert digested == [cat.data, dog.data, bird.data, dog.data]
