"""Notices when a model changes, and names its KV by what it has become."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import torch
import xxhash
from transformers import PreTrainedModel

from lmcache_core.integrations.transformers.measured import (
    MeasuredKV,
    Unsupported,
    measured_kv,
    measured_shape,
)
from lmcache_core.memory.views import bytes_under

MAX_REMEMBERED: Final = 64
"""States of a model whose names are kept: adapters that are switched to and fro."""
_SAMPLED_TENSORS: Final = 64
_SUPPORTED: Final = (
    "only causal language models in eval mode, with full attention on every layer, the same KV"
    " heads on each and their KV on one device, can be"
)
_NOT_OF_THE_KV: Final = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "use_cache", "return_dict"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
        *("output_attentions", "output_hidden_states", "task_specific_params", "problem_type"),
    }
)
"""Options of a model that do not affect its KV; all others are part of the identity."""
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
_NOT_OF_THE_STATE: Final = frozenset(
    {"_is_hf_initialized", "all_tied_weights_keys", "gradient_checkpointing", "name_or_path"}
)
"""Attributes of modules that do not affect its KV; all others are part of the identity."""
_MAX_ERROR_CHARACTERS: Final = 200
_PLAIN: Final = (bool, int, float, str)
_ADAPTER_NAMES: Final = frozenset({"active_adapter", "_active_adapter"})
"""What peft keeps a name in, or a list of one, which is the same."""
_HARMLESS_HOOKS: Final = ("transformers.utils.output_capturing", "accelerate.hooks")

_Named = tuple[str, torch.Tensor, bool]
"""A tensor of a model, its path, and whether it is among the weights."""
K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")


class ModelMark(NamedTuple):
    """Differs if a model has changed, as far as that leaves a trace. Cheap: no weights are read.

    Attributes:
        state: Of the modules' classes and attributes, the configuration, the active adapters.
        tensors: Of where weights and buffers lie, how often they were written, and a few of their
            elements.
    """

    state: str
    tensors: str


@dataclass(frozen=True)
class KnownModel:
    """A model as it was looked at.

    Attributes:
        mark: What it was recognized by.
        revision: Names its weights, its options and its state.
    """

    mark: ModelMark
    revision: str
    kv: MeasuredKV


class WatchedModel:
    """A model, looked at again whenever it has changed. Thread-safe.

    Args:
        model: The model; not changed.
        name: Name for errors.
        revision: Revision of the weights as they are now; None: their fingerprint, which reads all
            of them once. Once they change, it is their fingerprint.
    """

    def __init__(self, model: PreTrainedModel, name: str, revision: str | None = None) -> None:
        self._model: PreTrainedModel = getattr(model, "_orig_mod", model)  # under torch.compile
        self._name = name
        self._lock = threading.Lock()
        self._num_changes = 0
        self._seen: OrderedDict[ModelMark, KnownModel | str] = OrderedDict()
        self._weights: OrderedDict[str, str] = OrderedDict()
        self._revision = revision

    def known(self) -> KnownModel:
        """Return what the model is now.

        Raises:
            ValueError: Its KV cannot be cached; the message says why, and what could be.
        """
        with self._lock:
            mark = self._mark()
            found = self._seen.get(mark)
            if found is None:
                try:
                    found = self._looked_at()
                    mark = found.mark
                except ValueError as exc:
                    found = str(exc)
                _remember(self._seen, mark, found)
            self._seen.move_to_end(mark)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def shape(self) -> MeasuredKV:
        """Return what KV the model keeps, from one run, without judging it.

        Raises:
            ValueError: None that can be cached.
        """
        return self._checked("running it on a few tokens failed", measured_shape)

    def is_still(self, known: KnownModel) -> bool:
        """Return whether the model is what it was, as far as changes leave a mark."""
        try:
            return self._mark() == known.mark
        except ValueError:
            return False

    def forget(self) -> None:
        """Look at the model again, whatever its mark: weights may have changed without one."""
        with self._lock:
            self._num_changes += 1

    def _looked_at(self) -> KnownModel:
        first, self._revision = self._revision, None
        kv = self._checked("running it on a few tokens failed", measured_kv)
        mark = self._mark()
        weights = first or self._weights.get(mark.tensors)
        if weights is None:
            weights = self._checked("reading its weights failed", weights_fingerprint)
        _remember(self._weights, mark.tensors, weights)
        options = options_fingerprint(self._model)
        state = self._checked("reading its buffers failed", state_fingerprint)
        self._checked("running it again failed", measured_shape)
        if self._mark() != mark:
            raise self._refused("running it changes it")
        return KnownModel(mark, f"{weights};{options};{state}", kv)

    def _mark(self) -> ModelMark:
        """Raises ValueError if no mark would tell the model's changes."""
        state, tensors = self._checked("looking at it failed", _described)
        state.append(options_fingerprint(self._model))
        traces = [(id(one), one.data_ptr(), _version(one), one.dtype) for _, one, _ in tensors]
        digest = xxhash.xxh3_128(repr((self._num_changes, traces)).encode())
        digest.update(self._checked("reading its weights failed", lambda _: _sample(tensors)))
        return ModelMark(xxhash.xxh3_128_hexdigest(repr(state).encode()), digest.hexdigest())

    def _checked(self, what: str, look: Callable[[PreTrainedModel], T]) -> T:
        """Return what a function finds out about the model.

        Raises:
            ValueError: It raised any error: the model's own code runs in it.
        """
        try:
            return look(self._model)
        except Unsupported as exc:
            raise self._refused(str(exc)) from None
        except Exception as exc:
            line = next(iter(str(exc).splitlines()), "")[:_MAX_ERROR_CHARACTERS]
            raise self._refused(f"{what}: {type(exc).__name__}: {line}") from exc

    def _refused(self, found: str) -> ValueError:
        return ValueError(
            f"model {self._name!r} ({type(self._model).__name__}) cannot be cached: {found};"
            f" {_SUPPORTED}"
        )


