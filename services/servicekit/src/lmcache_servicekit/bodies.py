"""Bodies of requests and answers. Those of programs are msgspec types: the client's types read and
write them, and the OpenAPI document is generated from them.

A body is JSON, or MessagePack where programs send many chunk ids. Where both are read or written,
`Content-Type` states the format of a body, and `Accept` that of the response.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from lmcache_core.lookup.messages import JSON, MSGPACK, NO_LINE_END
from pydantic import BaseModel, ConfigDict

from lmcache_servicekit.problems import failures

BOTH_FORMATS: Final = (JSON, MSGPACK)

B = TypeVar("B", bound=msgspec.Struct)

_COMPONENT: Final = "#/components/schemas/{name}"

# Only in this case does msgspec repeat its input, which may be large or secret.
_REPEATED: Final = re.compile(r"^(Invalid enum value) .*?( - at `[^`]*`)?$", re.DOTALL)
_PLACE: Final = re.compile(r"^(.*) - at `\$\.?([^`]*)`$", re.DOTALL)

_SECTION: Final = re.compile(r"\n\n(?:Attributes|Raises):\n")
_ATTRIBUTE: Final = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


class ApiModel(BaseModel):
    """A body that FastAPI reads or writes; docstrings below its fields describe them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class RequestBody(Generic[B]):
    """Reads the body of a request.

    Args:
        plain: Its type as JSON; None: JSON is refused.
        packed: Its type as MessagePack; None: MessagePack is refused.
    """

    def __init__(self, plain: type[B] | None = None, packed: type[B] | None = None) -> None:
        self.plain = plain
        self.packed = packed
        self._read_plain = None if plain is None else msgspec.json.Decoder(plain).decode
        self._read_packed = None if packed is None else msgspec.msgpack.Decoder(packed).decode

    async def read(self, request: Request) -> B:
        """Read and check a request's body. Unknown fields are ignored.

        Raises:
            HTTPException: 415: its format is not accepted.
            RequestValidationError: It does not have this type; the text does not repeat it.
        """
        content_type = request.headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        decoders = {JSON: self._read_plain, MSGPACK: self._read_packed}
        decode = decoders.get(kind)
        if decode is None:
            known = " or ".join(name for name, reads in decoders.items() if reads is not None)
            raise HTTPException(415, f"the body must be {known}: name its type in Content-Type")
        data = await request.body()
        try:
            return self._read_json(data) if kind == JSON else decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise RequestValidationError([_validation_error(exc)]) from None

    def _read_json(self, data: bytes) -> B:
        assert self.plain is not None
        assert self._read_plain is not None
        # JSON has one kind of number, so 1.0 is also an integer. Only a body that would otherwise
        # be refused pays for this.
        try:
            return self._read_plain(data)
        except msgspec.ValidationError:
            return msgspec.convert(_with_integers(msgspec.json.decode(data)), self.plain)


def wants_packed(request: Request) -> bool:
    """Return whether the caller prefers MessagePack; without a preference it gets JSON.

    Raises:
        HTTPException: 406: it accepts neither.
    """
    accept = request.headers.get("accept")
    if accept is None or accept in ("*/*", MSGPACK):
        return accept == MSGPACK
    weights = _weights(accept)
    plain, packed = (_weight(weights, kind) for kind in BOTH_FORMATS)
    if plain <= 0 and packed <= 0:
        raise HTTPException(406, f"answers are {JSON} or {MSGPACK}: name one of them in Accept")
    return packed > plain


def answered(request: Request, answer: msgspec.Struct) -> Response:
    """Encode an answer in the format that the caller prefers.

    Raises:
        HTTPException: 406: the caller accepts neither.
    """
    return packed_answer(answer) if wants_packed(request) else json_answer(answer)


def json_answer(answer: msgspec.Struct) -> Response:
    """Encode an answer as JSON."""
    return Response(msgspec.json.encode(answer), media_type=JSON)


def packed_answer(answer: msgspec.Struct) -> Response:
    """Encode an answer as MessagePack."""
    return Response(msgspec.msgpack.encode(answer), media_type=MSGPACK)


def invalid(message: str, *place: str) -> RequestValidationError:
    """Return the error for a body whose fields contradict one another.

    Args:
        message: The rule; must not repeat the body.
        place: Names that lead to the field.
    """
    return RequestValidationError(
        [{"type": "value_error", "loc": ("body", *place), "msg": message}]
    )


