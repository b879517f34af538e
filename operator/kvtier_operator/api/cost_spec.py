# SPDX-License-Identifier: Apache-2.0
"""``spec.cost`` of a KVCacheTier: prices, so that the tier can say what it saves. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field, StrictStr, StringConstraints

from kvtier_operator.api.rules import ApiModel, Checked, Rule

_PRICE: Final = re.compile(r"^(0|[1-9][0-9]{0,8})([.][0-9]{1,6})?$")

IS_PRICE: Final = Rule(
    cel=f"self.matches('{_PRICE.pattern}')",
    message='must be a number without sign, unit or exponent, such as "2.50"; the currency has a field of its own',
    check=lambda text: _PRICE.fullmatch(text) is not None,
)

Price = Annotated[StrictStr, StringConstraints(min_length=1, max_length=16), Checked((IS_PRICE,))]


class Cost(ApiModel):
    """Prices. Nothing but what is reported follows from them."""

    gpu_hour: Price
    """Price of one accelerator for an hour, in quotes, such as `"2.50"`; of one engine where
    `engine.accelerator.resource` is `none`."""
    storage_gib_month: Price = "0"
    """Price of a GiB on the volume for a month of 730 hours, in quotes, such as `"0.16"`."""
    currency: Annotated[StrictStr, Field(min_length=3, max_length=3, pattern=r"^[A-Z]{3}$")] = "USD"
    """Currency of both, as three letters."""
