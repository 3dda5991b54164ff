"""What every part of a spec is: typed, frozen, closed."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Spec(BaseModel):
    """Base of all spec parts: unknown keys are refused, values cannot change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Count = Annotated[int, Field(ge=1)]
"""A number of things, at least one."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A fraction between 0 and 1."""
URI = Annotated[str, Field(min_length=1)]
"""A local path or `s3://bucket/key`."""
