# SPDX-License-Identifier: Apache-2.0
"""The processes of the demo: what ends them, what a second demo may not touch, and the answers that count as proof."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from waiting import is_alive, until

from kvtier_demo import __main__ as demo
from kvtier_demo import report
from kvtier_demo.client import Answer
from kvtier_demo.kube import Kube
from kvtier_demo.preflight import CannotStart, check_machine, sole_use
from kvtier_demo.progress import Progress
from kvtier_demo.report import Row
from kvtier_demo.scenario import problems
from kvtier_demo.stack import Stack, place_model, running_stack
from kvtier_localcluster.cluster import is_running
from kvtier_localcluster.datadir import DataDirectory
from kvtier_operator.api.reasons import Reason

ROOT = Path(__file__).resolve().parents[2]
STARTED_AND_WAITING = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["STARTED_AND_WAITING"]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_nothing_survives_a_demo_that_is_killed_and_the_next_one_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTED_AND_WAITING, str(ROOT), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = next([int(pid) for pid in line.split()[1:]] for line in process.stdout if line.startswith("pids"))
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        process.kill()
        process.wait()
        with running_stack(ROOT, tmp_path, Progress()) as stack:
            stack.check()
            until(lambda: not any(is_alive(pid) for pid in pids))
    assert not is_running(DataDirectory(tmp_path / "cluster"))


def test_an_operator_that_ended_is_reported_instead_of_waited_for(tmp_path: Path) -> None:
    with running_stack(ROOT, tmp_path, Progress()) as stack:
        stack.check()
        stack.processes["operator"].kill()
        stack.processes["operator"].wait()
        with pytest.raises(RuntimeError, match="the operator ended with -9"):
            demo.is_ready(stack, Progress())


def test_what_was_applied_is_read_and_learnt_beside_the_data(tmp_path: Path) -> None:
    with running_stack(ROOT, tmp_path / "data", Progress()) as stack:
        for _ in range(2):
            assert stack.kube.apply(ROOT / "e2e/demo/models.yaml") == "persistentvolumeclaim/models serverside-applied"
        assert stack.kube.get("v1", "PersistentVolumeClaim", "models") is not None
        assert stack.kube.get("v1", "PersistentVolumeClaim", "others") is None
    assert (tmp_path / "data" / "discovered.json").exists(), "what the client learned lies with the data, not in /tmp"


def test_a_second_demo_on_the_same_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubeconfig").write_text("of the first")
    monkeypatch.setattr(sys, "argv", ["kvtier-demo", "--data", str(tmp_path)])
    with sole_use(tmp_path):
        assert demo.main() == 1
    assert "another demo runs on" in capsys.readouterr().out
    assert (tmp_path / "kubeconfig").read_text() == "of the first"


@pytest.mark.parametrize(("free", "complaint"), [(64 << 20, r"0\.06 are free: mount -o remount,size=2g"), (0, "0.00")])
def test_a_small_dev_shm_is_refused_before_a_start(free: int, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=free, used=0, free=free))
    with pytest.raises(CannotStart, match=complaint):
        check_machine()


def test_a_model_whose_copy_was_interrupted_is_copied_again(tmp_path: Path) -> None:
    model, claim = tmp_path / "tiny", tmp_path / "claim"
    model.mkdir()
    (model / "model.safetensors").write_text("whole")
    (claim / "tiny.partial").mkdir(parents=True)
    (claim / "tiny.partial" / "model.safetensors").write_text("wh")
    place_model(model, claim)
    assert [path.name for path in claim.iterdir()] == ["tiny"]
    assert (claim / "tiny" / "model.safetensors").read_text() == "whole"
    place_model(model, claim)


def test_a_container_that_keeps_ending_is_told_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_stack(ROOT, tmp_path, Progress()) as stack:
        last = {"terminated": {"exitCode": 137, "reason": "Error"}}
        status = {"name": "engine", "restartCount": 2, "lastState": last}
        pod = {"metadata": {"name": "demo-0"}, "status": {"containerStatuses": [status]}}
        monkeypatch.setattr(stack.kube, "get", lambda *_: {"metadata": {"generation": 1}})
        monkeypatch.setattr(stack.kube, "list", lambda *_, **__: [pod])
        with pytest.raises(RuntimeError, match=r"engine of demo-0 .* exit code 137 \(killed: did the machine"):
            demo.is_ready(stack, Progress())


class KubeWithTier(Kube):
    """A cluster that knows one tier and no pods."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.tier = tier

    def get(self, *_: str) -> dict[str, Any]:
        return self.tier

    def list(self, *_: str, **__: str) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize("is_done", [demo.is_ready, demo.is_proven])
