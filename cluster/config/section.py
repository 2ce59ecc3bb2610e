"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's ``on`` and ``yes`` are booleans, and Python would take them for the number 1."""
        field = cls.model_fields[info.field_name or ""]
        if value is False and "off" in get_args(field.annotation):
            return "off"  # what the word was
        if isinstance(value, bool) and field.annotation is not bool:
            raise PydanticCustomError("boolean", "a boolean is not allowed here")
        return value
