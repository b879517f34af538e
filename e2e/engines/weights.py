# SPDX-License-Identifier: Apache-2.0
"""Writes a model of random weights whose answers depend on the whole prompt, and what may go with it.

vLLM's own dummy weights answer nearly the same whatever came before, and would hide a block served for another prefix.
The weights are the same for the same seed, so that engines of two processes agree.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Shape = Mapping[str, Any]
SHAPES: Final[Mapping[str, Shape]] = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())["shapes"]
"""Fields of the models' config.json."""
VOCABULARY: Final = 2048
PICTURE_SIDE: Final = 56
PICTURE_TOKEN: Final = 3
"""Stands in a prompt for its picture."""
SEED = 20240607
LORA_RANK: Final = 8
_SPREAD = 0.08
"""Standard deviation of the weights: with that of most models, 0.02, tiny layers hardly add to what passes by them."""
_OUTPUT_VARIETY = 0.8
_LORA_SPREAD = 0.1
_QWEN_MARKS = ("<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def write(directory: Path, shape: Shape, *, seed: int = SEED, is_drawn: bool = False) -> None:
    """Write a model that vLLM loads, or whose weights it draws; a complete one of the same shape is left alone."""
    mark, stamp = json.dumps([seed, dict(shape)], sort_keys=True), directory / "shape.json"
    if stamp.exists() and stamp.read_text() == mark:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if is_drawn:
        for name, text in {"config.json": json.dumps(dict(shape)), "pytorch_model.bin": mark}.items():
            (directory / name).write_text(text)
    else:
        _make(shape, seed).save_pretrained(directory, safe_serialization=True)
    if "num_nextn_predict_layers" in shape:
        _add_next_layer(directory, shape)
    if shape["model_type"] == "llava":
        _name_tower(directory)
    if "vision_config" in shape:
        _write_processor(directory, shape)
    stamp.write_text(mark)


def write_eagle(directory: Path, shape: Shape, *, seed: int = SEED) -> None:
    """Write the head of EAGLE for a Llama of this shape: one layer that also looks at what the model computed."""
    import torch
    from safetensors.torch import save_file

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = _make({**shape, "num_hidden_layers": 1}, seed)
    size = int(shape["hidden_size"])
    held = {
        name.removeprefix("model."): value.contiguous()
        for name, value in model.state_dict().items()
        # The head begins without a norm, and takes embeddings and output from the model.
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    held["fc.weight"] = (_SPREAD * torch.randn(size, 2 * size)).to(torch.bfloat16)
    save_file(held, directory / "model.safetensors")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)


def write_lora(directory: Path, shape: Shape, *, seed: int) -> None:
    """Write an adapter for a Llama of this shape that changes what its attention keeps."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    chooser = torch.Generator().manual_seed(seed)
    size = int(shape["hidden_size"])
    held = {}
    for layer in range(int(shape["num_hidden_layers"])):
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, form in (("lora_A", (LORA_RANK, size)), ("lora_B", (size, LORA_RANK))):
                held[f"{name}.{part}.weight"] = _LORA_SPREAD * torch.randn(form, generator=chooser)
    save_file(held, directory / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(description))


def _make(shape: Shape, seed: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSpeechSeq2Seq
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    # Transformers does without the layers that predict further tokens; `_add_next_layer` makes one of the last layer.
    if "num_nextn_predict_layers" in fields:
        fields["num_hidden_layers"] += fields["num_nextn_predict_layers"]
    config = AutoConfig.for_model(shape["model_type"], **fields, initializer_range=_SPREAD)
    kind: Any = AutoModelForImageTextToText if "vision_config" in shape else AutoModelForCausalLM
    kind = AutoModelForSpeechSeq2Seq if shape.get("is_encoder_decoder") else kind
    model = kind.from_config(config)
    with torch.no_grad():
        # Rows of the output differ in length, so that the best token leads by more than the rounding of bfloat16.
        output = model.get_output_embeddings().weight
        if not shape.get("tie_word_embeddings"):
            output.mul_(torch.exp(_OUTPUT_VARIETY * torch.randn(output.shape[0], 1)))
    return model.to(torch.bfloat16)


def _add_next_layer(directory: Path, shape: Shape) -> None:
    """Have the last layer of a model predict the token after the next one, as GLM-4.5 does."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    held = load_file(path)
    size, last = int(shape["hidden_size"]), f"model.layers.{shape['num_hidden_layers']}"
    ones = torch.ones(size, dtype=torch.bfloat16)
    held |= {f"{last}.{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    held[f"{last}.eh_proj.weight"] = (_SPREAD * torch.randn(size, 2 * size)).to(torch.bfloat16)
    held[f"{last}.embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
    held[f"{last}.shared_head.head.weight"] = held["lm_head.weight"].clone()
    save_file(held, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config.update({name: shape[name] for name in ("num_hidden_layers", "num_nextn_predict_layers")})
    (directory / "config.json").write_text(json.dumps(config))


def _name_tower(directory: Path) -> None:
    """Name the weights that look at pictures as published models do, which vLLM loads."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tower, inner = "vision_tower.", "vision_tower.vision_model."
    held = {name if inner in name else name.replace(tower, inner): value for name, value in load_file(path).items()}
    save_file(held, path, metadata={"format": "pt"})


def _write_processor(directory: Path, shape: Shape) -> None:
    """Write what makes pictures and words into what the model takes."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    marks = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    picture = {"image_token": "<|image_pad|>" if shape["model_type"].startswith("qwen2") else "<image>"}
    special = {name: number for number, name in enumerate((*marks.values(), *picture.values(), *_QWEN_MARKS))}
    words = {**special, **{f"t{number}": number for number in range(len(special), VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, marks["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, additional_special_tokens=[*picture.values(), *_QWEN_MARKS], **marks
    )
    side = {"height": PICTURE_SIDE, "width": PICTURE_SIDE}
    if shape["model_type"].startswith("qwen2"):
        # Four patches make a token: the picture is made as large as one of sixteen tokens.
        area = {"shortest_edge": 4 * PICTURE_SIDE**2, "longest_edge": 4 * PICTURE_SIDE**2}
        transformers.Qwen2VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(size=area),
            tokenizer=tokenizer,
            video_processor=transformers.Qwen2VLVideoProcessor(size=area),
        ).save_pretrained(directory)
        return
    if shape["model_type"] == "blip-2":
        transformers.Blip2Processor(
            image_processor=transformers.BlipImageProcessor(size=side),
            tokenizer=tokenizer,
            num_query_tokens=shape["num_query_tokens"],
        ).save_pretrained(directory)
        return
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": PICTURE_SIDE}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        **picture,
    ).save_pretrained(directory)


def kv_bytes_per_token(shape: Shape, *, item_bytes: int = 2) -> int:
    """Return the size of keys and values of all layers, by default in bf16."""
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * item_bytes)


SEEDS_WEIGHTS = "KVTIER_BENCH_SEEDS_WEIGHTS"
"""In the environment of an engine whose dummy weights are to be drawn by `fill`."""
_ATTENTION_SHARPNESS = 2.0
"""Queries and keys are this much larger than unit variance: a token attends to some others, not evenly to all."""
_HEAD_VARIETY = 0.5
"""Output rows differ in length, so the best token leads by more than the rounding of bf16."""


def offer_plugin(directory: Path) -> None:
    """Make of a directory, for the path of Python's modules, one that has vLLM call our plugins in each process."""
    described = directory / "kvtier_bench-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-bench\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nkvtier_bench = e2e.engines.weights:seed_weights\n"
    entry += "kvtier_throttle = e2e.bench.throttle:slow_down\n"
    entry += "kvtier_lmcache = e2e.backends.lmcache_memcpy:register_where_asked\n"
    entry += "kvtier_paced = e2e.engines.paced:pace\n"
    (described / "entry_points.txt").write_text(entry)


def seed_weights() -> None:
    """Have vLLM's loader draw weights instead of its dummies, where the environment asks for it.

    The loader draws them while the engine starts: with weights drawn later, the engine would leave its volume.
    """
    if os.environ.get(SEEDS_WEIGHTS):
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        DummyModelLoader.load_weights = lambda _, model, __: fill(model.named_parameters())


def fill(parameters: Iterable[tuple[str, Any]]) -> None:
    """Draw the weights in place, the same for the same device."""
    import torch

    with torch.inference_mode():
        for name, tensor in parameters:
            if tensor.dim() < 2:  # noqa: PLR2004 - no matrix
                # Biases that all prompts share would hide what they differ in.
                tensor.fill_(0.0 if "bias" in name else 1.0)
            elif tensor.numel():
                # By name and not by order, so that nothing depends on how the model lists its tensors.
                generator = torch.Generator(device=tensor.device).manual_seed(SEED + zlib.crc32(name.encode()))
                tensor.normal_(0.0, _deviation(name, tensor.shape[-1]), generator=generator)
                if "lm_head" in name:
                    lengths = torch.empty(tensor.shape[0], 1, device=tensor.device, dtype=torch.float32)
                    lengths.normal_(0.0, _HEAD_VARIETY, generator=generator)
                    tensor.mul_(lengths.exp().to(tensor.dtype))


def _deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    sharpness = _ATTENTION_SHARPNESS if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
    return sharpness / math.sqrt(fan_in)
