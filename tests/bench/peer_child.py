"""An engine or a codec, ours or another project's, driven over stdin and stdout by JSON, one object
a line.

All run the same prompts, copy the same tensors and are timed by the same lines of this file, each
in its own process and environment. So this module imports torch and nothing else at its top.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

DTYPE = torch.bfloat16
VISIBLE_TIMEOUT_S = 120.0
PROMPTS_AT_ONCE = 50
MAX_ERROR = 0.15
"""Of decoded values, relative; the documented quantization alone gives 0.09 on KV of the demo's
model.
"""


@dataclass(frozen=True)
class Shape:
    """Prompts of a Llama-3.1-8B-shaped model by default, 128 KiB a token.

    Attributes:
        is_paged: Whether KV lies in blocks in random order, tokens before heads, or one token
            after the other.
    """

    num_tokens: int = 4096
    is_paged: bool = False
    chunk_size: int = 256
    block_size: int = 16
    num_layers: int = 32
    num_heads: int = 8
    head_size: int = 128
    model: str = "bench/llama-3.1-8b-shape"

    @property
    def hidden(self) -> int:
        """Values of a token in a layer's K or V."""
        return self.num_heads * self.head_size

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Of a chunk."""
        return (self.num_layers, 2, self.chunk_size, self.num_heads, self.head_size)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_size // self.block_size

    @property
    def num_bytes(self) -> int:
        """Of a prompt."""
        return 2 * self.num_layers * self.num_tokens * self.hidden * DTYPE.itemsize

    def as_json(self) -> str:
        """For the child."""
        return json.dumps(asdict(self))


SMALL = Shape(num_tokens=256, chunk_size=16, num_layers=1, num_heads=1, head_size=16)
"""Chunks of 1 KiB, in prompts of 16: what a chunk costs apart from its bytes."""


class KV:
    """A prompt's KV: contiguous `[2, layers, tokens, hidden]`, or paged
    `[layers, 2, blocks, 16, heads, head size]`.

    Args:
        seed: Of random bits, and of the order of blocks; 0: filled with zeros.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        num_blocks = shape.num_tokens // shape.block_size
        pages = (shape.num_layers, 2, num_blocks, shape.block_size, shape.num_heads)
        flat = (2, shape.num_layers, shape.num_tokens)
        size = (*pages, shape.head_size) if shape.is_paged else (*flat, shape.hidden)
        self.tensor = torch.zeros(size, dtype=DTYPE)
        if seed:
            self.tensor.view(torch.uint8).random_(generator=dice)
        self.blocks: list[int] = torch.randperm(num_blocks, generator=dice).tolist()
        self.shape = shape

    def slots(self) -> torch.Tensor:
        """Return where each token is in the blocks, int64."""
        blocks = torch.tensor(self.blocks)[:, None] * self.shape.block_size
        return (blocks + torch.arange(self.shape.block_size)).flatten()

    def require_equal(self, other: KV, what: str = "") -> None:
        """Check every byte of a prompt that has come back."""
        for stored, loaded in zip(self.layers(), other.layers(), strict=True):
            if not torch.equal(stored, loaded):
                raise ValueError(f"other bytes than were stored came back {what}")

    def mark(self, turn: int) -> None:
        """Change one value of each token, so that a prompt of another turn would be detected."""
        self.tensor[0, 0].view(self.shape.num_tokens, -1)[:, 0] = float(turn + 1)

    def layers(self) -> Iterator[torch.Tensor]:
        """Yield the bits of each layer, in the order of tokens."""
        for i in range(self.shape.num_layers):
            layer = self.tensor[i][:, self.blocks] if self.shape.is_paged else self.tensor[:, i]
            yield layer.view(torch.int16)


Arguments = Callable[[KV], dict[str, Any]]
"""Makes the arguments of an engine's calls from KV."""


