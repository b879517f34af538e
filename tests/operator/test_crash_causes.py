# SPDX-License-Identifier: Apache-2.0
"""What an engine's last words are taken to mean: lines as vLLM, the hub and the kernel write them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier_operator.api.reasons import Reason
from kvtier_operator.parts import crash_causes

LINES: dict[Reason, tuple[str, ...]] = {
    Reason.TOKEN_REFUSED: (
        "huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1)",
        "OSError: You are trying to access a gated repo.",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://x",
    ),
    Reason.MODEL_NOT_FOUND: (
        "RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1)",
        "OSError: nope is not a local folder and is not a valid model identifier listed on",
    ),
    Reason.HUB_UNREACHABLE: (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        "MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded with url: /x\")",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file",
    ),
    Reason.SHM_TOO_SMALL: (
        "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'",
        "RuntimeError: unable to write </torch_1>: shared memory: No space left on device",
        "OSError: [Errno 14] Bad address",
        "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 9 MiB required",
        "kvtier_connector.contract.errors.ConfigInvalid: /dev/shm is too small: the CPU tier needs 9 MiB there",
    ),
    Reason.STALE_SHM: (
        "FileExistsError: [Errno 17] File exists: '/dev/shm/vllm_offload_1.mmap'",
        "OSError: [Errno 28] /dev/shm/vllm_offload_1.mmap: No space left on device",
    ),
    Reason.DEVICE_MISSING: (
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: Failed to infer device type, please set the environment variable",
        "ImportError: libcuda.so.1: cannot open shared object file",
    ),
    Reason.DEVICE_OUT_OF_MEMORY: (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "ValueError: No available memory for the cache blocks. Try increasing",
    ),
    Reason.ARGS_REFUSED: ("api_server.py: error: unrecognized arguments: --max-modle-len",),
    Reason.CONFIG_REFUSED: ("ModuleNotFoundError: No module named 'kvtier_connector'",),
}


@pytest.mark.parametrize(("line", "reason"), [(line, reason) for reason, lines in LINES.items() for line in lines])
def test_the_last_words_of_an_engine_name_the_cause_and_the_remedy(line: str, reason: Reason) -> None:
    message = f"INFO 01-01 12:00:00 starting\n{line}\nEngine core initialization failed. See root cause above."
    found = crash_causes.explain(message, 1)
    assert found.reason is reason
    assert found.quote in line
    assert found.remedy


def what_vllm_says_of_encoder_decoder_models() -> str:
    source = Path(find_spec("vllm").origin).with_name("v1") / "core" / "sched" / "scheduler.py"
    return next(line for line in source.read_text().splitlines() if "Encoder-decoder" in line).strip()


UNDER_THE_CAUSE = "401 Client Error\nRepositoryNotFoundError: 404 Client Error\nunrecognized arguments"


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        # A page of shared memory that is not there.
        ("", 135, Reason.SHM_TOO_SMALL),
        # The cause, and not what followed from it.
        (UNDER_THE_CAUSE, 1, Reason.TOKEN_REFUSED),
        (f"AssertionError: {what_vllm_says_of_encoder_decoder_models()}", 1, Reason.MODEL_UNSUPPORTED),
        *((text, 1, None) for text in ("", "Traceback (most recent call last):\nKeyError: 'x'", "\n\n")),
    ],
)
def test_the_cause_is_found_and_words_that_nobody_knows_explain_nothing(
    message: str, code: int, reason: Reason | None
) -> None:
    found = crash_causes.explain(message, code)
    assert (found and found.reason) is reason


def test_a_long_line_is_quoted_by_its_end() -> None:
    found = crash_causes.explain("x" * 5000 + " CUDA out of memory", 1)
    assert len(found.quote) <= 200
    assert found.quote.endswith("CUDA out of memory")