def reason_against_state(model: PreTrainedModel) -> str | None:
    """Return why nothing tells what a model computes; None if its state does."""
    try:
        _described(model)
    except Unsupported as exc:
        return str(exc)
    return None


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return text that differs if any weight differs: the revision of a model without one. Reads
    all weights once.

    Raises:
        ValueError: They are in a form that cannot be read.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            raise Unsupported(f"{name} is {type(tensor).__name__}, not a tensor that can be read")
        _update(digest, name, tensor)
    return f"weights-{digest.hexdigest()}"


def options_fingerprint(model: PreTrainedModel) -> str:
    """Return text that differs if the same weights would give other KV: position encoding,
    activation, attention, norm.
    """
    options = {
        name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_KV
    }
    options["attention"] = getattr(model.config, "_attn_implementation", None)
    text_config = model.config.get_text_config(decoder=True)
    if text_config is not model.config:
        options["text_attention"] = getattr(text_config, "_attn_implementation", None)
    text = json.dumps(options, sort_keys=True, default=str)
    return f"options-{xxhash.xxh3_128_hexdigest(text.encode())}"


def state_fingerprint(model: PreTrainedModel) -> str:
    """Return text that differs if weights and options alike would still give other KV: another
    adapter is active, a layer was replaced, a frequency of the rotation was changed or rounded.

    Raises:
        ValueError: Nothing tells what the model computes.
    """
    state, tensors = _described(model)
    digest = xxhash.xxh3_128(repr(state).encode())
    for name, tensor, is_weight in tensors:
        if not is_weight:
            _update(digest, name, tensor)
    return f"state-{digest.hexdigest()}"


