# SPDX-License-Identifier: Apache-2.0
"""Writes a model of random weights whose answers depend on the whole prompt.

vLLM's own dummy weights answer nearly the same whatever came before, and would hide a block served for another prefix.
The weights are the same for the same seed, so that engines of two processes agree.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from e2e.matrix.shapes import Shape

SEED = 20240607
_SPREAD = 0.08
"""Standard deviation of the weights: with that of most models, 0.02, tiny layers hardly add to what passes by them."""
_OUTPUT_VARIETY = 0.8


def write(directory: Path, shape: Shape, *, seed: int = SEED) -> None:
    """Write a model that vLLM loads from ``directory``; a complete one of the same shape is left alone."""
    mark = json.dumps([seed, dict(shape)], sort_keys=True)
    stamp = directory / "shape.json"
    if stamp.exists() and stamp.read_text() == mark:
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    torch.manual_seed(seed)
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **fields, initializer_range=_SPREAD)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Rows of the output differ in length, so that the best token leads by more than the rounding of bfloat16.
        output = model.get_output_embeddings().weight
        if not shape.get("tie_word_embeddings"):
            output.mul_(torch.exp(_OUTPUT_VARIETY * torch.randn(output.shape[0], 1)))
    model.to(torch.bfloat16).save_pretrained(directory, safe_serialization=True)
    stamp.write_text(mark)
