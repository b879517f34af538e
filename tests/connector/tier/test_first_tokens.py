# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for their first token, by where the beginning of their prompt came from."""

from __future__ import annotations

from engine_fleet import Engines
from engine_rig import SimulatedEngine
from prompts import LATER, PROMPT, finish, restart
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.metrics import DISK, MEMORY, NOTHING, FirstTokens, Stats


def counted(engine: SimulatedEngine, found: str) -> tuple[float, float]:
    requests = engine.metric(metrics.FIRST_TOKENS.name, found)
    return requests, engine.metric(metrics.FIRST_TOKEN_PROMPTS.name, found)


def test_a_first_token_counts_with_what_was_computed_read_from_the_volume_or_kept(
    engines: Engines, writer: SimulatedEngine
) -> None:
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
    assert not reader.side._first_tokens._waiting


def request_that_arrived(arrival: float) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=4), None, arrival_time=arrival)


def totals(stats: Stats) -> dict[str, float]:
    return {key.split(":")[1]: value for key, value in stats.take().reduce().items()}


def test_a_request_that_ends_without_an_answer_is_not_counted() -> None:
    stats = Stats()
    waiting = FirstTokens(stats)
    waiting.begin(request_that_arrived(0), NOTHING)
    waiting.end("r")
    assert totals(stats) == {}


def test_what_was_found_first_stays_when_blocks_are_given_again() -> None:
    stats = Stats()
    waiting = FirstTokens(stats, clock=lambda: 12.5)
    request = request_that_arrived(10)
    waiting.begin(request, DISK)
    waiting.begin(request, MEMORY)
    waiting.look()
    request.append_output_token_ids(7)
    waiting.look()
    waiting.look()
    assert {key: value for key, value in stats.take().reduce().items() if "seconds" in key} == {
        f"{metrics.FIRST_TOKEN_SECONDS.name}:('{DISK}',)": 2.5
    }