def test_a_volume_of_another_checkout_is_refused_with_what_to_remove(
    is_done: Callable[[Stack, Progress], bool], tmp_path: Path
) -> None:
    condition = {"type": "DiskHealthy", "status": "False", "reason": Reason.STRANGER.value, "message": "another layout"}
    kube = KubeWithTier({"metadata": {"generation": 1}, "status": {"conditions": [condition]}})
    stack = Stack(kube=kube, data=tmp_path, processes={})
    with pytest.raises(CannotStart, match=f"another layout. Here, the demo of another checkout wrote {tmp_path}"):
        is_done(stack, Progress())
    condition["reason"] = Reason.HEALTHY.value
    assert not is_done(stack, Progress())


COMPUTED = Answer(
    seconds_to_first_token=3.0,
    prompt_tokens=3000,
    cached_tokens=0,
    sources={"device": 0, "host": 0, "disk": 0},
    disk_bytes=0.0,
    token_ids=(5, 6, 7),
)
LOADED = replace(
    COMPUTED,
    seconds_to_first_token=0.4,
    cached_tokens=2944,
    sources={"device": 0, "host": 0, "disk": 2944},
    disk_bytes=24.0 * 2**20,
)


def rows(*, more: Answer = LOADED, **changes: Any) -> list[Row]:
    answer = replace(LOADED, **changes)
    tokens = (COMPUTED.token_ids,) * 3
    return [
        Row(what="computed", source="", engine="A", answers=(COMPUTED,) * 3, references=()),
        Row(what="disk hit", source="disk", engine="B", answers=(more, answer, LOADED), references=tokens),
    ]


def test_a_disk_hit_with_the_same_tokens_is_proof_and_other_tokens_are_refused() -> None:
    assert problems(rows()) == []
    assert problems(rows(**vars(COMPUTED))) == []
    assert len(problems(rows(**{**vars(COMPUTED), "token_ids": (5, 6, 8)}))) == 1
    warm = [Row(what="computed", source="", engine="A", answers=(LOADED,), references=())]
    assert any("cached already" in problem for problem in problems(warm))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": (5, 6, 8)}, "other tokens"),
        ({"disk_bytes": 0.0}, "nothing was read from the shared volume"),
        ({"sources": {"device": 2944, "host": 0, "disk": 0}}, "only 0 tokens came from the disk"),
    ],
)
def test_anything_less_is_refused(changes: dict[str, Any], complaint: str) -> None:
    assert any(complaint in problem for problem in problems(rows(more=replace(LOADED, **changes), **changes)))


def test_the_table_shows_both_replicas_with_the_median_of_every_row_and_flags_other_tokens() -> None:
    assert problems(rows()[:1]) == ["the second replica was never asked"]
    found = rows(seconds_to_first_token=9.0, token_ids=(1, 2, 3))
    slow = replace(LOADED, seconds_to_first_token=0.6)
    lines = report.table([found[0], replace(found[1], answers=(found[1].answers[1], LOADED, slow))]).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("computed")
    assert "600 ms" in lines[2]
    assert lines[2].endswith("NO")
