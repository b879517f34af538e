# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama with random weights and a byte-level tokenizer, made on the spot: nothing comes from a model hub.

The weights are the same for the same seed, so that two engines, and a later run on the same volume, agree.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

SEED = 20240607
VOCABULARY = 2048
_OUTPUT_VARIETY = 0.8
_TEXT = """cache block prefix tier engine volume request token replica prompt layer memory page chunk eviction promotion
latency throughput storage cluster operator claim policy budget digest header checksum reader writer queue"""
_WORDS = _TEXT.split()


def make_model(directory: Path, *, layers: int = 8) -> None:
    """Write a model that vLLM loads from ``directory``; a complete one is left alone."""
    if (directory / "model.safetensors").exists():
        return
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tokenizer(partial)
    _write_weights(partial, layers)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def make_prompt(words: int, *, seed: int) -> str:
    """Return English-looking text; prompts of different seeds share no prefix."""
    chooser = random.Random(seed)
    return f"Report {seed}. " + " ".join(chooser.choice(_WORDS) for _ in range(words))


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((make_prompt(200, seed=seed) for seed in range(20)), trainer)
    filler = [f"<unused{index}>" for index in range(VOCABULARY - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(filler)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    fast.save_pretrained(directory)


def _write_weights(directory: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a second is no progress to watch
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # rows of the output differ in length, so that the best token leads by more than the rounding of bfloat16
        model.lm_head.weight.mul_(torch.exp(_OUTPUT_VARIETY * torch.randn(VOCABULARY, 1)))
    model.to(torch.bfloat16).save_pretrained(directory, safe_serialization=True)
