"""What the scheduler's side knows about each request, and how its chunks are named."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from lmcache_core.integrations.connector_options import PREFIX
from lmcache_core.integrations.vllm.adapters import Adapters
from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.plan import ChunkRun, Load
from lmcache_core.keys import CHUNK_HASH_BYTES
from lmcache_core.telemetry import IGNORED_WISHES_TOTAL, Counters
from lmcache_core.token_database import MultimodalSpan
from lmcache_core.token_database.hashing import chain_hashes, identity_root, tokens_as_uint32

ROOT_APART = b"lmcache/vllm-root/1"
EMBEDDINGS_APART = b"lmcache/vllm-embeddings/1"

SOURCE = PREFIX + "source"
"""Parameter of a request: who has its KV, an instance's id or host."""
WORKERS = PREFIX + "workers"
"""Parameter of a request: how many workers the engine that has its KV consists of."""
_INSTANCE = re.compile(r"[A-Za-z0-9._:-]{1,253}")

T = TypeVar("T")

Origin = tuple[str, str]
"""The weights that KV was computed with: the epoch, and the name of the adapter ("" without one).
Requests of other origins have other KV of the same tokens.
"""


@dataclass(frozen=True)
class Tail:
    """The blocks of a prompt behind its last whole chunk, as far as they are whole themselves.

    Attributes:
        digest: Its hash, that of a chunk of so many tokens.
    """

    first_token: int
    end: int
    digest: bytes


