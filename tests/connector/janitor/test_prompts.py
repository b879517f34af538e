# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts in the forms that people have them, and mistakes named without a word of what was written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor import prompts

SECRET = "words that nobody may see"


@pytest.mark.parametrize(
    ("line", "path", "kept"),
    [
        (
            {"messages": [{"role": "user", "content": "x"}]},
            prompts.CHAT,
            {"messages": [{"role": "user", "content": "x"}]},
        ),
        ({"prompt": "x", "cache_salt": "s"}, prompts.TEXT, {"prompt": "x", "cache_salt": "s"}),
        ({"prompt": [1, 2, 3]}, prompts.TEXT, {"prompt": [1, 2, 3]}),
        ("a text", prompts.TEXT, {"prompt": "a text"}),
        ({"custom_id": "7", "url": "/v1/completions", "body": {"prompt": "x"}}, prompts.TEXT, {"prompt": "x"}),
    ],
)
def test_a_line_becomes_a_request_with_one_token_of_answer(line: object, path: str, kept: dict[str, object]) -> None:
    (found,) = prompts.parse([json.dumps(line)])
    asks = {"max_tokens": 1, "temperature": 0, "kv_transfer_params": {"kvtier_blocks": True}}
    assert (found.path, found.body) == (path, {**kept, **asks})


def test_what_concerns_the_answer_is_left_out_and_the_tenant_stays() -> None:
    line = {"prompt": "x", "max_tokens": 500, "stream": True, "n": 4, "kv_transfer_params": {"kvtier_tenant": "acme"}}
    (found,) = prompts.parse([json.dumps(line)])
    assert found.body["max_tokens"] == 1
    assert found.body["kv_transfer_params"] == {"kvtier_tenant": "acme", "kvtier_blocks": True}
    assert not {"stream", "n"} & set(found.body)


def test_empty_lines_count_and_are_left_out() -> None:
    assert [each.line for each in prompts.parse(['"a"\n', "\n", '"b"\n'])] == [1, 3]


def test_a_packed_file_is_read_like_a_plain_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_text('"a"\n"b"\n')
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(prompts.read(packed)) == list(prompts.read(plain))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f'{{"prompt": "{SECRET}"', "line 1: is no JSON at column"),
        (json.dumps({"text": SECRET}), 'must have one of "messages" and "prompt"'),
        (json.dumps({"prompt": SECRET, "messages": []}), 'must have one of "messages" and "prompt"'),
        (json.dumps([SECRET]), "must be an object"),
        (json.dumps({"messages": SECRET}), "messages must be a list"),
        (json.dumps({"messages": []}), "have one message at least"),
        (json.dumps({"prompt": {SECRET: 1}}), "prompt must be a text, or a list of tokens"),
        (json.dumps({"prompt": 5}), "prompt must be a text, or a list of tokens"),
        ('""', "and not empty"),
        (json.dumps({"prompt": SECRET, "kv_transfer_params": SECRET}), "kv_transfer_params must be an object"),
    ],
)
def test_a_mistake_is_named_by_its_line_and_repeats_nothing(line: str, said: str) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        list(prompts.parse([line]))
    assert said in str(raised.value)
    assert SECRET not in str(raised.value)


def test_a_line_without_an_end_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LONGEST_LINE", 100)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n' + '"' + 96 * "b" + '"\n')
    assert len(list(prompts.read(file))) == 2
    file.write_text('"a"\n' + 101 * "b")
    with pytest.raises(ConfigInvalid, match="line 2: has more than 100 characters"):
        list(prompts.read(file))


def test_a_line_that_is_nested_without_end_is_no_json() -> None:
    with pytest.raises(ConfigInvalid, match="line 1: is no JSON"):
        list(prompts.parse(["[" * 200_000]))
