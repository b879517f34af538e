# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its requests: the log at level DEBUG, and the metrics of the tier as vLLM takes them."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_fleet import LATER, PROMPT, REST, Engines, finish, restart, stored
from engine_parts import BLOCK_TOKENS, PAGE_BYTES, Shape
from engine_rig import SimulatedEngine
from rig import TOKENS_PER_BLOCK, Rig, Rigs, keys
from store_faults import flip
from vllm.distributed import kv_events as vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.request import Request

from kvtier_connector.janitor import events, vllm_files
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.metrics import DISK, MEMORY, NOTHING, FirstTokens, Stats
from kvtier_connector.vllm_adapter.split_scheduler import AdmittingScheduler

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
LOGGER = "vllm.kvtier.request"
STORED = len(PROMPT) - REST
MEASURED = re.compile(r"((?:seconds|_rate)=|@)[\d.]+")


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [text for text in caplog.messages if f" request={name} " in text]


def values(caplog: pytest.LogCaptureFixture, name: str) -> dict[str, str]:
    lookup, end = lines(caplog, name)
    assert (lookup.split()[0], end.split()[0]) == ("Found", "Ended")
    found, ended = (dict(part.split("=", 1) for part in line.split()[1:]) for line in (lookup, end))
    return {**found, **ended, "why_not": found["why_not"], "end_why_not": ended["why_not"]}


def assert_logged(caplog: pytest.LogCaptureFixture, name: str, expected: Mapping[str, Any]) -> None:
    found = values(caplog, name)
    assert {key: found[key] for key in expected} == {key: str(value) for key, value in expected.items()}


def test_each_place_of_a_prompt_is_logged(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    stored(engines)
    assert_logged(
        caplog,
        "stores",
        {"prompt": len(PROMPT), "gpu": 0, "memory": 0, "volume": 0, "way": "compute", "why_not": "absent"},
    )
    reader = restart(engines)
    reader.ask("reads", PROMPT)
    reader.ask("keeps", PROMPT)
    finish(reader)
    assert reader.scheduler.reset_prefix_cache()
    reader.ask("copies", PROMPT)
    finish(reader)
    for name, expected in {
        "reads": {"volume": STORED, "way": "load", "loaded": STORED, "computed": REST, "joined": "-"},
        "keeps": {"gpu": STORED, "volume": 0, "loaded": 0, "computed": REST},
        "copies": {"gpu": 0, "memory": STORED, "volume": 0, "loaded": STORED, "computed": REST},
    }.items():
        assert_logged(caplog, name, {"why_not": "-", "not_stored": "-", "status": "FINISHED_LENGTH_CAPPED", **expected})
    assert float(values(caplog, "reads")["load_seconds"]) <= float(values(caplog, "reads")["seconds"])


@pytest.mark.parametrize(
    ("settings", "params", "cause"),
    [
        ({"min_tokens": 10_000}, {}, "min_tokens"),
        ({"live_file": "Bypass"}, {}, "mode"),
        ({}, {"kvtier_load": False}, "no_load"),
        ({"tenant_from": "Parameter"}, {"kvtier_tenant": "no/name"}, "tenant"),
    ],
)
@pytest.mark.usefixtures("writer")
def test_the_cause_is_logged_for_which_nothing_is_read(
    engines: Engines, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], params: dict[str, Any], cause: str
) -> None:
    if mode := settings.get("live_file"):
        # It is not attached in this mode.
        reader = engines.make(live_file=str(engines.rigs.live_file(mode)))
    else:
        reader = restart(engines, **settings)
    reader.ask("computes", PROMPT, **params)
    finish(reader)
    volume = STORED if cause == "min_tokens" else 0
    assert_logged(caplog, "computes", {"volume": volume, "why_not": cause, "loaded": 0, "computed": len(PROMPT)})


