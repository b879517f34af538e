# SPDX-License-Identifier: Apache-2.0
"""The adapters of a simulated engine: vLLM's own manager of a worker, over adapters that are files of text."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

WEIGHTS = "adapter_model.safetensors"


class _Registered(LRUCacheLoRAModelManager):
    """Adapters in memory, the least recently used first."""

    capacity: Any = 0
    lora_slots: Any = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = self.lora_slots = capacity
        self._models: OrderedDict[int, LoRAModel] = OrderedDict()

    @override
    def __len__(self) -> int:
        return len(self._models)

    @override
    def list_adapters(self) -> dict[int, LoRAModel]:
        return dict(self._models)

    @override
    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        return self._models.get(adapter_id)

    @override
    def add_adapter(self, lora: LoRAModel) -> bool:
        is_new = lora.id not in self._models
        self._models.setdefault(lora.id, lora)
        self._models.move_to_end(lora.id)
        return is_new

    @override
    def activate_adapter(self, lora_id: int) -> bool:
        self._models.move_to_end(lora_id)
        return True

    @override
    def remove_adapter(self, adapter_id: int) -> bool:
        return self._models.pop(adapter_id, None) is not None

    @override
    def remove_oldest_adapter(self) -> bool:
        self._models.popitem(last=False)
        return True


class SimulatedLoras(LRUCacheWorkerLoRAManager):
    """The adapters of an engine; files are read when, and as often as, vLLM reads them."""

    _adapter_manager: Any

    def __init__(self, capacity: int, model: Any) -> None:
        """Start with none; so many stay loaded. The model gets its `lora_manager`, as vLLM's has."""
        self._adapter_manager = model.lora_manager = _Registered(capacity)
        self.reads = 0

    @override
    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        self.reads += 1
        text = (Path(lora_request.lora_path) / WEIGHTS).read_bytes()
        weights = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        layer = LoRALayerWeights("layer", 1, 1, weights, torch.zeros(1))
        return LoRAModel(lora_request.lora_int_id, 1, {"layer": layer})

    @override
    def set_active_adapters(self, requests: set[Any], mapping: Any | None = None) -> None:
        # In any order, so that the test decides on one.
        for each in sorted(requests, key=lambda each: each.lora_int_id):
            self.add_adapter(each)

    def contents(self, request: LoRARequest) -> str:
        """Return what the adapter of a request holds that would be computed with now."""
        if request.lora_int_id not in self.list_adapters():
            return "nothing yet"
        model = self._adapter_manager.get_adapter(request.lora_int_id)
        return bytes(model.loras["layer"].lora_a.tolist()).decode()
