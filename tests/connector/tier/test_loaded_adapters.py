# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of an adapter is what vLLM's own loading of it has in memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from engine_loras import WEIGHTS
from test_adapters import request_for
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from kvtier_connector.vllm_adapter import lora
from kvtier_connector.vllm_adapter.lora import LoadedAdapters, Orders, Told


def real_loader() -> tuple[Any, LoadedAdapters]:
    """Return vLLM's own loading of adapters, and what stands before it."""

    class Manager:
        def _load_adapter(self, request: LoRARequest) -> LoRAModel:
            helper = PEFTHelper.from_local_dir(request.lora_path, 4096)
            return LoRAModel.from_local_checkpoint(
                request.lora_path, {"q_proj"}, helper, lora_model_id=request.lora_int_id, device="cpu"
            )

        def list_adapters(self) -> set[int]:
            return set()

    holder = SimpleNamespace(lora_manager=Manager())
    return holder.lora_manager, LoadedAdapters(holder, 0)


def write_real(directory: Path, value: float, *, alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{name}.lora_A.weight": (8, 64), f"{name}.lora_B.weight": (64, 8)}
    safetensors.torch.save_file(
        {part: torch.full(form, value) for part, form in parts.items()}, directory / "new.safetensors"
    )
    # In the same file, which vLLM may have mapped.
    with (directory / WEIGHTS).open("r+b" if (directory / WEIGHTS).exists() else "wb") as file:
        file.write((directory / "new.safetensors").read_bytes())
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def test_weights_that_are_mapped_from_a_file_are_taken_away_from_it(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(64))
    mapped = torch.from_file(str(path), shared=True, size=64, dtype=torch.uint8)

    class Manager:
        def _load_adapter(self, request: LoRARequest) -> LoRAModel:
            layer = LoRALayerWeights("layer", 1, 1, mapped, torch.zeros(1))
            return LoRAModel(request.lora_int_id, 1, {"layer": layer})

    manager = Manager()
    LoadedAdapters(SimpleNamespace(lora_manager=manager), 0)
    model = manager._load_adapter(request_for(tmp_path))
    path.write_bytes(b"x" * 64)
    assert mapped.any()
    assert not model.loras["layer"].lora_a.any()


def test_weights_in_memory_stay_what_was_told_of_them_though_their_file_is_written_over(tmp_path: Path) -> None:
    manager, loaded = real_loader()
    place = write_real(tmp_path / "adapter", 1.0)
    model = manager._load_adapter(request_for(place))
    (layer,) = model.loras.values()
    write_real(place, 2.0)
    assert torch.equal(layer.lora_a, torch.full((8, 64), 1.0))
    assert layer.scaling == 1
    assert torch.equal(layer.lora_b, torch.full((64, 8), 2.0)), "alpha over rank is in the weights"
    again = manager._load_adapter(request_for(place))
    first, second = loaded.take_told()
    assert first.digest != second.digest
    write_real(place, 1.0)
    manager._load_adapter(request_for(place))
    assert loaded.take_told()[0].digest == first.digest
    write_real(place, 1.0, alpha=32)
    manager._load_adapter(request_for(place))
    assert loaded.take_told()[0].digest != first.digest
    assert again is not model


def test_a_path_that_names_its_contents_is_checked_and_keeps_other_contents_off_the_volume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, loaded = real_loader()
    made = write_real(tmp_path / "made", 1.0)
    contents = b"".join((made / name).read_bytes() for name in ("adapter_config.json", WEIGHTS))
    place = made.rename(tmp_path / f"math@{hashlib.sha256(contents).hexdigest()}")
    manager._load_adapter(request_for(place))
    assert [told.digest is None for told in loaded.take_told()] == [False]
    write_real(place, 1.0, alpha=32)
    manager._load_adapter(request_for(place))
    assert [told.digest is None for told in loaded.take_told()] == [True]
    assert "are not those that its path" in caplog.text


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the adapters that were digested so far."""
    found: list[Any] = []
    take_away = lora._take_away
    monkeypatch.setattr(lora, "_take_away", lambda model: (found.append(model), take_away(model))[1])
    return found


def test_an_adapter_that_is_loaded_in_place_in_each_step_is_not_digested_and_that_is_told_once(
    tmp_path: Path, digested: list[Any]
) -> None:
    manager, loaded = real_loader()
    place = write_real(tmp_path / "adapter", 1.0)
    request = request_for(place, inplace=True)
    for _ in range(3):
        manager._load_adapter(request)
    assert loaded.take_told() == [Told(0, request.lora_int_id, "math", str(place), None)]
    assert digested == []
    manager._load_adapter(request_for(place))
    assert len(digested) == 1


def test_an_adapter_that_cannot_be_copied_is_used_as_vllm_has_loaded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, loaded = real_loader()
    place = write_real(tmp_path / "adapter", 1.0)
    monkeypatch.delattr(LoRAModel, "clone")
    (layer,) = manager._load_adapter(request_for(place)).loras.values()
    assert torch.equal(layer.lora_a, torch.full((8, 64), 1.0))
    assert [told.digest for told in loaded.take_told()] == [None]
    loaded.obey(Orders({1: request_for(place)}, {}, ()))
    assert [told.digest for told in loaded.take_told()] == [None]