class ChunkNames:
    """The chain of chunk hashes of one request.

    Args:
        root: Root of the chain, 32 bytes.
        chunk_size: Tokens in a chunk; a shorter remainder has no name.

    Attributes:
        hashes: The hashes of all whole chunks, packed.
    """

    def __init__(self, root: bytes, chunk_size: int, spans: Sequence[MultimodalSpan] = ()) -> None:
        self._root = root
        self._chunk_size = chunk_size
        self._spans = tuple(spans)
        self.hashes = b""
        self.num_chunks = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Name the chunks that these tokens complete.

        Args:
            token_ids: All tokens of the request from the first, those of earlier calls unchanged.
        """
        size = self._chunk_size
        known, self.num_chunks = self.num_chunks, max(self.num_chunks, len(token_ids) // size)
        if self.num_chunks == known:
            return
        # Positions of spans count from the first token of the sequence.
        begin = 0 if self._spans else known * size
        ids = tokens_as_uint32(token_ids[begin : self.num_chunks * size])
        previous = self.hashes[-CHUNK_HASH_BYTES:] or self._root
        chain = chain_hashes(previous, ids, size, self._spans, first=known * size - begin)
        self.hashes += b"".join([digest for _, _, digest in chain])

    def tail_of(self, prompt: Sequence[int], block_size: int) -> Tail | None:
        """Return the tail of a prompt whose whole chunks have been named; None if it has none."""
        size = self._chunk_size
        first = len(prompt) // size * size
        end = len(prompt) // block_size * block_size
        if end <= first:
            return None
        known = self.hashes[: first // size * CHUNK_HASH_BYTES]
        begin = 0 if self._spans else first
        ids = tokens_as_uint32(prompt[begin:end])
        previous = known[-CHUNK_HASH_BYTES:] or self._root
        ((_, _, digest),) = chain_hashes(previous, ids, size, self._spans, first=first - begin)
        return Tail(first, end, digest)


@dataclass(frozen=True)
class Role:
    """What an engine does with the cache, by vLLM's `kv_role`.

    Attributes:
        loads: Not for a producer: vLLM keeps running steps away from blocks that a load writes to
            for consumers only (`defer_block_free` in its scheduler).
        stores_prompts: Not for a consumer.
    """

    loads: bool
    stores_prompts: bool

    @property
    def is_consumer(self) -> bool:
        """Whether another engine computes the prompts."""
        return self.loads and not self.stores_prompts

    @property
    def is_producer(self) -> bool:
        """Whether another engine decodes."""
        return self.stores_prompts and not self.loads


@dataclass(frozen=True)
class Wishes:
    """What a client asks for one request, in vLLM's `kv_transfer_params`.

    Attributes:
        skip_lookup: Load nothing for it.
        skip_save: Store nothing of it.
        hands_over: Another engine decodes it, with what this one stores.
        source: Another engine has computed its prompt, as for `ChunkStore.stage`.
        num_workers: How many workers that engine has; 0: unknown.
    """

    skip_lookup: bool = False
    skip_save: bool = False
    hands_over: bool = False
    source: str | None = None
    num_workers: int = 0

    @classmethod
    def of(cls, request: Any, role: Role, counters: Counters) -> Wishes:
        """Return those of a request; values of another type than expected are counted, and ignored.

        Clients, proxies and routers say who computes the prompt and who decodes in one of these
        ways: not at all, since the engines' roles tell; as vLLM's connectors do
        (`do_remote_decode`, `do_remote_prefill`), with what `handed_over` has returned; as llm-d
        does (`remote_decoder`, `remote_prefiller`, `remote_kv_source`).
        """
        params = getattr(request, "kv_transfer_params", None)

        def read(name: str, kind: type[T], fits: Callable[[T], object] = lambda value: True) -> T:
            value = params.get(name, kind()) if isinstance(params, dict) else kind()
            if isinstance(value, kind) and (not value or fits(value)):
                return value
            counters.add(IGNORED_WISHES_TOTAL)
            return kind()

        source = read(SOURCE, str, _is_instance)
        for name in ("remote_prefiller", "remote_kv_source"):
            told = read(name, dict, lambda at: _is_instance(at.get("remote_host")))
            source = source or told.get("remote_host") or ""
        is_prefilled = role.is_consumer or read("do_remote_prefill", bool)
        hands_over = read("do_remote_decode", bool) or bool(read("remote_decoder", dict))
        return cls(
            skip_lookup=read(PREFIX + "skip_lookup", bool),
            skip_save=read(PREFIX + "skip_save", bool),
            hands_over=role.stores_prompts and (role.is_producer or hands_over),
            source=source if source or is_prefilled else None,
            num_workers=read(WORKERS, int),
        )

    def handed_over(self, instance: str, num_workers: int) -> dict[str, Any] | None:
        """Return the parameters with which the engine that decodes finds what this one stores; None
        if there is none. vLLM adds how much of the prompt it had cached.

        Args:
            instance: `ChunkStore.instance`.
            num_workers: How many workers this engine has.
        """
        if not self.hands_over:
            return None
        source = {SOURCE: instance} if instance else {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            WORKERS: num_workers,
            **source,
        }


def _is_instance(name: object) -> bool:
    """Return whether it is a possible id or host of an instance, or None."""
    return name is None or (isinstance(name, str) and _INSTANCE.fullmatch(name) is not None)


@dataclass(frozen=True)
class Offer:
    """What the chunk store can provide for a request.

    Attributes:
        num_chunks: Chunks, from the first, that are held in memory for all ranks and groups.
        origins: Where each of them was found, as values of `StagedFrom`; the tail's at the end.
        has_tail: Whether the tail is held, too.
    """

    num_chunks: int
    origins: bytes = b""
    has_tail: bool = False


@dataclass
class RequestState:
    """One request, from when vLLM first names it until it has finished.

    Attributes:
        request: vLLM's own object.
        names: Names of its chunks; None while unknown.
        tail: The tail of its prompt, if it is one that engines hand over.
        names_version: Version of the roots and length of the prompt when it was named.
        adapter: Name of its adapter at that time; "" without one.
        tables: Its blocks in each group, as vLLM has assigned them; of recurrent state, once a
            load is planned, only those that vLLM has said to hold the state at their end.
        dropped: For each group, how many blocks from the first vLLM has taken away.
        is_tail_stored: Whether the tail is planned to be stored.
        stored: For each group, how many chunks from the first are planned to be stored or need not
            be.
        num_local: Tokens that vLLM already had when it last asked, or has been given.
        offer: What can be loaded; None while unknown.
        asked_at: When the store was asked for the pending offer. Seconds, monotonic.
        polled_at: When the store was last asked.
        load: `[begin, end)` tokens to load in the next step.
        promised: The load that is underway, as it was planned.
        loaded_end: One past the last token that it can still bring: less if it has failed.
        gave_up: A load failed, or was another connector's: nothing more is loaded for it.
        is_outdated: The weights, or its adapter's, have been replaced since it began: its KV is
            neither loaded nor stored.
        origin: What its KV was computed with; None if it cannot be stored, because something that
            it was computed from is not known to be right (`Provenance`).
        turn: When vLLM last gave it blocks while it waited.
        wishes: What the client asks for it.
    """

    request: Any
    groups: Sequence[CacheGroup]
    chunk_size: int
    names: ChunkNames | None = None
    tail: Tail | None = None
    is_tail_stored: bool = False
    names_version: object = None
    adapter: str = ""
    tables: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    stored: list[int] = field(init=False)
    num_local: int = 0
    offer: Offer | None = None
    asked_at: float | None = None
    polled_at: float = 0.0
    load: tuple[int, int] | None = None
    is_loading: bool = False
    promised: Load | None = None
    loaded_end: int = 0
    gave_up: bool = False
    is_outdated: bool = False
    origin: Origin | None = None
    turn: int = 0
    wishes: Wishes = Wishes()

    def __post_init__(self) -> None:
        self.stored = [0] * len(self.groups)

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def may_load(self) -> bool:
        """Whether KV may be loaded for it: not after a failed load, nor if the client or vLLM needs
        every token computed (prompt logprobs).
        """
        is_unwanted = self.gave_up or self.wishes.skip_lookup
        return not (is_unwanted or getattr(self.request, "skip_reading_prefix_cache", False))

    @property
    def hands_over_tail(self) -> bool:
        """Whether one engine stores the tail of its prompt for another one: not of windows, whose
        blocks vLLM takes away, nor of recurrent state, which there is at few tokens.
        """
        if not self.wishes.hands_over and self.wishes.source is None:
            return False
        is_whole = all(group.window is None for group in self.groups)
        return is_whole and not getattr(self.request, "resumable", False)

    def forget_offer(self) -> None:
        """Drop an offer that has been used or is out of date."""
        self.offer, self.asked_at = None, None

    def set_blocks(self, block_ids: Sequence[Sequence[int]], has_states: bool = False) -> None:
        """Set the whole block tables, indexed by vLLM's group numbers; those of recurrent state,
        whose blocks vLLM moves, only if they are as they will be loaded (`has_states`).
        """
        self.tables = [
            list(block_ids[group.index]) if has_states or not group.is_state else []
            for group in self.groups
        ]
        self.dropped = [0] * len(self.groups)

    def add_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Append to the block tables, except those of recurrent state."""
        for table, group in zip(self.tables, self.groups, strict=True):
            if not group.is_state:
                table.extend(block_ids[group.index])

    def add_state(self, group: CacheGroup, block_id: int, num_tokens: int) -> None:
        """Record the block that holds a group's state after `num_tokens`, unless that is inside a
        block.
        """
        place = num_tokens // group.block_size - 1
        if (
            self.tables
            and num_tokens % group.block_size == 0
            and place >= self.dropped[group.number]
        ):
            table = self.tables[group.number]
            table.extend([NULL_BLOCK] * (place + 1 - len(table)))
            table[place] = block_id

    def drop_blocks(self, num_computed: int) -> bool:
        """Forget blocks that vLLM has taken away because no window reaches them any more, and
        return whether there are any; without tables, do nothing.
        """
        has_dropped = False
        for table, group in zip(self.tables, self.groups, strict=False):
            end = min(group.first_needed_token(num_computed) // group.block_size, len(table))
            begin = self.dropped[group.number]
            if begin < end:
                has_dropped |= any(block != NULL_BLOCK for block in table[begin:end])
                table[begin:end] = [NULL_BLOCK] * (end - begin)
                self.dropped[group.number] = end
        return has_dropped

    def complete_runs(self, num_tokens: int) -> list[ChunkRun]:
        """Return the chunks that are complete once `num_tokens` are computed and are not stored
        yet; from now on they count as stored.
        """
        assert self.names is not None
        num_chunks = min(num_tokens // self.chunk_size, self.names.num_chunks)
        runs = []
        for group, table in zip(self.groups, self.tables, strict=True):
            first = self.stored[group.number]
            self.stored[group.number] = max(first, num_chunks)
            per_chunk = self.chunk_size // group.block_size

            def is_whole(
                chunk: int, table: Sequence[int] = table, per_chunk: int = per_chunk
            ) -> bool:
                blocks = table[chunk * per_chunk : (chunk + 1) * per_chunk]
                return len(blocks) == per_chunk and NULL_BLOCK not in blocks

            chunks = range(first, num_chunks)
            for has_all, together in itertools.groupby(chunks, is_whole):
                whole = list(together)
                if has_all:
                    runs.append(self._run(group, table, whole[0], whole[-1] + 1))
        return runs

    def load_runs(self, begin: int, end: int) -> list[ChunkRun]:
        """Return the chunks that tokens `[begin, end)` come from; in a windowed group only those
        that the next token attends to.
        """
        runs = []
        tails = []
        if self.tail is not None and end > self.tail.first_token:
            tails, end = self.tail_runs(), self.tail.first_token
        for group, table in zip(self.groups, self.tables, strict=True):
            first = max(begin, group.first_needed_token(end)) // self.chunk_size
            last = -(-end // self.chunk_size)
            if first < last:
                runs.append(self._run(group, table, first, last))
        return runs + tails

    def tail_runs(self) -> list[ChunkRun]:
        """Return the tail, in each group that has all of its blocks."""
        assert self.tail is not None
        first, end, digest = self.tail.first_token, self.tail.end, self.tail.digest
        runs = []
        for group, table in zip(self.groups, self.tables, strict=True):
            blocks = tuple(table[first // group.block_size : end // group.block_size])
            if len(blocks) * group.block_size == end - first and NULL_BLOCK not in blocks:
                place = first // self.chunk_size
                runs.append(ChunkRun(group.number, place, digest, blocks, is_tail=True))
        return runs

    def _run(self, group: CacheGroup, table: Sequence[int], first: int, last: int) -> ChunkRun:
        """Return chunks `[first, last)` with their blocks."""
        assert self.names is not None
        hashes = self.names.hashes[first * CHUNK_HASH_BYTES : last * CHUNK_HASH_BYTES]
        begin, end = (chunk * self.chunk_size // group.block_size for chunk in (first, last))
        blocks = tuple(table[begin:end])
        missing = (NULL_BLOCK,) * (end - begin - len(blocks))
        return ChunkRun(group.number, first, hashes, blocks + missing)


class RequestNamer:
    """Names the chunks of requests: by tokens, contents and adapter, by the tenant's salt and the
    request's own.

    Attributes:
        on_named: Called with a request that has more names, all of them, and how many it had.
    """

    def __init__(self, identity: KVIdentity, chunk_size: int) -> None:
        self._identity = identity
        self._chunk_size = chunk_size
        self.on_named: Callable[[Any, bytes, int], None] | None = None
        self._salt: str | None = None
        self._epoch = ""
        self.adapters = Adapters(identity.adapters)

    def use_salt(self, salt: str) -> None:
        """Set the tenant's salt; nothing can be named before."""
        self._salt = salt

    def begin_epoch(self) -> None:
        """Change all names from now on, so that nothing named before is found: the model computes
        other KV (its weights have been replaced).
        """
        self._epoch = secrets.token_hex(16)

    def name(self, state: RequestState) -> ChunkNames | None:
        """Return the names of a request's chunks, as far as its tokens are known; None if they
        cannot be named (yet).

        If the salt or epoch has changed, nothing of the request counts as stored. The same holds if
        its prompt has grown: a session that continues has dropped the last generated token, and may
        have new contents.
        """
        request = state.request
        lora = getattr(request, "lora_request", None)
        if state.names is not None and not self.adapters.is_loaded(lora, state.adapter):
            state.is_outdated = True
        if state.is_outdated:
            return None
        version = self._salt, self._epoch, request.num_prompt_tokens
        names = state.names if state.names_version == version else None
        is_new = names is None
        if names is None:
            root, spans = self.root_of(request), spans_of(request, self._identity.contents)
            if getattr(request, "prompt_embeds", None) is not None:
                spans = spans_of_embeddings(request, self._chunk_size) if spans == [] else None
            if root is None or spans is None:
                return None
            names = state.names = ChunkNames(root, self._chunk_size, spans)
            state.names_version = version
            state.adapter = self.adapters.name_of(lora) or ""
            state.stored = [0] * len(state.stored)
            state.tail, state.is_tail_stored = None, False
        token_ids = request.all_token_ids
        if getattr(request, "resumable", False):  # it may lose generated tokens
            token_ids = token_ids[: request.num_prompt_tokens]
        known = names.num_chunks
        names.extend(token_ids)
        if is_new and state.hands_over_tail:
            prompt = token_ids[: request.num_prompt_tokens]
            state.tail = names.tail_of(prompt, max(one.block_size for one in state.groups))
        if self.on_named is not None and names.num_chunks > known:
            self.on_named(request, names.hashes, known)
        return names

    def origin_of(self, state: RequestState) -> Origin | None:
        """Return what the model would compute a request with now; None if that is unknown, or not
        what it is named by. Unlike names, it needs no salt.
        """
        lora = getattr(state.request, "lora_request", None)
        adapter = self.adapters.name_of(lora) if state.names is None else state.adapter
        if state.is_outdated or adapter is None or not self.adapters.is_loaded(lora, adapter):
            return None
        return self._epoch, adapter

    def is_current(self, state: RequestState) -> bool:
        """Return whether a running request is still computed with what it began with."""
        if state.origin is None or state.is_outdated:
            return False
        lora = getattr(state.request, "lora_request", None)
        return self.adapters.is_loaded(lora, state.origin[1])

    def check(self, state: RequestState) -> bool:
        """Return whether the KV that the request computes now still matches its names; slower than
        `name`.
        """
        lora = getattr(state.request, "lora_request", None)
        state.is_outdated |= not self.adapters.is_unchanged(lora)
        return not state.is_outdated

    def root_of(self, request: Any) -> bytes | None:
        """Return the root of the names of a vLLM request's chunks; None while the tenant's salt or
        its adapter's weights are unknown.
        """
        salt, adapter = self._salt, self.adapters.name_of(getattr(request, "lora_request", None))
        if salt is None or adapter is None:
            return None
        root = identity_root(replace(self._identity.metadata, adapter=adapter), salt)
        cache_salt = getattr(request, "cache_salt", None) or ""
        if not cache_salt and not self._epoch:
            return root
        # The length before each field makes the encoding unambiguous (`docs/protocols.md`,
        # "Identity").
        digest, text = hashlib.sha256(), cache_salt.encode("utf-8", "surrogatepass")
        for part in (ROOT_APART, root, text, self._epoch.encode("ascii")):
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()


def spans_of(request: Any, contents: str | None = "") -> list[MultimodalSpan] | None:
    """Return the multimodal contents of a vLLM request; None if one of them has no name, so that
    the request cannot be cached.

    Args:
        contents: `KVIdentity.contents`.
    """
    spans = []
    for feature in getattr(request, "mm_features", None) or ():
        identifier, position = feature.identifier, feature.mm_position
        if contents is None or not identifier:
            return None
        spans.append(
            MultimodalSpan(f"{contents}{identifier}".encode(), position.offset, position.length)
        )
    return spans


def spans_of_embeddings(request: Any, chunk_size: int) -> list[MultimodalSpan]:
    """Return the prompt embeddings of a vLLM request, each chunk's as one content. Its tokens may
    have embeddings and ids in turn (`prompt_is_token_ids`).
    """
    embeds = request.prompt_embeds.contiguous()
    are_ids = getattr(request, "prompt_is_token_ids", None) or [False] * len(embeds)
    spans = []
    for begin in range(0, len(embeds), chunk_size):
        part = embeds[begin : begin + chunk_size]
        digest = hashlib.sha256(EMBEDDINGS_APART)
        digest.update(f"{part.dtype};{list(part.shape)};".encode())
        digest.update(bytes(are_ids[begin : begin + chunk_size]))
        digest.update(part.cpu().reshape(-1).view(torch.uint8).numpy())
        spans.append(MultimodalSpan(digest.digest(), begin, len(part)))
    return spans
