"""Bodies in two formats, JSON for people and MessagePack for programs: `Content-Type` says which
it is, `Accept` which is wanted.
"""

from __future__ import annotations

import re
from typing import Any, Final, Generic, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from lmcache_core.lookup.requests import JSON, MSGPACK

FORMATS: Final = (JSON, MSGPACK)

J = TypeVar("J", bound=msgspec.Struct)
P = TypeVar("P", bound=msgspec.Struct)

# msgspec repeats what it was given in this case alone; it may be large, or secret.
_REPEATED: Final = re.compile(r"^(Invalid enum value) .*?( - at `[^`]*`)?$", re.DOTALL)
_PLACE: Final = re.compile(r"^(.*) - at `\$\.?([^`]*)`$", re.DOTALL)


class Body(Generic[J, P]):
    """What a request says.

    Args:
        plain: Its type where it is JSON.
        packed: Its type where it is MessagePack.
    """

    def __init__(self, plain: type[J], packed: type[P]) -> None:
        self.plain = plain
        self.packed = packed
        self._read_plain = msgspec.json.Decoder(plain).decode
        self._read_packed = msgspec.msgpack.Decoder(packed).decode

    async def read(self, request: Request) -> J | P:
        """Read and check a request's body. Fields that a newer client adds are ignored: the two may
        be one version apart.

        Raises:
            HTTPException: 415: it has neither format.
            RequestValidationError: It is not what is asked for; the text does not repeat it.
        """
        kind = _bare(request.headers.get("content-type", ""))
        if kind not in FORMATS:
            raise HTTPException(
                415, f"a body here is {JSON} or {MSGPACK}: say which in Content-Type"
            )
        data = await request.body()
        try:
            return self._read_packed(data) if kind == MSGPACK else self._read_json(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise RequestValidationError([_told(exc)]) from None

    def _read_json(self, data: bytes) -> J:
        """JSON knows one kind of number: 1.0 is an integer too, which is looked at only where
        something is wrong.
        """
        try:
            return self._read_plain(data)
        except msgspec.ValidationError:
            return msgspec.convert(_with_integers(msgspec.json.decode(data)), self.plain)


def wants_packed(request: Request) -> bool:
    """Whether the caller takes MessagePack rather than JSON; with no preference it gets JSON.

    Raises:
        HTTPException: 406: it takes neither.
    """
    accept = request.headers.get("accept")
    if accept is None or accept in ("*/*", MSGPACK):
        return accept == MSGPACK
    weights = _weights(accept)
    plain, packed = (_weight(weights, kind) for kind in FORMATS)
    if plain <= 0 and packed <= 0:
        raise HTTPException(
            406, f"answers here are {JSON} or {MSGPACK}: name one of them in Accept"
        )
    return packed > plain


def answered(request: Request, answer: msgspec.Struct) -> Response:
    """An answer that both formats say alike.

    Raises:
        HTTPException: 406: the caller takes neither.
    """
    return (
        packed_answer(answer)
        if wants_packed(request)
        else Response(msgspec.json.encode(answer), media_type=JSON)
    )


def packed_answer(answer: msgspec.Struct) -> Response:
    """An answer as MessagePack."""
    return Response(msgspec.msgpack.encode(answer), media_type=MSGPACK)


def _with_integers(value: Any) -> Any:
    """The same with integers in the place of floats that are whole; depth is bounded by what
    read it.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def _bare(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _weights(accept: str) -> dict[str, float]:
    """Media ranges and how much each is wanted; a weight that cannot be read counts as 1."""
    found: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        found[name] = float(quality) if re.fullmatch(r"[01](\.\d{0,3})?", quality) else 1.0
    return found


def _weight(weights: dict[str, float], kind: str) -> float:
    """How much a media type is wanted: the most exact range that names it counts."""
    return next((weights[name] for name in (kind, "application/*", "*/*") if name in weights), 0.0)


def _told(error: Exception) -> dict[str, object]:
    """An error as the handler of validation errors wants it."""
    text = (
        _REPEATED.sub(r"\1\2", str(error))
        if isinstance(error, msgspec.DecodeError)
        else "it is not readable"
    )
    placed = _PLACE.match(text)
    message, at = (placed[1], placed[2]) if placed else (text, "")
    is_well_formed = isinstance(error, msgspec.ValidationError)
    return {
        "type": "value_error" if is_well_formed else "json_invalid",
        "loc": ("body", at) if at else ("body",),
        "msg": message,
    }
