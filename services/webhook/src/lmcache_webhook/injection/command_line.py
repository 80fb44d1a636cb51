"""Command lines of containers: whether they start vLLM or SGLang, and what is appended to them.

They are untrusted input, so each function here is linear in its length. Of a shell's scripts only
those are understood that are one plain command; a container that starts vLLM in any other is
declined, unless the script reads further arguments from a variable.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core.integrations.vllm.releases import Release, too_old

from lmcache_webhook.injection.connector_options import Place, find_lmcache
from lmcache_webhook.injection.plan import CONNECTOR, CONTAINER, REPLACE
from lmcache_webhook.injection.pod import Container, DeclinedError, PodSpec
from lmcache_webhook.injection.sglang import LINKER_MODULE, linker_arguments

OPTION: Final = "--kv-transfer-config"
CONNECTOR_MODULE: Final = "lmcache_core.integrations.vllm"
DYNAMO: Final = "dynamo.vllm"
_DYNAMO_IMAGE: Final = "vllm-runtime"
HUGGING_FACE: Final = "huggingfaceserver"
"""KServe's server for models of Hugging Face: module and image have this name. It runs vLLM unless
told to use transformers.
"""
SGLANG: Final = "sglang.launch_server"
MODULES: Final = (
    *("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"),
    *(DYNAMO, HUGGING_FACE, SGLANG),
)
_SGLANG_PROGRAM: Final = "sglang"
PROGRAMS: Final = ("vllm", _SGLANG_PROGRAM)
"""Those whose command `serve` starts a server."""
SCRIPT_VARIABLE: Final = "VLLM_ADDITIONAL_ARGS"
"""From which the scripts of KServe's LLMInferenceService take further arguments of vLLM."""
_COMMENT: Final = re.compile(r"(?<!\S)#.*")
_READ: Final = re.compile(rf"\${SCRIPT_VARIABLE}\b|\${{{SCRIPT_VARIABLE}(:?-)?}}")
"""How a script reads it, without a default that a value would hide."""
_ASSIGNED: Final = re.compile(rf"\b{SCRIPT_VARIABLE}[:+]?=")
_PYTHON: Final = re.compile(r"python[0-9.]*")
RAY_VARIABLE: Final = "KUBERAY_GEN_RAY_START_CMD"
_TAKEN: Final = re.compile(r"--kv[-_](transfer[-_]config|offloading[-_](size|backend))(?!\"?\*)")
"""An option that is given. In a pattern, `*"--kv-transfer-config"*`, a script only looks for it."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=-]+")
_SHELL: Final = re.compile(r"(?:/(?:[a-z]+/)*)?(?:sh|bash|dash|ash)( -[eux]+)* -[eux]*c[eux]*")
"""A shell and its options before a script. With `-l` or `-i` it may first set PYTHONPATH."""
_PLAIN_WORD: Final = re.compile(r"""(?:[A-Za-z0-9_./:=,@%+-]|'[^'$]*+'|"(?:[^"$`\\]|\\["\\])*")+""")
"""A word that means the same to every shell, in which nothing is expanded. Kubernetes expands
`$(NAME)` in quotes, too.
"""
_SPACE: Final = r"(?:[ \t]|\\\n)"
_PLAIN_SCRIPT: Final = re.compile(
    rf"(?P<text>(?:{_SPACE}|\n)*(?:exec{_SPACE}+)?"
    rf"(?P<words>{_PLAIN_WORD.pattern}(?:{_SPACE}+{_PLAIN_WORD.pattern})*))(?:{_SPACE}|\n)*"
)
_CONNECTOR_OF_DYNAMO: Final = "DYN_CONNECTOR"
"""The option `--connector` as a variable."""
_ROLES_OF_DYNAMO: Final = ("--is-prefill-worker", "--is-decode-worker")


def runs_engine(container: Container) -> bool:
    """Return whether a container appears to run vLLM or SGLang, by its command line or image."""
    name = _image_name(container)
    return (
        names_our_connector(container)
        or _starts_server(_line(container))
        or _script(container) is not None
        # The image decides what runs, and is called vllm.
        or (not container.command and ("vllm" in name or name == HUGGING_FACE))
    )


def _image_name(container: Container) -> str:
    return _last_part(container).partition(":")[0]


def _last_part(container: Container) -> str:
    """Return an image's name with its tag, without registry, folders and digest."""
    return (container.image or "").partition("@")[0].rsplit("/", 1)[-1]


def refuse_old_vllm(container: Container, least: Release) -> None:
    """Refuse a vLLM that cannot take the connector, where the image's tag tells its release. Where
    it does not, the connector itself declines when vLLM starts.

    Raises:
        DeclinedError: It is older.
    """
    name, _, tag = _last_part(container).partition(":")
    _, is_named, after = tag.rpartition("vllm")  # rocm6.4_vllm_0.10.1
    if is_named:
        tag = after.lstrip("-_")
    elif "vllm" not in name or name == _DYNAMO_IMAGE or "lmcache" in (container.image or ""):
        return  # the tag is another program's release
    sentence = too_old(tag, least)
    if sentence:
        raise DeclinedError(sentence)


