# SPDX-License-Identifier: Apache-2.0
"""What an engine logs of each request at level DEBUG: where its prompt was found, and why the rest was computed."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_fleet import LATER, PROMPT, REST, Engines, finish, restart, stored
from engine_parts import BLOCK_TOKENS, Shape
from engine_rig import SimulatedEngine
from store_faults import flip

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
    live = str(engines.rigs.live_file(needs_permit=True))
    reader = restart(engines, live_file=live)
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