class Driver:
    """Times the calls of one engine; every call returns seconds.

    Args:
        arguments: See `Arguments`.
        tier: Where a store ends, by its name in `lookup`.
    """

    def __init__(self, engine: Any, arguments: Arguments, tier: str, shape: Shape) -> None:
        self._engine = engine
        self._arguments = arguments
        self._tier = tier
        self._shape = shape
        self._source, self._target = KV(shape, 1), KV(shape, 0)

    def store(self, turn: int) -> float:
        """Store a prompt until the tier has all of it."""
        self._source.mark(turn)
        tokens = self._tokens(turn)
        arguments = self._arguments(self._source)
        if hasattr(self._engine, "make_room"):
            self._engine.make_room()
        began = time.perf_counter()
        self._engine.store(tokens, **arguments)
        while self._engine.lookup(tokens, search_range=[self._tier]) < len(tokens):
            if time.perf_counter() - began > VISIBLE_TIMEOUT_S:
                raise TimeoutError(f"prompt {turn} is not in {self._tier}")
            time.sleep(0.001)
        return time.perf_counter() - began

    def retrieve(self, turn: int) -> float:
        """Load a prompt. Every byte is compared."""
        tokens = self._tokens(turn)
        self._target.tensor.zero_()
        arguments = self._arguments(self._target)
        if hasattr(self._engine, "promise"):
            arguments["promised"] = self._engine.promise(tokens)
        began = time.perf_counter()
        mask = self._engine.retrieve(tokens, **arguments)
        seconds = time.perf_counter() - began
        self._source.mark(turn)
        if int(mask.sum()) != len(tokens):
            raise ValueError(
                f"{int(mask.sum())} of {len(tokens)} tokens of prompt {turn} came back"
            )
        self._source.require_equal(self._target, f"for prompt {turn}")
        return seconds

    def lookup(self, turn: int) -> float:
        """Look a prompt up."""
        tokens = self._tokens(turn)
        began = time.perf_counter()
        num_tokens = self._engine.lookup(tokens, search_range=[self._tier])
        seconds = time.perf_counter() - began
        if num_tokens != len(tokens):
            raise ValueError(f"{num_tokens} of {len(tokens)} tokens of prompt {turn} were found")
        return seconds

    def stores(self, turn: int) -> float:
        """Store many prompts in memory."""
        arguments = self._arguments(self._source)
        prompts = self._prompts(turn)
        began = time.perf_counter()
        for tokens in prompts:
            self._engine.store(tokens, **arguments)
        return time.perf_counter() - began

    def retrieves(self, turn: int) -> float:
        """Load them. All must be there."""
        arguments = self._arguments(self._target)
        prompts = self._prompts(turn)
        began = time.perf_counter()
        num_tokens = sum(int(self._engine.retrieve(t, **arguments).sum()) for t in prompts)
        seconds = time.perf_counter() - began
        if num_tokens != PROMPTS_AT_ONCE * self._shape.num_tokens:
            raise ValueError(f"{num_tokens} tokens of {PROMPTS_AT_ONCE} prompts came back")
        self._source.require_equal(self._target)
        return seconds

    def _prompts(self, turn: int) -> list[torch.Tensor]:
        return [self._tokens(turn * PROMPTS_AT_ONCE + i) for i in range(PROMPTS_AT_ONCE)]

    def _tokens(self, turn: int) -> torch.Tensor:
        return torch.arange(self._shape.num_tokens) + turn * self._shape.num_tokens


