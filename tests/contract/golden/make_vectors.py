"""Writes the golden vectors next to itself, once. They are never regenerated to make a test pass:
another result is another version.

`python -m tests.contract.golden.make_vectors [--force]`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import Extension, RecordHeader, TensorSpec, encode_head, payload_digest
from lmcache_core.token_database import MultimodalSpan, chain_hashes, identity_root
from lmcache_core.token_database.hashing import tokens_as_uint32
from lmcache_core.wire import messages
from lmcache_core.wire.messages import build_frame

DIRECTORY = Path(__file__).parent

LLAMA = {
    "model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "world_size": 2,
    "worker_id": 1,
    "fmt": "vllm",
    "kv_dtype": "bfloat16",
    "kv_shape": [32, 2, 256, 8, 128],
    "revision": "0e9e39f2",
    "adapter": "",
    "layout": "",
}


def chain(
    name: str,
    tokens: list[int],
    salt: str = "",
    spans: Sequence[list[Any]] = (),
    chunk_size: int = 4,
    **metadata: Any,
) -> dict[str, Any]:
    """A prompt to name, of LLAMA unless `metadata` says otherwise."""
    return {
        "name": name,
        "metadata": LLAMA | metadata,
        "salt": salt,
        "chunk_size": chunk_size,
        "tokens": tokens,
        "spans": list(spans),
    }


CHAINS = [
    chain("one whole chunk", [1, 2, 3, 4]),
    chain("chunks and a partial one", list(range(10))),
    chain("the largest token ids", [0, 4294967295, 128255], chunk_size=2),
    chain(
        "adapter, revision, layout and salt",
        [7, 7, 7, 7, 7],
        "tenant pepper ☃",
        adapter="billing-lora@v3",
        revision="main",
        layout="HND",
        worker_id=0,
    ),
    chain(
        "latent attention, one side",
        [5, 6, 7, 8],
        model_name="deepseek-ai/DeepSeek-V3",
        kv_dtype="float8_e4m3fn",
        kv_shape=[61, 1, 256, 1, 576],
    ),
    chain(
        "images across chunks, one twice",
        [9, 151655, 151655, 151655, 151655, 151655, 3, 151655, 4, 5, 6, 7, 8],
        spans=[["a1" * 32, 1, 5], ["b2" * 32, 7, 1], ["a1" * 32, 7, 1]],
        model_name="Qwen/Qwen2.5-VL-7B-Instruct",
    ),
]
KEYS: list[Any] = [
    ["vllm", "meta-llama/Llama-3.1-8B-Instruct", 2, 1, "3f" * 32, ""],
    ["huggingface", "a@b%c model, ü 模型", 1, 0, "00" * 32, ""],
    ["vllm", "google/gemma-3-27b-it", 4294967295, 4294967294, "ab" * 32, "sliding_window.512"],
    ["", "", 0, 0, "", ""],
]
TINY = ["vllm", "tiny", 1, 0, "c4" * 32]
RECORDS: list[dict[str, Any]] = [
    {"name": "plain", "key": [*TINY, ""], "tensors": [["", "bfloat16", [2, 1, 4, 8], 0, 128]]},
    {
        "name": "hybrid: groups of different shapes",
        "key": [*TINY, "hybrid"],
        "tensors": [
            ["full", "bfloat16", [2, 2, 4, 4], 0, 128],
            ["sliding", "bfloat16", [2, 1, 2, 4], 128, 32],
            ["state", "float32", [3, 5], 160, 60],
        ],
    },
    {
        "name": "latent attention: one tensor",
        "key": [*TINY, "mla"],
        "tensors": [["mla", "float8_e4m3fn", [1, 4, 36], 0, 144]],
    },
    {
        "name": "opaque block",
        "key": [*TINY, "opaque"],
        "tensors": [["opaque", "uint8", [77], 0, 77]],
    },
    {
        "name": "compressed, with an extension to ignore",
        "key": [*TINY, ""],
        "serde": "cachegen",
        "profile": "8bit/1",
        "lossy": True,
        "tensors": [["", "bfloat16", [2, 4, 8, 16], 0, 201]],
        "extensions": [[4096, False, "00ff10"], [7, False, ""]],
    },
    {"name": "empty payload", "key": [*TINY, ""], "tensors": []},
    {
        "name": "head of two units",
        "key": ["vllm", "m" * 900, 1, 0, "c4" * 32, ""],
        "tensors": [["", "uint8", [1], 0, 1]],
    },
]
FRAMES: list[dict[str, Any]] = [
    {"id": 1, "message": ["Hello", 1, 1, [], None, "pod-7", None]},
    {"id": 1, "message": ["Hello", 1, 3, ["zstd"], "a bearer token", "", None]},
    {"id": 1, "message": ["HelloOk", 1, "lmcache", 128, None]},
    {"id": 2, "message": ["Contains", [[0, {"hex": "c4" * 64}], [None, {"hex": "6b32"}]]]},
    {"id": 2, "message": ["ContainsOk", [True, False]]},
    {"id": 3, "message": ["Get", [[255, {"hex": "c4" * 32}]], True, None]},
    {"id": 18446744073709551615, "message": ["Get", [], False, "v1.payload.code"]},
    {"id": 3, "message": ["ChunkHead", 127], "blob": "000102"},
    {"id": 3, "message": ["GetEnd", [[0, "never_stored"], [2, "evicted"]]]},
    {"id": 4, "message": ["Put"], "blob": "ff" * 40},
    {"id": 4, "message": ["PutOk", True, ""]},
    {"id": 4, "message": ["PutOk", False, "no_memory"]},
    {"id": 5, "message": ["Remove", [[1, {"hex": "c4" * 32}]]]},
    {"id": 5, "message": ["RemoveOk", 1]},
    {"id": 6, "message": ["Ping"]},
    {"id": 6, "message": ["Pong"]},
    {"id": 0, "message": ["ErrorMessage", "protocol", "not a frame"]},
    {"id": 7, "message": ["HandoverChunk", "acme", 86400123, True], "blob": "00ff10"},
    {
        "id": 8,
        "message": ["Context", "r-1", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
    },
    {"id": 9, "message": ["Held", "acme", [[0, {"hex": "c4" * 32}]]]},
    {"id": 0, "message": ["DeclareLane", 0, ["vllm", "org/model", 2, 1, "window"]]},
    {
        "id": 1,
        "message": ["Hello", 1, 1, ["on_device"], None, "e", ["e", 7, 1, "org/model", "layout", 2]],
    },
    {
        "id": 1,
        "message": [
            *("HelloOk", 1, "pod-7", 4096),
            ["/dev/shm/arena", 1 << 30, 3, "always", "salt"],
        ],
    },
    {"id": 2, "message": ["ReserveExtents", [512, 1], [[0, {"hex": "c4" * 64}]]]},
    {"id": 2, "message": ["Extents", [[1, 4096, 512, "", {"hex": ""}], "no_memory"]]},
    {"id": 3, "message": ["Commit", [[1, {"hex": "4c4d4b56"}]]]},
    {"id": 4, "message": ["LoadExtents", [[0, {"hex": "c4" * 32}]], 1000, 5000]},
    {"id": 4, "message": ["Extents", [[2, 4096, 512, "Hot", {"hex": "4c4d4b56"}]]]},
    {"id": 5, "message": ["Stage", "t", [[0, {"hex": "c4" * 64}]], True, 1000, 5000]},
    {"id": 5, "message": ["Promise", False, [{"hex": "0100"}]]},
    {"id": 6, "message": ["DoneWith", [1, 2], ["t"]]},
    {"id": 6, "message": ["Ok"]},
    {"id": 7, "message": ["Reject", [2]]},
    {"id": 8, "message": ["Describe", "vllm", "m", 2, 256, {"hex": "c4" * 32}, ["", "window"]]},
    {"id": 9, "message": ["Lookup", [[0, {"hex": "c4" * 32}]], ["Hot"], 1000]},
    {"id": 10, "message": ["Stats"]},
    {"id": 10, "message": ["StatsOk", {"Hot": {"num_chunks": 1}}]},
    {"id": 11, "message": ["Prefetch", [[0, {"hex": "c4" * 32}]]]},
    {"id": 12, "message": ["Watch", 77, 5]},
    {"id": 12, "message": ["Changes", 77, 6, True, {"hex": "c4" * 32}]},
    {"id": 13, "message": ["Expect", "t", [[0, {"hex": "c4" * 64}]], True, 1000, 5000, "pod-7"]},
    {"id": 14, "message": ["Lend", [[0, {"hex": "c4" * 64}]], "v1.payload.code"]},
    {
        "id": 14,
        "message": ["Lent", {"hex": "00ff10"}, [[3, 1 << 40, {"hex": "4c4d4b56"}], "", "evicted"]],
    },
    {"id": 15, "message": ["GiveBack", [3, 4]]},
]


def payload_of(num_bytes: int) -> bytes:
    """The payload of every record vector: 0, 1, 2 … modulo 251."""
    return bytes(i % 251 for i in range(num_bytes))


def identity() -> dict[str, Any]:
    """Roots, chain hashes and keys."""
    chains = []
    for case in CHAINS:
        metadata = LMCacheEngineMetadata(
            **{**case["metadata"], "kv_shape": tuple(case["metadata"]["kv_shape"])}
        )
        root = identity_root(metadata, case["salt"])
        spans = [
            MultimodalSpan(bytes.fromhex(content), offset, length)
            for content, offset, length in case["spans"]
        ]
        chunks = chain_hashes(root, tokens_as_uint32(case["tokens"]), case["chunk_size"], spans)
        chains.append(
            case
            | {
                "root": root.hex(),
                "chunks": [[start, end, digest.hex()] for start, end, digest in chunks],
            }
        )
    keys = []
    for fields in KEYS:
        key = CacheEngineKey(*fields)
        names = {
            "canonical": key.canonical().hex(),
            "url": key.to_url(),
            "text": key.to_string(),
            "chunk_id": key.chunk_id().hex(),
        }
        keys.append({"fields": fields, **names})
    return {"chains": chains, "keys": keys}


def records() -> dict[str, Any]:
    """Heads and payloads."""
    made = []
    for case in RECORDS:
        tensors = tuple(
            TensorSpec(group, dtype, tuple(shape), offset, length)
            for group, dtype, shape, offset, length in case["tensors"]
        )
        payload = payload_of(tensors[-1].offset + tensors[-1].length if tensors else 0)
        extensions = tuple(
            Extension(number, must, bytes.fromhex(data))
            for number, must, data in case.get("extensions", [])
        )
        options = {
            "serde": case.get("serde", "naive"),
            "profile": case.get("profile", ""),
            "lossy": case.get("lossy", False),
        }
        header = RecordHeader(
            CacheEngineKey(*case["key"]).canonical(),
            **options,
            tensors=tensors,
            digest=payload_digest(payload),
            extensions=extensions,
        )
        full = case | options | {"extensions": case.get("extensions", [])}
        made.append(
            full | {"payload": payload.hex(), "head": encode_head(header, len(payload)).hex()}
        )
    return {"records": made}


def frames() -> dict[str, Any]:
    """Whole frames, blob included."""
    made = []
    for case in FRAMES:
        blob = bytes.fromhex(case.get("blob", ""))
        frame = build_frame(case["id"], message_of(case), len(blob)) + blob
        made.append(
            {"id": case["id"], "message": case["message"], "blob": blob.hex(), "frame": frame.hex()}
        )
    return {"frames": made}


def message_of(case: dict[str, Any]) -> messages.Message:
    """The message of a vector."""
    name, *fields = case["message"]
    message: messages.Message = msgspec.convert(plain(fields), getattr(messages, name))
    return message


def plain(field: Any) -> Any:
    """A field as MessagePack holds it."""
    if isinstance(field, dict) and "hex" in field:
        return bytes.fromhex(field["hex"])
    return [plain(item) for item in field] if isinstance(field, list) else field


VECTORS = {"identity.json": identity, "records.json": records, "frames.json": frames}


def main() -> int:
    """Write the files; with one that exists and no `--force`, write none."""
    existing = [name for name in VECTORS if (DIRECTORY / name).exists()]
    if existing and "--force" not in sys.argv:
        print(f"{', '.join(existing)} exist: golden vectors are not regenerated", file=sys.stderr)
        return 1
    for name, make in VECTORS.items():
        text = json.dumps(make(), indent=1, ensure_ascii=False)
        (DIRECTORY / name).write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
