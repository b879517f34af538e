# SPDX-License-Identifier: Apache-2.0
"""Texts and numbers that fields of the KVCacheTier API hold: quantities, names, labels. Pure.

Every text has a greatest length: the API server estimates the cost of its rules from it and refuses unbounded ones.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt, StrictStr, StringConstraints

from kvtier_operator import quantity
from kvtier_operator.api.rules import Checked, Rule

IS_QUANTITY = Rule(
    cel="isQuantity(self)",
    message='is not a quantity; write a number and a unit, such as "64Gi", or "64G" for what is sold as 64GB',
    check=quantity.is_quantity,
)

AT_LEAST_ONE_MEBIBYTE = Rule(
    cel="!isQuantity(self) || quantity(self).compareTo(quantity('1Mi')) >= 0",
    message='must be at least 1Mi; a number without a unit counts bytes, so write the unit, such as "64Gi"',
    check=lambda text: not quantity.is_quantity(text) or quantity.parse_quantity(text) >= 1 << 20,
)

_FEWEST_CPUS = quantity.parse_quantity("10m")
_MOST_CPUS = quantity.parse_quantity("4096")

IS_CPU_QUANTITY = Rule(
    cel="isQuantity(self)",
    message='is not a quantity; write a number of CPUs, such as "4" or "500m"',
    check=quantity.is_quantity,
)

CPU_RANGE = Rule(
    cel="!isQuantity(self) || (quantity(self).compareTo(quantity('10m')) >= 0"
    " && quantity(self).compareTo(quantity('4096')) <= 0)",
    message='must be between 10m and 4096 CPUs; write a number of CPUs, such as "4" or "500m"',
    check=lambda text: not quantity.is_quantity(text) or _FEWEST_CPUS <= quantity.parse_quantity(text) <= _MOST_CPUS,
)

_QuantityText = Annotated[StrictStr, StringConstraints(min_length=1, max_length=32)]

ByteQuantity = Annotated[_QuantityText, Checked((IS_QUANTITY, AT_LEAST_ONE_MEBIBYTE))]
"""An amount of memory or storage."""

CpuQuantity = Annotated[_QuantityText, Checked((IS_CPU_QUANTITY, CPU_RANGE))]
"""An amount of processors."""

Word = Annotated[StrictStr, StringConstraints(min_length=1, max_length=512, pattern=r"^\S+$")]
"""Text without white space."""

ObjectName = Annotated[
    StrictStr, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
"""The name of another Kubernetes object in the same namespace."""

LabelKey = Annotated[StrictStr, StringConstraints(max_length=317)]
LabelValue = Annotated[
    StrictStr, StringConstraints(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
]

Amount = Annotated[StrictInt, Field(ge=0, json_schema_extra={"format": "int64"})]
"""A number of bytes, seconds or events that the operator reports."""

Count = Annotated[StrictInt, Field(ge=0, json_schema_extra={"format": "int32"})]
"""A number of pods."""