Coder = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Encodes and decodes."""


class Codec:
    """Times a coder on one chunk; every call returns the processor seconds of one thread.

    Args:
        make: Makes the coder from the directory of the chunk's model and the chunk.
        model: That directory.
        chunk: File of the chunk, `[2, layers, tokens, hidden]` bf16, as torch saves it.
        calls: Calls a round.
    """

    def __init__(
        self, make: Callable[[str, torch.Tensor], Coder], model: str, chunk: str, calls: int
    ) -> None:
        torch.set_num_threads(1)
        self._kv = torch.load(chunk, weights_only=True)
        self._encode, self._decode = make(model, self._kv)
        self._calls = calls
        self._encoded = self._encode(self._kv)

    def encode(self, turn: int) -> float:
        """Encode."""
        began = time.process_time()
        for _ in range(self._calls):
            self._encoded = self._encode(self._kv)
        return (time.process_time() - began) / self._calls

    def decode(self, turn: int) -> float:
        """Decode. The values must be near those encoded."""
        began = time.process_time()
        for _ in range(self._calls):
            decoded = self._decode(self._encoded)
        seconds = (time.process_time() - began) / self._calls
        error = float((decoded.float() - self._kv.float()).norm() / self._kv.float().norm())
        if not error < MAX_ERROR:
            raise ValueError(f"decoded values are off by {error:.3f}")
        return seconds


def our_arguments(kv: KV) -> dict[str, Any]:
    """Return the arguments of calls of our engine."""
    shape = kv.shape
    if shape.is_paged:
        return {"kvcaches": list(kv.tensor), "slot_mapping": kv.slots()}
    halves = kv.tensor.unflatten(-1, (shape.num_heads, shape.head_size))
    return {"kvcaches": tuple((halves[0, i], halves[1, i]) for i in range(shape.num_layers))}


def our_engine(shape: Shape, options: dict[str, Any]) -> tuple[Any, Arguments]:
    """Return our engine and the arguments of its calls."""
    from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
    from lmcache_core.engine import LMCacheEngineBuilder
    from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector, VLLMPagedMemGPUConnectorV2

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=shape.chunk_size,
        tier_timeout_s=60.0,
        prefill_tokens_per_s=1.0,  # otherwise a slow tier would be declined and not measured
        **options,
    )
    metadata = LMCacheEngineMetadata(shape.model, 1, 0, "vllm", DTYPE, shape.kv_shape)
    connector = VLLMPagedMemGPUConnectorV2 if shape.is_paged else VLLMNestedTupleGPUConnector
    engine = LMCacheEngineBuilder.get_or_create(
        "bench", config, metadata, connector(shape.hidden, shape.num_layers)
    )

    return engine, our_arguments


def our_coder(model: str, kv: torch.Tensor) -> Coder:
    """Return our encoder and decoder."""
    from lmcache_core.serde import create_codec

    from tests.bench.chunk_codec import ChunkScheme

    codec = create_codec("cachegen", 1)
    assert codec is not None
    codec.open()  # as long as the process lives
    scheme, out = ChunkScheme(codec), torch.empty_like(kv)

    def decode(encoded: Any) -> torch.Tensor:
        scheme.decode(scheme.header(encoded), encoded, out)
        return out

    return scheme.encode, decode


def driver_of(kind: str, tier: str, options: dict[str, Any], shape: Shape) -> Any:
    """Return what obeys: methods that take a turn and return JSON.

    Args:
        kind: Of the keys below.
        tier: Where a store ends, by its name in `lookup`.
        options: Of the engine or the codec.
    """
    if kind == "ours-codec":
        return Codec(our_coder, **options)
    if kind == "ours":
        return Driver(*our_engine(shape, options), tier, shape)
    if kind.startswith("vllm-"):
        from tests.bench.peer_vllm import Offloading

        return Offloading(shape, **options)
    from tests.bench import peer_lmcache

    if kind == "lmcache-codec":
        return Codec(peer_lmcache.coder, **options)
    make = {"lmcache": peer_lmcache.engine, "lmcache-mp": peer_lmcache.multiprocess}[kind]
    return Driver(*make(shape, options), tier, shape)


def main() -> None:
    """Answer until stdin ends."""
    kind, tier, options, shape = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine's own output is not an answer
    driver = driver_of(kind, tier, json.loads(options), Shape(**json.loads(shape)))
    print("1", file=answers, flush=True)
    for line in sys.stdin:
        what, turn = line.split()
        print(json.dumps(getattr(driver, what)(int(turn))), file=answers, flush=True)
    if hasattr(driver, "close"):
        driver.close()
    os._exit(0)  # the bench removes files and servers


if __name__ == "__main__":
    main()
