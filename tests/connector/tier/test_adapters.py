# SPDX-License-Identifier: Apache-2.0
"""A block of a LoRA adapter or of a picture is served for just these contents, whatever their path or name is."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from engine_fleet import Engines, restart
from engine_parts import WEIGHTS, WINDOW_TOKENS, Shape, SimulatedLoras, answer_of, images_of, prompt_of
from engine_rig import SimulatedEngine
from rig import Rigs, key, keys, note_positions
from typing_extensions import override
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import ReqContext, get_offload_block_hash
from vllm.v1.request import Request

from kvtier_connector.cascade import media
from kvtier_connector.cascade.media import KnownMedia, Media
from kvtier_connector.store.header import Header, decode_header
from kvtier_connector.store.layout import adapter_name_label
from kvtier_connector.vllm_adapter import lora
from kvtier_connector.vllm_adapter.lora import AdapterOrders, AdapterReport, Adapters, LoadedAdapters, digest_of

PROMPT = prompt_of(12)
REST = len(PROMPT) - 12 * 16
ONE_ADAPTER = Shape(most_loras=1)
ANSWER = 3


def write(directory: Path, contents: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / WEIGHTS).write_text(contents)
    return directory


def request_for(directory: Path, name: str = "math", *, inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, 1 + sum(name.encode()), str(directory), load_inplace=inplace)


def ask(engine: SimulatedEngine, name: str, lora: LoRARequest | None) -> int:
    """Return how many tokens were computed; the engine compares every value that it builds upon."""
    computed = engine.ask(name, PROMPT, lora=lora)
    engine.run()
    return computed


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", "first")


def test_another_engine_reads_the_blocks_of_an_adapter_that_is_as_it_was(engines: Engines, adapter: Path) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    reader = engines.make()
    assert ask(reader, "b", request_for(adapter)) == len(PROMPT) - 12 * 16
    files = list((engines.rigs.root / "blocks").rglob("*.kvb"))
    assert len(files) == 12
    for file in files:
        header = decode_header(file.read_bytes())
        assert isinstance(header, Header)
        assert header.lineage.adapter.startswith(adapter_name_label("math"))
    assert ask(reader, "none", None) == len(PROMPT)


def test_an_adapter_that_changed_is_neither_stored_nor_loaded_and_counted(engines: Engines, adapter: Path) -> None:
    engine = engines.make()
    assert ask(engine, "a", request_for(adapter)) == len(PROMPT)
    written = engine.metric("vllm:kvtier_disk_written_blocks")
    write(adapter, "second")
    engine.scheduler.reset_prefix_cache()
    assert ask(engine, "b", request_for(adapter, inplace=True)) == len(PROMPT)
    assert engine.metric("vllm:kvtier_disk_written_blocks") == written
    assert engine.metric("vllm:kvtier_disk_misses", "adapter") == 1
    # What it computed since has not come to lie on the volume under any name.
    assert ask(engines.make(), "c", request_for(adapter)) == len(PROMPT)


def test_chunks_of_an_adapter_are_not_taken_for_those_of_a_later_one_there(engines: Engines, adapter: Path) -> None:
    engine = engines.make()
    assert ask(engine, "a", LoRARequest("math", 1, str(adapter))) == len(PROMPT)
    engine.scheduler.reset_prefix_cache()
    # vLLM has unloaded it, and gives it another number when it loads it again.
    assert ask(engine, "b", LoRARequest("math", 2, str(adapter))) == REST
    write(adapter, "second")
    engine.scheduler.reset_prefix_cache()
    assert ask(engine, "c", LoRARequest("math", 3, str(adapter))) == len(PROMPT)
    assert ask(engines.make(), "d", LoRARequest("math", 1, str(adapter))) == len(PROMPT)


def test_adapters_that_make_room_for_each_other_when_they_are_looked_at_are_told_apart(
    engines: Engines, adapter: Path, tmp_path: Path
) -> None:
    engine = engines.make(ONE_ADAPTER)
    engine.add("math", PROMPT, lora=request_for(adapter))
    engine.add("law", PROMPT, lora=request_for(write(tmp_path / "law", "law"), "law"))
    engine.run()
    assert ask(engines.make(), "shares", request_for(adapter)) == REST


def test_what_was_computed_with_an_adapter_that_could_not_be_read_before_is_kept_for_nobody(
    engines: Engines, adapter: Path, tmp_path: Path
) -> None:
    engine = engines.make(ONE_ADAPTER)
    adapter.rename(tmp_path / "gone")
    engine.add("is asked about it", PROMPT, lora=request_for(adapter))
    engine.step()
    (tmp_path / "gone").rename(adapter)
    engine.run()
    assert ask(engine, "makes room", request_for(write(tmp_path / "law", "law"), "law")) == len(PROMPT)
    write(adapter, "second")
    engine.scheduler.reset_prefix_cache()
    assert ask(engine, "computes", request_for(adapter)) == len(PROMPT)


def test_an_adapter_rewritten_after_it_was_looked_at_is_used_as_it_was(engines: Engines, adapter: Path) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    reader = restart(engines)
    reader.add("b", PROMPT, lora=request_for(adapter))
    reader.step()
    assert reader.lora_manager.reads == 1
    write(adapter, "second")
    reader.run()
    assert reader.computed["b"] == REST
    assert reader.lora_manager.reads == 1


def waiting_for_copies(engines: Engines, adapter: Path, shape: Shape = ONE_ADAPTER) -> SimulatedEngine:
    """Return an engine that has room for one adapter and a request whose chunks are on their way to the GPU."""
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    reader = restart(engines, shape)
    reader.copies.lag = math.inf
    reader.add("b", PROMPT, lora=request_for(adapter), answer=ANSWER)
    reader.run(lambda: reader.copies.waiting > 0)
    return reader


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_request_that_was_loaded_is_computed_as_a_whole_when_its_adapter_is_replaced_in_place(
    engines: Engines, adapter: Path, tmp_path: Path, *, is_moved: bool
) -> None:
    reader = waiting_for_copies(engines, adapter)
    replacing = request_for(write(tmp_path / "moved" if is_moved else adapter, "second"), inplace=True)
    reader.lora_manager.add_adapter(replacing)
    assert reader.source_of(None, replacing) == "None with second"
    # Its blocks stay in the GPU's cache for all that come after it.
    reader.add("replacing", prompt_of(3, seed=7), lora=replacing)
    reader.run(lambda: "replacing" in reader.answers)
    assert reader.source_of(None, replacing) == "None with second"
    reader.copies.lag = 0
    reader.run()
    assert reader.computed["b"] == len(PROMPT)
    assert reader.source_of(None, request_for(adapter)) == "None with second"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_within_the_step", [False, True])
def test_a_request_is_computed_as_a_whole_when_its_adapter_is_replaced_after_its_load_was_reported(
    engines: Engines, adapter: Path, *, is_within_the_step: bool, is_async: bool
) -> None:
    reader = waiting_for_copies(engines, adapter, replace(ONE_ADAPTER, is_async=is_async))
    reader.copies.lag = 0
    reader.run(lambda: not reader.is_loading("b"))
    assert reader.computed["b"] == 0
    write(adapter, "second")
    if is_within_the_step:
        set_active = reader.lora_manager.set_active_adapters

        def replace_and_set(*requests: Any) -> None:
            reader.lora_manager.set_active_adapters = set_active  # type: ignore[method-assign]  # once
            reader.lora_manager.add_adapter(request_for(adapter, inplace=True))
            set_active(*requests)

        reader.lora_manager.set_active_adapters = replace_and_set  # type: ignore[method-assign]  # it calls the real one
    else:
        reader.lora_manager.add_adapter(request_for(adapter, inplace=True))
    reader.run()
    assert reader.computed["b"] == REST + len(PROMPT)
    assert reader.answers["b"] == answer_of(PROMPT, ANSWER, salt="None with second")


def test_what_is_computed_upon_earlier_contents_is_done_again(engines: Engines, adapter: Path, tmp_path: Path) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    law = request_for(write(tmp_path / "law", "law"), "law")
    reader = restart(engines, ONE_ADAPTER)
    assert ask(reader, "known", request_for(adapter)) == REST
    assert ask(reader, "made room", law) == len(PROMPT)
    write(adapter, "second")
    reader.scheduler.reset_prefix_cache()
    reader.manager.reset_cache()
    reader.add("b", PROMPT, lora=request_for(adapter))
    reader.run()
    assert reader.computed["b"] == REST + len(PROMPT)
    assert reader.answers["b"] == answer_of(PROMPT, 1, salt="None with second")
    assert ask(reader, "c", request_for(adapter)) < len(PROMPT), "the GPU has what it computed itself"
    assert ask(engines.make(), "d", request_for(adapter)) == len(PROMPT)


def test_a_request_whose_adapter_is_gone_is_not_loaded_again(engines: Engines, adapter: Path, tmp_path: Path) -> None:
    assert ask(engines.make(), "a", request_for(adapter)) == len(PROMPT)
    reader = restart(engines, ONE_ADAPTER)
    assert ask(reader, "known", request_for(adapter)) == REST
    assert ask(reader, "made room", request_for(write(tmp_path / "law", "law"), "law")) == len(PROMPT)
    reader.scheduler.reset_prefix_cache()
    shutil.move(adapter, tmp_path / "gone")
    reader.add("b", PROMPT, lora=request_for(adapter))
    # As without a cache, the engine cannot compute what it cannot load.
    with pytest.raises(FileNotFoundError):
        reader.run()
    shutil.move(tmp_path / "gone", adapter)


def test_what_is_computed_while_an_adapter_is_replaced_is_stored_for_nobody(engines: Engines, adapter: Path) -> None:
    writer = engines.make(Shape(most_tokens=32))
    writer.add("a", PROMPT, lora=request_for(adapter))
    writer.run(lambda: writer.computed["a"] >= 64)
    write(adapter, "second")
    writer.lora_manager.add_adapter(request_for(adapter, inplace=True))
    writer.run()
    for contents in ("first", "second"):
        write(adapter, contents)
        assert ask(engines.make(), contents, request_for(adapter)) > len(PROMPT) - 6 * 16


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_a_loaded_request_whose_adapter_made_room_meanwhile_is_computed_with_the_files_of_now(
    engines: Engines, adapter: Path, tmp_path: Path, *, is_rewritten: bool
) -> None:
    reader = waiting_for_copies(engines, adapter)
    law, art = (request_for(write(tmp_path / name, name), name) for name in ("law", "art"))
    reader.add("other", prompt_of(3, seed=7), lora=law)
    reader.run(lambda: "other" in reader.answers)
    assert request_for(adapter).lora_int_id not in reader.lora_manager.list_adapters()
    if is_rewritten:
        write(adapter, "second")
    reader.copies.lag = 0
    reader.run(lambda: not reader.is_loading("b"))
    # Its adapter makes room again in the step that computes with it.
    reader.add("another", prompt_of(3, seed=7), lora=art)
    reader.run()
    assert reader.computed["b"] == REST + (len(PROMPT) if is_rewritten else 0)
    assert reader.answers["b"] == answer_of(PROMPT, ANSWER, salt=f"None with {'second' if is_rewritten else 'first'}")


@pytest.mark.parametrize("is_named", [False, True])
def test_several_groups_load_blocks_of_a_named_adapter_only(engines: Engines, adapter: Path, *, is_named: bool) -> None:
    if is_named:
        contents = b"".join((adapter / name).read_bytes() for name in ("adapter_config.json", WEIGHTS))
        adapter = adapter.rename(adapter.with_name(f"math@{hashlib.sha256(contents).hexdigest()}"))
    shape = Shape(windows=(None, WINDOW_TOKENS))
    assert ask(engines.make(shape), "a", request_for(adapter)) == len(PROMPT)
    reader = engines.make(shape)
    assert ask(reader, "b", request_for(adapter)) == (REST if is_named else len(PROMPT))
    assert ask(reader, "none", None) == len(PROMPT)
    assert ask(engines.make(shape), "model", None) == REST


def test_an_adapter_loaded_in_place_has_blocks_by_its_contents(engines: Engines, adapter: Path, tmp_path: Path) -> None:
    engine = engines.make(ONE_ADAPTER)
    engine.lora_manager.add_adapter(request_for(write(tmp_path / "moved", "second"), inplace=True))
    assert ask(engine, "a", request_for(adapter)) == len(PROMPT)
    assert engine.source_of(None, request_for(adapter)) == "None with second"
    assert ask(engines.make(), "b", request_for(adapter)) == len(PROMPT), "it reads other contents from this path"
    engine.add("made room", prompt_of(3, seed=7), lora=request_for(write(tmp_path / "law", "law"), "law"))
    engine.run()
    before = engine.metric("vllm:kvtier_disk_written_blocks")
    engine.add("later", prompt_of(4, seed=9), lora=request_for(adapter))
    engine.run()
    assert engine.source_of(None, request_for(adapter)) == "None with first"
    assert engine.metric("vllm:kvtier_disk_written_blocks") == before


def report(digest: str | None) -> list[AdapterReport]:
    return [AdapterReport(request_for(Path("/there")).lora_int_id, digest)]


def test_all_ranks_must_know_an_adapter_and_other_numbers_of_ranks_that_hold_the_same_agree() -> None:
    lora = request_for(Path("/there"))
    one, two, apart = Adapters(1), Adapters(2), Adapters(2)
    known = [each.read(lora) for each in (one, two, apart)]
    one.take({0: report("same")})
    two.take({0: report("same")})
    assert known[0].identity is not None
    assert known[1].identity is None
    assert known[1].is_pending
    two.take({1: report("same")})
    assert known[1].identity == known[0].identity
    apart.take({0: report("same"), 1: report("other")})
    assert known[2].identity not in {None, known[0].identity}


def test_an_adapter_that_cannot_be_loaded_now_is_asked_for_again() -> None:
    adapters = Adapters(1)
    lora = request_for(Path("/there"))
    known = adapters.read(lora)
    assert adapters.give_orders([]) is not None
    adapters.take({0: report(None)})
    assert not known.is_pending
    assert known.identity is None
    assert adapters.read(lora).is_pending
    adapters.take({0: report("now")})
    assert known.identity is not None


@pytest.mark.parametrize("is_in_place", [False, True])
def test_an_adapter_whose_weights_were_replaced_stays_off_the_volume(*, is_in_place: bool) -> None:
    adapters = Adapters(1)
    lora = request_for(Path("/there"))
    known = adapters.read(lora)
    adapters.take({0: report("one")})
    if is_in_place:
        adapters.read(request_for(Path("/elsewhere"), inplace=True))
    else:
        adapters.take({0: report("other")})
    adapters.take({0: report("one")})
    assert known.identity is None
    assert not adapters.read(lora).is_pending


class RealFiles(SimulatedLoras):
    @override
    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        helper = PEFTHelper.from_local_dir(lora_request.lora_path, 4096)
        return LoRAModel.from_local_checkpoint(
            lora_request.lora_path, {"q_proj"}, helper, lora_model_id=lora_request.lora_int_id, device="cpu"
        )


class Worker:
    """A model runner with our record of its adapters."""

    def __init__(self, capacity: int = 2) -> None:
        model = SimpleNamespace()
        self.loras = RealFiles(capacity, model)
        self.adapters = LoadedAdapters(SimpleNamespace(get_model=lambda: model, add_lora=self.loras.add_adapter))

    def ask(self, request: LoRARequest) -> str | None:
        self.adapters.obey(AdapterOrders({request.lora_int_id: request}, {}, (), ()))
        self.adapters.look()
        (report,) = self.adapters.take_reports()
        return report.digest

    def changes(self) -> list[str | None]:
        """Return the digests that the worker reports by itself after a step."""
        self.adapters.look()
        return [report.digest for report in self.adapters.take_reports()]


def write_real(directory: Path, value: float, *, alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{name}.lora_A.weight": (8, 64), f"{name}.lora_B.weight": (64, 8)}
    safetensors.torch.save_file(
        {part: torch.full(form, value) for part, form in parts.items()}, directory / "new.safetensors"
    )
    (directory / "new.safetensors").rename(directory / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def test_the_digest_covers_the_weights_and_the_settings_of_an_adapter(tmp_path: Path) -> None:
    made = [write_real(tmp_path / "a", 1.0), write_real(tmp_path / "b", 2.0), write_real(tmp_path / "c", 1.0, alpha=32)]
    digests = [Worker().ask(request_for(place)) for place in (*made, made[0])]
    assert digests[0] == digests[3]
    assert len({*digests}) == 3
    assert None not in digests


def test_files_that_are_replaced_are_reported_once_vllm_has_read_them(tmp_path: Path) -> None:
    worker = Worker()
    place = write_real(tmp_path / "adapter", 1.0)
    first = worker.ask(request_for(place))
    write_real(place, 2.0)
    assert worker.changes() == []
    worker.loras.add_adapter(request_for(place, inplace=True))
    (second,) = worker.changes()
    assert second not in {None, first}
    worker.loras.add_adapter(request_for(place, inplace=True))
    assert worker.changes() == [], "the same contents are no change"


def test_an_adapter_is_digested_once_for_each_time_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[Any] = []
    monkeypatch.setattr(lora, "digest_of", lambda model: (digested.append(model), digest_of(model))[1])
    worker = Worker()
    worker.loras.add_adapter(request_for(write_real(tmp_path / "adapter", 1.0), inplace=True))
    worker.changes()
    assert digested == []
    worker.ask(request_for(tmp_path / "adapter"))
    worker.changes()
    assert len(digested) == 1


def test_an_adapter_whose_files_are_gone_has_no_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Worker().ask(request_for(tmp_path / "nowhere")) is None
    assert "The LoRA adapter math cannot be loaded" in caplog.text


def test_an_adapter_that_cannot_be_read_shares_blocks_with_no_other_engine(tmp_path: Path) -> None:
    model = RealFiles(1, SimpleNamespace())._load_adapter(request_for(write_real(tmp_path / "adapter", 1.0)))
    assert digest_of(model) == digest_of(model)
    (layer,) = model.loras.values()
    layer.scaling = object()  # type: ignore[assignment]  # of a later release
    assert digest_of(model) != digest_of(model)


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
    assert computed(engines.make(), "dog", ("dog", 6 * 16)) == len(PROMPT) - 6 * 16
    assert computed(engines.make(), "text", None) == len(PROMPT) - 6 * 16


def test_a_request_whose_content_cannot_be_read_is_served_without_the_volume(engines: Engines) -> None:
    engine = engines.make()
    request = engine.add("elsewhere", PROMPT, image=CAT)
    (picture,) = images_of(CAT)
    assert media.digest_of(picture.data) is not None
    assert media.digest_of(None) is None
    assert media.digest_of(item(pixels=None)) is None
    assert media.digest_of(item(address=4096, monotonic_id=7, signature=[1, 2])) is None
    assert media.digest_of(item(pixels=object())) is None
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
    assert len({media.digest_of(each) for each in contents}) == len(contents)
    assert media.digest_of(item(pixels=ones.clone())) == media.digest_of(item(pixels=ones))


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
    digest_of_media = media.digest_of

    def note(data: Any) -> bytes | None:
        digested.append(data)
        return digest_of_media(data)

    monkeypatch.setattr(media, "digest_of", note)
    known = KnownMedia(remembered=2)
    (cat,), (dog,), (bird,) = images_of(("cat", 0)), images_of(("dog", 0)), images_of(("bird", 0))
    for each in (cat, dog, cat, cat):
        known.note(each)
    assert digested == [cat.data, dog.data]
    known.note(bird)
    known.note(dog)
    assert digested == [cat.data, dog.data, bird.data, dog.data]
