# SPDX-License-Identifier: Apache-2.0
"""A vLLM that looks different inside is found out before anything is built on it, and told in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_connector.contract.engine import SUPPORTED_VLLM, vllm_release
from kvtier_connector.vllm_adapter import supported
from kvtier_connector.vllm_adapter.supported import Reliance, Standing, differences, examine


class Theirs:
    """Stands for a class of vLLM."""

    plain = 1

    def __init__(self, config: Any) -> None:
        self.config, self._jobs = config, {}
        self.typed: int = 2
        local = config
        del local

    def lookup(self, key: str, context: object, *, exclude: int | None = None) -> None: ...

    @classmethod
    def definitions(cls, extra: object) -> None: ...

    @staticmethod
    def parse(text: str) -> None: ...

    def takes_anything(self, first: int, *args: Any, **kwargs: Any) -> None: ...


@dataclass
class Record:
    """Stands for a record of vLLM."""

    required: int


class Derived(Theirs):
    """Stands for one of vLLM's with parents."""


def told_of(owner: str = "Theirs", **relied: tuple[str, ...]) -> list[str]:
    return differences([Reliance(f"{__name__}:{owner}", **relied)])


def test_what_is_there_is_not_missing() -> None:
    assert not told_of(
        overridden=("__init__(config)", "lookup(key, context, exclude)", "definitions(extra)", "parse(text)"),
        called=("lookup(key, context)", "takes_anything(first)"),
        read=("plain", "config", "_jobs", "typed", "lookup"),
    )
    assert not told_of("Record", called=("__init__(required)",), read=("required",))
    assert not told_of("Derived", overridden=("__init__(config)",), read=("_jobs",))
    assert not differences([Reliance(__name__, called=("told_of(owner)",), read=("Theirs",))])


@pytest.mark.parametrize(
    ("relied", "told"),
    [
        ({"read": ("gone",)}, "has no gone"),
        ({"read": ("local",)}, "has no local"),
        ({"overridden": ("gone()",)}, "has no gone"),
        ({"called": ("plain()",)}, "has no plain"),
        ({"called": ("lookup(key)",)}, "takes (key, context, exclude), and we know (key)"),
        ({"called": ("lookup(key, context, tenant)",)}, "takes (key, context, exclude)"),
        ({"overridden": ("lookup(key, context)",)}, "takes (key, context, exclude), and we know (key, context)"),
        ({"overridden": ("lookup(context, key, exclude)",)}, "and we know (context, key, exclude)"),
        ({"overridden": ("definitions(cls, extra)",)}, "takes (extra)"),
    ],
)
def test_what_is_gone_or_different_is_told_with_both_signatures(relied: dict[str, tuple[str, ...]], told: str) -> None:
    (line,) = told_of(**relied)
    assert line.startswith("test_compat.Theirs")
    assert line.endswith(told) or told in line


def test_a_parameter_that_not_every_release_has_may_be_there_or_not() -> None:
    for written in ("lookup(key, context, exclude?)", "lookup(key, context, exclude, tenant?)"):
        assert not told_of(overridden=(written,))
        assert not told_of(called=(written,))


def test_a_module_or_class_that_is_gone_is_told() -> None:
    assert differences([Reliance("vllm.v1.gone:Class")]) == [
        "vllm.v1.gone cannot be imported (No module named 'vllm.v1.gone')"
    ]
    assert told_of("Gone") == [f"{__name__} has no Gone"]


def test_a_vllm_that_lost_a_method_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SecondaryTierManager, "drain_jobs")
    found = examine()
    assert found.standing is Standing.FOREIGN
    assert found.missing == ("base.SecondaryTierManager has no drain_jobs",)


def test_a_vllm_that_passes_more_to_a_method_of_ours_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(self: object, key: object, req_context: object, deadline: float = 0.0) -> None: ...

    monkeypatch.setattr(SecondaryTierManager, "lookup", lookup)
    (line,) = examine().missing
    assert line == (
        "base.SecondaryTierManager.lookup takes (key, req_context, deadline), and we know (key, req_context)"
    )


def test_a_vllm_that_asks_for_more_than_we_pass_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(self: object, tensor_page_size: int, node: int) -> None: ...

    monkeypatch.setattr(SharedOffloadRegion, "create_next_worker_view", view)
    (line,) = examine().missing
    assert line.endswith("create_next_worker_view takes (tensor_page_size, node), and we know (tensor_page_size)")


def test_a_vllm_that_keeps_its_state_elsewhere_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, config: Any) -> None:
        self.config = config

    for owner in TieringOffloadingSpec.__mro__[:-2]:
        monkeypatch.setattr(owner, "__init__", init)
        monkeypatch.delattr(owner, "_manager", raising=False)
        monkeypatch.setattr(owner, "__annotations__", {}, raising=False)
    assert "spec.TieringOffloadingSpec has no num_chunks" in examine().missing


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0rc1+cpu", "dev", "1.32.0"])
def test_another_release_that_looks_the_same_inside_is_untested(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    assert examine() == (version, Standing.UNTESTED, ())


@pytest.mark.parametrize("release", SUPPORTED_VLLM)
def test_a_supported_release_is_tested_whatever_its_build(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    for version in (release, f"{release}.1", f"{release}.0+cpu", f"{release}.0rc2"):
        monkeypatch.setattr("vllm.__version__", version)
        assert examine().standing is Standing.TESTED


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.33.0", "0.33"),
        ("v0.33.1", "0.33"),
        ("v0.33.0-x86_64", "0.33"),
        ("0.33.0rc1+cpu", "0.33"),
        ("0.33", "0.33"),
        ("1.0.0", "1.0"),
        ("latest", None),
        ("nightly-0.33", None),
        ("33", None),
        ("", None),
    ],
)
def test_a_version_or_the_tag_of_an_image_names_its_release(version: str, release: str | None) -> None:
    assert vllm_release(version) == release


def test_asking_imports_nothing_of_vllm_before() -> None:
    script = (
        "import sys, kvtier_connector.vllm_adapter.supported\n"
        "assert not [name for name in sys.modules if name.startswith('vllm')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_the_table_is_written_as_it_is_read() -> None:
    for reliance in supported.RELIED_ON:
        assert reliance.overridden or reliance.called or reliance.read
