"""What all sections of the configuration have in common: closed, frozen, every number bounded."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_INT = 2**31 - 1
"""Block ids and token positions are 32 bits wide."""
MAX_GIB = 2**20
"""A pebibyte: a larger size is a slip, and would overflow a byte count somewhere."""
MAX_SECONDS = 365 * 24 * 3600

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
"""Of what becomes a label in DNS; its meaning in words is in ``core.config_faults``."""

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveGib = Annotated[float, Field(gt=0, le=MAX_GIB)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ConfigSection(BaseModel):
    """Fields with a docstring each, which is what the reference page says of them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