def _described(model: PreTrainedModel) -> tuple[list[object], list[_Named]]:
    """Return what a model is apart from its configuration and the elements of its tensors, the same
    in each process; and its tensors.

    Raises:
        Unsupported: What it computes cannot be told, or is noise.
    """
    globally = torch.nn.modules.module
    hooks = [*globally._global_forward_hooks.values(), *globally._global_forward_pre_hooks.values()]
    _check_hooks("every module", hooks)
    state: list[object] = []
    tensors: list[_Named] = []
    for path, module in model.named_modules():
        where = path or "the model"
        if module.training:
            raise Unsupported(f"{where} is in train mode, call model.eval()")
        _check_hooks(where, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()])
        own = vars(module)
        for name in _ADAPTER_NAMES & own.keys():
            if isinstance(own[name], str):
                own = own | {name: [own[name]]}
        if "forward" in own and getattr(own["forward"], "__closure__", True):
            _check_hooks(where, [getattr(own["forward"], "func", own["forward"])])
        state.append((path, type(module).__module__, type(module).__qualname__))
        forward = type(module).forward
        state.append((forward.__module__, forward.__qualname__))
        tensors += [
            (f"{path}.{k}", v, True) for k, v in module._parameters.items() if v is not None
        ]
        passing = module._non_persistent_buffers_set
        tensors += [
            (f"{path}.{k}", v, k not in passing)
            for k, v in module._buffers.items()
            if v is not None
        ]
        is_whole = isinstance(module, PreTrainedModel)  # has plans and notes of its loading
        state.append(
            [
                (k, v if v is None or type(v) in _PLAIN else _plain(v, f"{path}.{k}", tensors))
                for k, v in own.items()
                if k not in _OF_EVERY_MODULE
                and k not in _NOT_OF_THE_STATE
                and not (is_whole and k.startswith("_"))
            ]
        )
    for path, tensor, _ in tensors:
        if tensor.is_meta:
            raise Unsupported(
                f"{path} is not in memory (meta device: offloaded, or not loaded yet)"
            )
    state += [
        (kind, str(torch.get_autocast_dtype(kind)))
        for kind in sorted({one.device.type for _, one, _ in tensors})
        if torch.is_autocast_enabled(kind)
    ]
    return state, tensors


def _plain(value: object, path: str, tensors: list[_Named]) -> object:
    """Return an attribute in a form whose `repr` says what it is, the same in each process."""
    if isinstance(value, torch.Tensor):
        tensors.append((path, value, False))
        return "tensor"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, path, tensors) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_plain(one, path, tensors)) for one in value)
    if isinstance(value, dict):
        return sorted((repr(k), repr(_plain(v, f"{path}.{k}", tensors))) for k, v in value.items())
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _check_hooks(where: str, hooks: Iterable[object]) -> None:
    """Refuse hooks that may change outputs without leaving a trace in weights or settings."""
    for hook in hooks:
        source = str(getattr(hook, "__module__", type(hook).__module__))
        if not source.startswith(_HARMLESS_HOOKS):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise Unsupported(
                f"{where} has a hook, {source}.{name}, that may change what it computes"
            )


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written; -1 for one made in inference mode, which does not
    count that.
    """
    return -1 if tensor.is_inference() else tensor._version


def _sample(tensors: Sequence[_Named]) -> bytes:
    """Return a few elements from all over a model: what `.data` is written to leaves no other
    trace.
    """
    step = 0.6180339887  # spreads over layers that are alike
    picked = {int(i * step % 1 * len(tensors)) for i in range(_SAMPLED_TENSORS)}
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for i in sorted(picked):
        tensor = tensors[i][1]
        if tensor.numel():
            for where in (
                [size // 2 for size in tensor.shape],
                [size - 1 for size in tensor.shape],
            ):
                group = groups.setdefault((tensor.dtype, tensor.device), [])
                group.append(tensor.detach()[tuple(where)])
    return b"".join(bytes(bytes_under(torch.stack(one).cpu())) for one in groups.values())


def _update(digest: xxhash.xxh3_128, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name};{tensor.dtype};{tuple(tensor.shape)};".encode())
    digest.update(bytes_under(tensor.detach().cpu().contiguous()))


def _remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