def runs_ray(container: Container) -> bool:
    """Return whether a container runs a Ray node, where Ray Serve may start vLLM."""
    return any(variable.name == RAY_VARIABLE for variable in container.env or ()) or (
        "ray start" in " ".join(_line(container))
    )


def plan_arguments(container: Container, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what to append to a container's `args`, or to its `PlainScript`, so that its engine
    uses the cache.

    Args:
        config: The value of vLLM's `--kv-transfer-config`.

    Returns:
        The words; empty if the container already names our connector, if a script reads them from a
        variable (`plan_script_variable`), or if it does not run vLLM's server itself, as on a Ray
        node.

    Raises:
        DeclinedError: The container has another connector, or starts vLLM in a shell script that is
            not a `PlainScript`.
    """
    if names_our_connector(container):
        return ()
    _refuse_other_connector(container)
    plain = find_plain_script(container)
    line = _line(container) if plain is None else plain.words
    if runs_sglang(container) and (plain is not None or _starts_server(line)):
        return linker_arguments(container, line)
    _refuse_other_engine(container, line)
    if plain is None and not _starts_server(_line(container)):
        script = _script(container)
        if script is not None and not _reads_variable(script):
            modules = [module for module in (DYNAMO, SGLANG) if module in script]
            words = f"python3, -m, {modules[0]}" if modules else "vllm, serve, MODEL"
            raise DeclinedError(
                f"the container {container.name} starts its engine in a shell script that is more"
                f" than this one command: write `command: [{words}, …]`, or put the option of"
                " docs/injection.md into the script"
            )
        if script is not None or container.command:
            return ()
    return (OPTION, json.dumps(config, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class PlainScript:
    """A shell's script that starts vLLM's server and does nothing else: what is appended to it
    becomes arguments of the server.

    Attributes:
        place: The script's, in the container.
        text: The script, up to its last word.
        words: The server's command line.
    """

    place: Place
    text: str
    words: list[str]


def find_plain_script(container: Container) -> PlainScript | None:
    """Return the script if the command line is a shell and one such script; else None."""
    line = _line(container)
    if len(line) < 3 or _SHELL.fullmatch(" ".join(line[:-1])) is None:
        return None
    found = _PLAIN_SCRIPT.fullmatch(line[-1])
    if found is None:
        return None
    words = shlex.split(" ".join(_PLAIN_WORD.findall(found["words"])))
    name = words[0].rpartition("/")[2]
    if "=" in words[0] or not (
        words[1:2] == ["serve"]
        if name in PROGRAMS
        else _PYTHON.fullmatch(name) and _starts_server(words)
    ):
        return None
    member = "args" if container.args else "command"
    return PlainScript((member, len(getattr(container, member)) - 1), found["text"], words)


def plan_script_variable(container: Container, config: Mapping[str, Any]) -> str:
    """Return what to append to `SCRIPT_VARIABLE` of a container whose script passes it to vLLM;
    empty for any other container. The words mean the same to every shell.

    Args:
        container: One for which `plan_arguments` found nothing to append.
        config: The value of `--kv-transfer-config`.

    Raises:
        DeclinedError: A shell might change one of the words, or the variable may have a value that
            the webhook cannot see.
    """
    if names_our_connector(container) or _starts_server(_line(container)):
        return ""
    if not _reads_variable(_script(container) or ""):
        return ""
    if container.envFrom and all(one.name != SCRIPT_VARIABLE for one in container.env or ()):
        raise DeclinedError(
            f"envFrom may bring {SCRIPT_VARIABLE} to the container {container.name}, and a value"
            " set here would hide it: list the variable in env"
        )
    words = words_of(OPTION, config)
    for word in words:
        if "secondary_tiers" in word.partition("=")[0]:
            raise DeclinedError(
                f"the container {container.name} takes its arguments through a script, which"
                f" offloading-tier cannot go through: set {CONNECTOR}: lmcache"
            )
        if not is_plain(word):
            raise DeclinedError(
                f"{word.partition('=')[0]} has a value that cannot go through a script: set it by a"
                " variable LMCACHE_… instead"
            )
    return " ".join(words)


def words_of(option: str, config: Mapping[str, Any]) -> list[str]:
    """Return the words by which vLLM takes an option's members one by one."""
    return list(_dotted(option, config))


def is_plain(word: str) -> bool:
    """Return whether no shell changes a word."""
    return _PLAIN.fullmatch(word) is not None


def _dotted(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for member, inner in value.items():
            yield from _dotted(f"{name}.{member}", inner)
    else:
        yield f"{name}={json.dumps(value) if isinstance(value, bool) else value}"


def names_our_connector(container: Container) -> bool:
    """Return whether the command line, or a variable that may become a part of it, names our
    connector or linker.
    """
    modules = CONNECTOR_MODULE, LINKER_MODULE
    return any(module in text for text in _texts(container) for module in modules)


def runs_sglang(container: Container) -> bool:
    """Return whether a container's command line starts SGLang."""
    text = " ".join(_line(container))
    return f"-m {SGLANG}" in text or f"{_SGLANG_PROGRAM} serve" in text


def _refuse_other_connector(container: Container) -> None:
    script = _script(container)
    for text in _texts(container):
        found = _TAKEN.search(_COMMENT.sub("", text) if text == script else text)
        if found is not None:
            theirs = find_lmcache(container)
            raise DeclinedError(
                f"the container {container.name} is given {found.group()} already, and one vLLM has"
                " one connector: remove that to have it set here"
                + (f', or set {REPLACE}: "true" to have {theirs.name} replaced' if theirs else "")
            )


def _refuse_other_engine(container: Container, line: Sequence[str]) -> None:
    """Refuse wrappers of vLLM that would not run it, or would set a connector themselves."""
    if _value_of(line, "--backend") == "huggingface":
        raise DeclinedError(
            f"the container {container.name} runs transformers, not vLLM: leave out"
            " --backend=huggingface"
        )
    if DYNAMO not in line:
        return
    given = ["--connector"] if _value_of(line, "--connector") not in (None, "none") else []
    given += [
        variable.name
        for variable in container.env or ()
        if variable.name == _CONNECTOR_OF_DYNAMO
        and (variable.valueFrom or (variable.value or "none").lower() != "none")
    ]
    if given:
        raise DeclinedError(
            f"the container {container.name} is given {given[0]}, by which Dynamo sets a connector"
            " of its own: remove it"
        )
    if not set(_ROLES_OF_DYNAMO).isdisjoint(line) or (
        _value_of(line, "--disaggregation-mode") in ("prefill", "decode")
    ):
        raise DeclinedError(
            f"the container {container.name} is a prefill or decode worker of Dynamo, which needs"
            " its own connector: use workers that do both"
        )


def _line(container: Container) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _texts(container: Container) -> list[str]:
    return [*_line(container), *(variable.value or "" for variable in container.env or ())]


def _value_of(line: Sequence[str], option: str) -> str | None:
    for word, following in itertools.pairwise([*line, ""]):
        name, is_whole, value = word.partition("=")
        if name == option:
            return value if is_whole else following
    return None


def _starts_server(line: Sequence[str]) -> bool:
    """Return whether the words start the server, also after `tini --`, `env` and the like."""
    for word, following in itertools.pairwise(line):
        if word.rsplit("/", 1)[-1] in PROGRAMS and following == "serve":
            return True
        if word == "-m" and following in MODULES:
            return True
    return False


def _script(container: Container) -> str | None:
    """Return the word of the command line that is a shell script which starts the server; None if
    there is none.
    """
    for word in _line(container):
        words = word.replace("\\\n", " ").split()
        text = " ".join(words)
        if len(words) > 1 and (
            any(f"{program} serve" in text for program in PROGRAMS)
            or any(f"-m {module}" in text for module in MODULES)
        ):
            return word
    return None


def _reads_variable(script: str) -> bool:
    """Return whether a script passes on `SCRIPT_VARIABLE` as the container has it."""
    code = _COMMENT.sub("", script)
    return _READ.search(code) is not None and _ASSIGNED.search(code) is None


def find_engine(
    spec: PodSpec, name: str | None, config: Mapping[str, Any]
) -> tuple[int, Container]:
    """Return the container that runs vLLM.

    Args:
        name: Name of that container; None: the one that appears to run vLLM.
        config: The value of `--kv-transfer-config`, to be named where it cannot be set.

    Returns:
        Its index among the containers, and the container.

    Raises:
        DeclinedError: There is none, or more than one.
    """
    containers = list(enumerate(spec.containers))
    if name is not None:
        found = [(index, one) for index, one in containers if one.name == name]
        if not found:
            names = ", ".join(one.name for _, one in containers)
            raise DeclinedError(
                f"the pod has no container {name!r}, which {CONTAINER} names: it has {names}"
            )
        return found[0]
    found = [(index, one) for index, one in containers if runs_engine(one)]
    if not found:
        for _, one in containers:
            if runs_ray(one):
                raise DeclinedError(
                    f"the container {one.name} runs Ray, which starts vLLM later: name it in"
                    f" {CONTAINER}, and put into engine_kwargs {engine_kwargs(config)}"
                )
        raise DeclinedError(
            "no container of this pod looks as if it ran vLLM or SGLang: name the one that does in"
            f" {CONTAINER}"
        )
    if len(found) > 1:
        names = " and ".join(one.name for _, one in found)
        raise DeclinedError(
            f"the containers {names} look as if they ran an engine: name one of them in {CONTAINER}"
        )
    return found[0]


def engine_kwargs(config: Mapping[str, Any], events: Mapping[str, Any] | None = None) -> str:
    """Return what a configuration of Ray Serve needs to use the connector, and to publish KV
    events.
    """
    text = f"kv_transfer_config: {json.dumps(config)}"
    return text if events is None else f"{text}, kv_events_config: {json.dumps(events)}"
