"""Shell scripts that start vLLM: where in them an argument goes.

Only plain words without quotes, spaces or variables are ever put into a script, so that it does not matter whether the place is inside
quotes, and whether what is in them is evaluated once more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Final

MAX_SERVERS: Final = 16
MAX_CALLS: Final = 256
"""Of which the others are in comments."""
_SPACE: Final = r"(?:[ \t]|\\\n)"
_SERVE: Final = re.compile(rf"(?<![\w.-])vllm{_SPACE}+serve(?![\w./=-])")
_MODULE: Final = re.compile(rf"(?<![\w-])-m{_SPACE}+vllm\.entrypoints\.(?:openai\.api_server|cli\.main{_SPACE}+serve)(?![\w./=-])")
_BLANKS: Final = re.compile(rf"{_SPACE}*")
_SUBCOMMAND: Final = "serve"
_ENDS: Final = " \t\r\n;&|()<>"
"""What a shell ends a word at."""
_COMMENT: Final = "#"

# The pieces of a word, by the quotes that the whole of it stands in: strings, $(…), ${…}, escaped and plain characters.
_ESCAPED_STRING: Final = r'\\"(?:[^"\\]|\\[^"])*\\"'
_OTHERS: Final = r"`[^`]*`|\$\{[^{}]*\}|\$\([^()]*\)|\\[^\n]|[^\s\"'\\;&|()<>`$]|\$(?![({])"
_PIECES: Final = {
    "": re.compile(rf'"(?:\$\{{[^{{}}]*\}}|\$\([^()]*\)|[^"\\]|\\.)*"|\'[^\']*\'|{_OTHERS}', re.DOTALL),
    '"': re.compile(rf"{_ESCAPED_STRING}|'[^'\"]*'|{_OTHERS}", re.DOTALL),
    "'": re.compile(rf'"(?:[^"\\\']|\\.)*"|{_OTHERS}', re.DOTALL),
}


def add_to_servers(script: str, words: Iterable[str]) -> str | None:
    """Put words behind every `vllm serve MODEL` and every `-m vllm.entrypoints.openai.api_server` of a script that is not in a comment.

    Args:
        script: What a shell is given to run.
        words: Plain words: letters, digits and `-_=./` alone.

    Returns:
        The script with them, or None where nothing in it starts vLLM's server, or more than `MAX_SERVERS` places seem to, or it is not
        clear where a model's name ends.
    """
    text = "".join(f" {word}" for word in words)
    assert re.fullmatch(r"[\w ./=-]*", text, re.ASCII), "only plain words are safe in any quotes"
    places = _ends_of_servers(script)
    if not 1 <= len(places) <= MAX_SERVERS:
        return None
    pieces, begin = [], 0
    for place in places:
        pieces += [script[begin:place], text]
        begin = place
    return "".join([*pieces, script[begin:]])


def _ends_of_servers(script: str) -> list[int]:
    # One more than is allowed, so that too many are noticed, and not looked into one by one.
    matches = [*itertools.islice(_SERVE.finditer(script), MAX_CALLS + 1), *itertools.islice(_MODULE.finditer(script), MAX_CALLS + 1)]
    if not 1 <= len(matches) <= MAX_CALLS:
        return []
    around = _surroundings(script)
    places = set()
    for match in matches:
        quote = around[match.start()]
        if quote != _COMMENT:
            if not match.group().endswith(_SUBCOMMAND):
                places.add(match.end())
                continue
            blanks = _BLANKS.match(script, match.end())
            assert blanks is not None
            if quote and script[blanks.end() : blanks.end() + 1] == quote:
                continue  # no call but its name, as in `pgrep -f "vllm serve"`, or one whose model comes from elsewhere
            place = _after_model(script, match.end(), blanks.end(), quote)
            if place is None:
                return []
            places.add(place)
    return sorted(places)


def _after_model(script: str, place: int, begin: int, quote: str) -> int | None:
    """Behind the model's name, if that comes next: argparse does not find it behind options. None where its end is not clear."""
    end = begin
    if script[begin : begin + 1] == "-":
        return place
    while piece := _PIECES[quote].match(script, end):
        end = piece.end()
    if script[end : end + 1] not in ("", quote, "\\") and script[end] not in _ENDS:
        return None
    return end if end > begin else place


def _surroundings(script: str) -> list[str]:
    """For each character the quote that it stands in: none, `'`, `"`, or `#` in a comment."""
    around: list[str] = []
    quote = ""
    while len(around) < len(script):
        place = len(around)
        char = script[place]
        if char == "\\" and quote in ("", '"'):
            around += [quote] * min(2, len(script) - place)
            continue
        is_comment = quote == "" and char == _COMMENT and (place == 0 or script[place - 1] in " \t\n;&|(")
        if is_comment:
            end = script.find("\n", place)
            around += [_COMMENT] * ((len(script) if end < 0 else end) - place)
            continue
        around.append(quote)
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
    return around
