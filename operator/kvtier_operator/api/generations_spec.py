# SPDX-License-Identifier: Apache-2.0
"""``spec.generations`` of a KVCacheTier: what becomes of blocks when the spec, or vLLM, is another. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictInt

from kvtier_operator.api.rules import ApiModel


class Generations(ApiModel):
    """Fate of the blocks of earlier specs, and of other releases of vLLM."""

    keep_previous: Annotated[StrictInt, Field(ge=0, le=32, json_schema_extra={"format": "int32"})] = 1
    """How many earlier generations stay on the volume, so that going back to one finds its blocks. Older ones are
    removed. Whatever is kept counts towards the budget, and goes before blocks of the current one."""
    across_releases: Literal["Never", "Verified"] = "Never"
    """Whether another `engine.image` keeps the cache. With `Never`, it starts an empty one. With `Verified`, engines of
    another image or release of vLLM compute their first prompts whole. They use the cache once three prompts agree
    with its blocks but for rounding; if one differs, their release gets a cache of its own. Models with several
    groups of layers (sliding windows, states) are not compared, and start an empty one. Changing it starts an empty
    cache, and restarts the engines."""


IMAGE_KEEPS_CACHE: Final = (
    "keeps the cache, verified at the first start: engines of the new image load and store nothing until three prompts "
    "that they compute agree with its blocks. If one differs, they begin an empty cache, and this one stays"
)
"""Cost of another image with `acrossReleases: Verified`."""

COMPARED, REFUSED = 1, 2
"""Values of ``vllm:kvtier_disk_release``: the engine compares the blocks of the generation, or does not use them."""
