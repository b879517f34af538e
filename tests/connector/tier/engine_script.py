# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine with the disk tier, does in turn what it is told, and prints the answers as JSON.

A process of its own for each engine: only a new process proves that nothing but the volume carried the blocks over.
What is told is the name of a prompt to ask for (`PROMPTS`, or ``adapter``: the first of them with the LoRA adapter), or

    salted=LABEL, adapter=LABEL, ...   the same under another name in the answers
    reset                              empty the GPU's cache, not the CPU tier
    rekey                              encrypt with the key k2; done once a new block is
    empty                              empty the CPU tier as well
    update                             replace the weights in place, and empty the GPU's cache
    blocks                             wait until the volume has as many blocks as were computed so far
    damage                             wait for that, and flip a byte of each that came since it was waited for before
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_under_test import CHUNK_TOKENS, ask, make_llm, read_metrics, tell, wait_until
from patience import be_patient
from vllm.config.kv_events import KVEventsConfig
from vllm.lora.request import LoRARequest

from kvtier_connector.contract import engine as contract
from kvtier_connector.store.header import Header, decode_header

PROMPT = [(7 * position * position + 13 * position) % 1900 + 100 for position in range(2000)]
PROMPTS = {"base": PROMPT, "salted": PROMPT, "doomed": [token + 1 for token in PROMPT], "other": PROMPT[::-1]}
SALT = "pepper"
SPLITTING = "kvtier_connector.vllm_adapter.split_scheduler.SplitScheduler"
PROBE_SECONDS = 60.0


class Engine:
    def __init__(
        self, directory: Path, config: Path, *, has_adapters: bool, events: int | None, splits: str = ""
    ) -> None:
        self.directory = directory
        self._before = len(self._files())
        self.computed = 0
        self._is_storing = True
        self.answers: dict[str, Any] = {}
        self._waited_for: set[Path] = set()
        self._probes = itertools.count(1000)
        self._adapter = LoRARequest("math", 1, str(directory / "adapter"))
        publishing = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{events}", topic="kv@pod@model"
        )
        self.llm = make_llm(
            directory / "model",
            config,
            # Heads are computed in chunks of their own, which bfloat16 rounds otherwise.
            dtype="float32" if splits else "bfloat16",
            max_model_len=4096,
            cpu_bytes=512 << 20,
            engine={
                **({"enable_lora": True, "max_lora_rank": 8} if has_adapters else {}),
                **({"scheduler_cls": SPLITTING, "async_scheduling": splits == "async"} if splits else {}),
                **({} if events is None else {"kv_events_config": publishing}),
            },
            self_describing_kv_events=events is not None,
            eviction_policy="lru",
            offload_prompt_only=True,
        )

    def ask(self, name: str, label: str) -> None:
        started = time.perf_counter()
        if name == "adapter":
            (answer,) = ask(self.llm, [PROMPT], lora=self._adapter)
        else:
            (answer,) = ask(self.llm, [PROMPTS[name]], salt=SALT if name == "salted" else "")
        self.answers[label] = {"seconds": round(time.perf_counter() - started, 3), **answer}
        if self._is_storing:
            self.computed += (len(PROMPT) - answer["cached_tokens"]) // CHUNK_TOKENS

    def reset(self) -> None:
        assert self.llm.reset_prefix_cache()

    def empty(self) -> None:
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def update(self) -> None:
        self.blocks()
        self._is_storing = False
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.directory / "updated")})
        self.reset()

    def blocks(self) -> None:
        wait_until(lambda: len(self._files()) >= self._before + self.computed, f"{self.computed} more blocks")
        self._waited_for = self._files()

    def damage(self) -> None:
        before = self._waited_for
        self.blocks()
        for file in self._waited_for - before:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0xFF
            file.write_bytes(content)

    def rekey(self) -> None:
        self.blocks()
        (self.directory / contract.LIVE_FILE).write_text(contract.encode_live("ReadWrite", active_key="k2"))

        def is_rekeyed(file: Path) -> bool:
            header = decode_header(file.read_bytes())
            return isinstance(header, Header) and header.seal.key_id == "k2"

        self._probe(is_rekeyed, "the engine encrypts with the other key")

    def _probe(self, is_right: Callable[[Path], bool], what: str) -> None:
        """Ask for one more block, again and again, until one is written as it is to be."""

        def is_written() -> bool:
            before = self._files()
            ask(self.llm, [[next(self._probes)] * (CHUNK_TOKENS + 1)])
            deadline = time.monotonic() + PROBE_SECONDS
            while not (found := self._files() - before) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.computed += len(found)
            return any(is_right(file) for file in found)

        wait_until(is_written, what)

    def _files(self) -> set[Path]:
        return set((self.directory / "volume").rglob("*.kvb"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True, help="holds models, adapter, live settings and volume")
    parser.add_argument("--config", type=Path, required=True, help="the connector's document")
    parser.add_argument("--adapters", action="store_true", help="take LoRA adapters")
    parser.add_argument("--splits", choices=("async", "sync"), default="", help="split hits, with this scheduling")
    parser.add_argument("--events", type=int, help="port to publish KV events on")
    parser.add_argument("acts", nargs="+", help="see above")
    options = parser.parse_args()
    be_patient()
    settings = {"has_adapters": options.adapters, "events": options.events, "splits": options.splits}
    engine = Engine(options.directory, options.config, **settings)
    for act in options.acts:
        name, _, label = act.partition("=")
        if name in PROMPTS or name == "adapter":
            engine.ask(name, label or name)
        else:
            getattr(engine, name)()
    tell({**engine.answers, "metrics": read_metrics(engine.llm)})


if __name__ == "__main__":
    main()
