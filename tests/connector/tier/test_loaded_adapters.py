# SPDX-License-Identifier: Apache-2.0
"""A worker reports the adapter that vLLM has in memory, whatever its files hold meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from engine_loras import WEIGHTS, SimulatedLoras
from test_adapters import request_for
from typing_extensions import override
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from kvtier_connector.vllm_adapter import lora
from kvtier_connector.vllm_adapter.lora import AdapterOrders, LoadedAdapters, digest_of


class RealFiles(SimulatedLoras):
    """Reads the files of an adapter as vLLM does."""

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
        """Return the digest that the worker answers."""
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


def test_an_adapter_is_digested_once_for_each_time_vllm_reads_it_and_not_when_nobody_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[Any] = []
    monkeypatch.setattr(lora, "digest_of", lambda model: (digested.append(model), digest_of(model))[1])
    worker = Worker()
    request = request_for(write_real(tmp_path / "adapter", 1.0), inplace=True)
    worker.loras.add_adapter(request)
    worker.changes()
    assert digested == []
    worker.ask(request_for(tmp_path / "adapter"))
    worker.changes()
    assert len(digested) == 1


def test_an_adapter_whose_files_are_gone_is_answered_with_no_digest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Worker().ask(request_for(tmp_path / "nowhere")) is None
    assert "The LoRA adapter math cannot be loaded" in caplog.text


def test_an_adapter_that_cannot_be_read_shares_blocks_with_no_other_engine(tmp_path: Path) -> None:
    model = RealFiles(1, SimpleNamespace())._load_adapter(request_for(write_real(tmp_path / "adapter", 1.0)))
    assert digest_of(model) == digest_of(model)
    (layer,) = model.loras.values()
    layer.scaling = object()  # type: ignore[assignment]  # of a later release
    assert digest_of(model) != digest_of(model)
