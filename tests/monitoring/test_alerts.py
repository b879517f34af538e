# SPDX-License-Identifier: Apache-2.0
"""The alerts: each fires when it should and not otherwise, and says whom it hurts and what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_connector.store.header import Fault
from kvtier_operator.api.reasons import Reason
from kvtier_operator.parts import crash_causes

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts" / "kvtier" / "rules"
ALERTS = [rule for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
TESTS = ("alerts.yaml", "alerts_of_days.yaml")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing")


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=folder, check=False, capture_output=True, text=True)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Copy the rules; alerts keep their summary alone, which the cases of promtool repeat word for word."""
    for path in RULES.glob("*.yaml"):
        copied = yaml.safe_load(path.read_text())
        for rule in (rule for group in copied["groups"] for rule in group["rules"] if "alert" in rule):
            rule["annotations"] = {"summary": rule["annotations"]["summary"]}
        (tmp_path / path.name).write_text(yaml.safe_dump(copied, width=10_000))
    return tmp_path


@needs_promtool
@pytest.mark.parametrize("tests", TESTS)
def test_alerts_fire_when_they_should_and_not_otherwise(tests: str, rules: Path) -> None:
    shutil.copy(Path(__file__).with_name(tests), rules / "tests.yaml")
    done = promtool("test", "rules", "tests.yaml", folder=rules)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@needs_promtool
def test_no_rule_is_doubtful_to_promtool() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml", "recording.yaml", folder=RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def fired(name: str) -> list[dict[str, str]]:
    """Return the labels of an alert where a case of promtool sees it fire."""
    tests = [test for file in TESTS for test in yaml.safe_load(Path(__file__).with_name(file).read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", ()) if case["alertname"] == name]
    return [alert["exp_labels"] for case in cases for alert in case.get("exp_alerts", ())]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']} {rule['labels']['severity']}")
def test_each_alert_says_how_bad_it_is_whom_it_hurts_and_what_to_paste(rule: dict[str, Any]) -> None:
    name, annotations = rule["alert"], rule["annotations"]
    labels = [each for each in fired(name) if each["severity"] == rule["labels"]["severity"]]
    assert labels, "no test sees it fire"
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert annotations["impact"]
    for command in annotations["action"].splitlines():
        assert command.startswith("kubectl ")
        assert set(re.findall(r"\$labels\.(\w+)", command)) <= labels[0].keys()
        assert "--yes" not in command, "what cannot be undone is for the page, not for a pager"
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = re.search(rf"^### {name}\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, "docs/troubleshooting.md has no section for it"
    assert all(word in section[1] for word in ("**Means**", "**Look**", "**Do**"))


def test_the_page_begins_with_the_safe_move_and_has_no_section_for_an_alert_that_is_gone() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert page.index("kubectl kvtier mode NAME Bypass -n NAMESPACE") < page.index("## Symptoms")
    sections = re.findall(r"^### (KVTier\w+)$", page, re.MULTILINE)
    assert sections == list(dict.fromkeys(rule["alert"] for rule in ALERTS))


def causes_of(alert: str, label: str) -> set[str]:
    found = " ".join(rule["expr"] for rule in ALERTS if rule["alert"] == alert)
    (choice,) = set(re.findall(rf'{label}=~"([^"]*)"', found))
    return set(choice.split("|"))


def test_engines_that_end_for_a_cause_that_is_known_raise_the_alert() -> None:
    passing = {Reason.HUB_UNREACHABLE, Reason.STALE_SHM}
    known = {reason.value for reason in crash_causes.LASTING | passing}
    # Which engines end again and again for want of a device, too, but have an alert of its own: it names the remedy.
    assert known - causes_of("KVTierCrashLoop", "reason") == {Reason.DEVICE_MISSING.value}


def test_all_damage_to_files_raises_the_alert_and_nothing_else() -> None:
    damage = {fault.value for fault in Fault if fault.is_damage}
    assert causes_of("KVTierDamagedBlocks", "cause") == damage
