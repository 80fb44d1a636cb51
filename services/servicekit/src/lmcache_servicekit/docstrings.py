"""What fields mean, from the docstrings of the classes that declare them: for `--help`,
docs/configuration.md and the OpenAPI documents.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

_ATTRIBUTES: Final = "\n\nAttributes:\n"
_ATTRIBUTE: Final = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before a docstring's `Attributes`, and the text of each of them."""
    text, _, attributes = inspect.cleandoc(docstring).partition(_ATTRIBUTES)
    found = _ATTRIBUTE.findall(attributes.partition("\n\n")[0])
    return text, {name: " ".join(told.split()) for name, told in found}


def meanings(kind: type) -> dict[str, tuple[str, type]]:
    """Return the text of each attribute of a class, and the class whose docstring has it."""
    return {
        name: (text, owner)
        for owner in reversed(kind.__mro__)
        for name, text in split_docstring(owner.__doc__ or "")[1].items()
    }


def describe(schema: dict[str, Any], kind: type) -> None:
    """Describe a class and its fields, inherited ones included, in the schema of the class.

    Args:
        schema: A JSON schema of an object, or of an array whose items are the fields.
        kind: The class.
    """
    schema["description"] = split_docstring(kind.__doc__ or "")[0].partition("\n\nRaises:")[0]
    names = getattr(kind, "__struct_fields__", ())
    fields = schema.get("properties", {}) | dict(
        zip(names, schema.get("prefixItems", ()), strict=False)
    )
    for name, (text, _) in meanings(kind).items():
        if name in fields:
            fields[name]["description"] = text


class ApiModel(BaseModel):
    """A body of a request or an answer, whose schema has the texts of its docstring."""

    model_config = ConfigDict(json_schema_extra=describe)