def _with_integers(value: Any) -> Any:
    """Replace whole floats by integers; the parser has bounded the depth."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def _weights(accept: str) -> dict[str, float]:
    """Return the weight of each media range; a malformed one counts as 1."""
    found: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        found[name] = float(quality) if re.fullmatch(r"[01](\.\d{0,3})?", quality) else 1.0
    return found


def _weight(weights: dict[str, float], kind: str) -> float:
    """Return the weight of a media type, from the most specific range that includes it."""
    return next((weights[name] for name in (kind, "application/*", "*/*") if name in weights), 0.0)


def _validation_error(error: Exception) -> dict[str, object]:
    """Return an error in the form that the handler of validation errors expects."""
    text = (
        _REPEATED.sub(r"\1\2", str(error))
        if isinstance(error, msgspec.DecodeError)
        else "the body is not readable"
    )
    placed = _PLACE.match(text)
    message, at = (placed[1], placed[2]) if placed else (text, "")
    is_well_formed = isinstance(error, msgspec.ValidationError)
    return {
        "type": "value_error" if is_well_formed else "json_invalid",
        "loc": ("body", at) if at else ("body",),
        "msg": message,
    }


class BodyTypes:
    """Collects the types of bodies as routes are declared, and generates their OpenAPI schemas."""

    def __init__(self) -> None:
        self.types: list[type] = []

    def route(
        self,
        body: RequestBody[Any] | None = None,
        answer: type | None = None,
        packed: type | None = None,
        failing: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Return the arguments of a route's decorator that describe its bodies.

        Args:
            answer: What it writes as JSON; None: nothing.
            packed: What it writes as MessagePack; None: nothing. An empty answer is not documented
                here.
            failing: As for `failures`.
        """
        options: dict[str, Any] = {
            "response_class": Response,
            "response_model": None,
            "responses": failures(*failing),
        }
        if answer is not None or packed is not None:
            options["responses"] |= {200: {"content": self._contents(answer, packed)}}
        if body is not None:
            content = self._contents(body.plain, body.packed)
            options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
        return options

    def schemas(self) -> dict[str, Any]:
        """Return the schemas of the types and of their fields' types, by name."""
        _, found = msgspec.json.schema_components(self.types, ref_template=_COMPONENT)
        schemas = {name: _cleaned(schema) for name, schema in found.items()}
        for kind in set(_structs(msgspec.inspect.multi_type_info(self.types))):
            _describe(schemas[kind.__name__], kind)
        return schemas

    def _contents(self, plain: type | None, packed: type | None) -> dict[str, Any]:
        by_format = {JSON: plain, MSGPACK: packed}
        chosen = {name: kind for name, kind in by_format.items() if kind is not None}
        self.types += dict.fromkeys(kind for kind in chosen.values() if kind not in self.types)
        return {
            name: {"schema": {"$ref": _COMPONENT.format(name=kind.__name__)}}
            for name, kind in chosen.items()
        }


def _structs(node: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in descriptions of types."""
    if isinstance(node, msgspec.inspect.StructType):
        yield node.cls
    if isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
        node = msgspec.structs.astuple(node)
    if isinstance(node, list | tuple):
        for part in node:
            yield from _structs(part)


def _describe(schema: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Move the texts of fields, inherited ones included, from the description of a struct, where
    msgspec leaves them, to the schemas of the fields.
    """
    docstrings = [inspect.cleandoc(kind.__doc__ or "") for kind in reversed(struct.__mro__)]
    schema["description"] = _SECTION.split(docstrings[-1])[0]
    meanings = dict(found for text in docstrings for found in _ATTRIBUTE.findall(text))
    fields = schema.get("properties", {}) | dict(
        zip(struct.__struct_fields__, schema.get("prefixItems", ()), strict=False)
    )
    for name in fields.keys() & meanings.keys():
        fields[name]["description"] = " ".join(meanings[name].split())


def _cleaned(schema: Any) -> Any:
    """Remove what only Python's regular expressions need, and describe bytes in MessagePack's
    terms.
    """
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("contentEncoding") == "base64":
        return {"type": "string", "format": "binary", "description": schema["description"]}
    cleaned = {name: _cleaned(value) for name, value in schema.items()}
    if isinstance(cleaned.get("pattern"), str):
        cleaned["pattern"] = cleaned["pattern"].removesuffix(NO_LINE_END)
    return cleaned