def test_a_chunk_that_cannot_be_read_and_one_that_may_not_be_written_are_logged_by_cause(
    engines: Engines, writer: SimulatedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    reader = restart(engines, live_file=str(engines.rigs.live_file(needs_permit=True)))
    flip(engines.file_of(writer, PROMPT, 12))
    reader.ask("chatcmpl-7", PROMPT)
    reader.ask("chatcmpl-8", LATER, answer=40)
    finish(reader)
    assert_logged(
        caplog,
        "chatcmpl-7",
        {"volume": STORED, "loaded": 12 * BLOCK_TOKENS, "why_not": "-", "end_why_not": "checksum:1"},
    )
    assert_logged(caplog, "chatcmpl-8", {"volume": 0, "why_not": "absent", "not_stored": "no_permit:8"})
    logged = [text for name in ("chatcmpl-7", "chatcmpl-8") for text in lines(caplog, name)]
    shown = re.findall(r"(?:Found|Ended) request=(?:.*\n)(?: {8}.*\n)*", PAGE.read_text())
    assert [MEASURED.sub(r"\1", " ".join(text.split())) for text in shown] == [
        MEASURED.sub(r"\1", text) for text in logged
    ]


def test_neither_salt_nor_tenant_is_logged_but_marks_are(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    engine = engines.make(tenant_from="CacheSalt")
    for name, salt in {"a": "sesame", "b": "sesame", "c": "barley", "d": None}.items():
        engine.ask(name, PROMPT, salt=salt)
    finish(engine)
    marks = [values(caplog, name)["tenant"] for name in "abcd"]
    assert marks[0] == marks[1] != marks[2] != marks[3] == "-"
    tenants = {path.name for path in (engines.rigs.root / "tenants").iterdir()}
    assert len(tenants) == 2
    assert not any(word in caplog.text for word in ("sesame", "barley", *tenants))


def test_aborted_requests_end_and_windows_count_as_whole(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    shape = Shape(windows=(2 * BLOCK_TOKENS,))
    stored(engines, shape=shape)
    reader = restart(engines, shape)
    reader.ask("reads", PROMPT)
    reader.add("aborted", LATER, answer=50)
    reader.step()
    reader.abort("aborted")
    finish(reader)
    assert_logged(caplog, "reads", {"volume": STORED, "memory": 0, "loaded": STORED, "computed": REST})
    assert " status=FINISHED_ABORTED " in lines(caplog, "aborted")[-1]


def test_at_level_info_engines_run_without_the_log(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    engine = engines.make()
    assert type(engine.side) is AdmittingScheduler
    assert engine.manager.tier.transfers.on_skipped is None


COPIES = {f"vllm:kv_offload_{way}_{what}" for way in ("load", "store") for what in ("bytes", "time")}


def test_vllm_counts_bytes_and_seconds_of_copies_by_direction(engines: Engines) -> None:
    for way, other in (("store", "load"), ("load", "store")):
        engine = restart(engines, Shape(log_stats=True))
        engine.ask(way, PROMPT)
        finish(engine)
        counted: Counter[str] = Counter()
        for told in engine.told:
            if told.scheduler_stats and (stats := told.scheduler_stats.kv_connector_stats):
                values = stats["data"].items()
                counted.update({name: of[()] for name, of in values if name in COPIES})
        assert counted[f"vllm:kv_offload_{way}_bytes"] >= 20 * PAGE_BYTES
        assert counted[f"vllm:kv_offload_{way}_time"] > 0
        assert f"vllm:kv_offload_{other}_bytes" not in counted
        engine.close()


def counted(engine: SimulatedEngine, found: str) -> tuple[float, float]:
    requests = engine.metric(metrics.FIRST_TOKENS.name, found)
    return requests, engine.metric(metrics.FIRST_TOKEN_PROMPTS.name, found)


def test_a_first_token_counts_with_what_was_computed_read_or_kept(engines: Engines, writer: SimulatedEngine) -> None:
    assert counted(writer, NOTHING) == (1, len(PROMPT))
    reader = restart(engines)
    reader.ask("reads", PROMPT, answer=40)
    finish(reader)
    assert counted(reader, DISK) == (1, len(PROMPT))
    reader.ask("keeps", PROMPT)
    reader.ask("computes", LATER)
    finish(reader)
    assert counted(reader, MEMORY) == (1, len(PROMPT))
    assert counted(reader, NOTHING) == (1, len(LATER))
    assert reader.metric(metrics.FIRST_TOKEN_SECONDS.name, DISK) > 0


def test_what_was_found_first_stays_when_blocks_are_given_again() -> None:
    stats = Stats()
    waiting = FirstTokens(stats, clock=lambda: 12.5)
    aborted, request = (Request(name, [1], SamplingParams(max_tokens=4), None, arrival_time=10) for name in "ab")
    waiting.begin(aborted, NOTHING)
    waiting.end("a")
    waiting.begin(request, DISK)
    waiting.begin(request, MEMORY)
    waiting.look()
    request.append_output_token_ids(7)
    waiting.look()
    waiting.look()
    assert {key: value for key, value in stats.take().reduce().items() if "seconds" in key} == {
        f"{metrics.FIRST_TOKEN_SECONDS.name}:('{DISK}',)": 2.5
    }


SAVED = "vllm:kvtier_disk_saved_seconds"
SECONDS_EACH = 0.25


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    rigs.write(keys(8))
    made = rigs.make(tenant_from="Parameter")
    made.tier.rates.prefill.observe(TOKENS_PER_BLOCK, SECONDS_EACH)
    return made


def test_a_hit_counts_for_what_computing_it_takes(rig: Rig) -> None:
    for name in ("volume", "CPU tier, which is no merit of the volume"):
        assert rig.serve(keys(8), name).hit_blocks == 8
        assert rig.metric(SAVED, "") == pytest.approx(8 * SECONDS_EACH)


def test_what_could_not_be_read_was_not_saved(rigs: Rigs, rig: Rig) -> None:
    path = rigs.block_file(keys(8)[3])
    path.write_bytes(path.read_bytes()[:-1])
    assert rig.serve(keys(8)).hit_blocks == 3
    assert rig.metric(SAVED, "") == pytest.approx(3 * SECONDS_EACH)


def test_each_tenant_has_its_own(rigs: Rigs, rig: Rig) -> None:
    rig.params = {"kvtier_tenant": "acme"}
    rig.offload(keys(2, first=50))
    reader = rigs.make(tenant_from="Parameter")
    reader.tier.rates.prefill.observe(TOKENS_PER_BLOCK, SECONDS_EACH)
    reader.params = {"kvtier_tenant": "acme"}
    assert reader.serve(keys(2, first=50)).hit_blocks == 2
    assert reader.metric(SAVED, "acme") == pytest.approx(2 * SECONDS_EACH)
    assert reader.metric(SAVED, "") == 0


def test_tenants_without_end_make_no_labels_and_an_undeclared_metric_is_refused() -> None:
    stats = metrics.Stats()
    for number in range(metrics.MOST_TENANTS + 50):
        stats.count_saved(f"tenant-{number}", 2.0)
    stats.count_saved("tenant-0", 1.0)
    values = stats.take().data["data"][SAVED]
    assert len(values) == metrics.MOST_TENANTS + 1
    assert values["tenant-0",] == 3.0
    assert values[metrics.OTHERS,] == 100.0
    with pytest.raises(ValueError, match="declare it in METRICS"):
        metrics.Stats().count(metrics.Metric("vllm:kvtier_new", "New."))
    with pytest.raises(ValueError, match="with the labels"):
        metrics.Stats().count(metrics.MISSES)


STORED_EVENT = events.BlockStored(
    block_hashes=[b"\x01" * 32],
    parent_block_hash=b"\x02" * 32,
    token_ids=[],
    block_size=64,
    lora_id=None,
    medium=events.MEDIUM,
    lora_name=None,
    group_idx=1,
    locality=events.REMOTE,
    ownership="ns/llama/aa",
)


def test_vllms_own_decoder_reads_what_is_published() -> None:
    removed = events.BlockRemoved(block_hashes=[7], medium=events.MEDIUM, group_idx=1, ownership="ns/llama/aa")
    payload = events.encode([events.AllBlocksCleared(), STORED_EVENT, removed], seconds=12.5)
    batch = msgspec.msgpack.decode(payload, type=vllm.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    cleared, stored, gone = batch.events
    assert isinstance(cleared, vllm.AllBlocksCleared)
    assert isinstance(stored, vllm.BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (
        STORED_EVENT.block_hashes,
        STORED_EVENT.parent_block_hash,
    )
    assert (stored.block_size, stored.medium, stored.group_idx) == (64, vllm.MEDIUM_STORAGE, 1)
    assert (stored.locality, stored.ownership, stored.lora_name) == ("REMOTE", "ns/llama/aa", None)
    assert isinstance(gone, vllm.BlockRemoved)
    assert (gone.block_hashes, gone.medium) == ([7], vllm.MEDIUM_STORAGE)


def test_a_field_that_vllm_does_not_know_is_not_published() -> None:
    for ours, theirs in (
        (events.BlockStored, vllm.BlockStored),
        (events.BlockRemoved, vllm.BlockRemoved),
        (events.AllBlocksCleared, vllm.AllBlocksCleared),
    ):
        assert set(ours.__struct_fields__) <= set(theirs.__struct_fields__)


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "/models/tiny"])
@pytest.mark.parametrize("digest_bytes", [8, 16, 32])
def test_the_janitor_sees_what_vllm_writes(tmp_path: Path, model: str, digest_bytes: int) -> None:
    root = tmp_path / "0123456789abcdef"
    mapper = FileMapper(
        root_dir=str(root),
        model_name=model,
        tokens_per_hash=16,
        blocks_per_file=4,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        rank=1,
        dtype="bfloat16",
    )
    path = Path(mapper.get_file_name(make_offload_key(os.urandom(digest_bytes), 3)))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"block")
    config = Path(mapper.get_config_file_path())
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    found = [file for files in vllm_files.walk(LOCAL, str(tmp_path), root.name) for file in files]
    assert [(file.path, file.size, file.is_partial) for file in found] == [(str(path.relative_to(tmp_path)), 5, False)]
