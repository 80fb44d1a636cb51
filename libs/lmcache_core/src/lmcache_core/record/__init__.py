"""The record: chunk bytes with identity and digest, the one container for every crossing. No
torch.
"""

from lmcache_core.record.chunk import (
    HOT_TIER,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    Result,
    Staged,
    StagedFrom,
    release_all,
)
from lmcache_core.record.codec import (
    HEAD_ALIGN_BYTES,
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    RecordPrefix,
    check_digest,
    decode_head,
    decode_prefix,
    decoded_bytes,
    decoded_header,
    encode_head,
    verify_payload,
)
from lmcache_core.record.digest import UNSEALED_DIGEST, payload_digest, payload_hasher
from lmcache_core.record.header import (
    RAW_SERDE,
    REPORT_EXTENSION,
    Extension,
    RecordHeader,
    RecordReason,
    TensorSpec,
    raw_header,
)
from lmcache_core.record.hot_verifier import HotVerifier

__all__ = [
    "Allocate",
    "Chunk",
    "Extension",
    "HEAD_ALIGN_BYTES",
    "HOT_TIER",
    "HotVerifier",
    "MAX_HEAD_BYTES",
    "MAX_PAYLOAD_BYTES",
    "Miss",
    "MissReason",
    "PREFIX_BYTES",
    "RAW_SERDE",
    "REPORT_EXTENSION",
    "RecordHeader",
    "RecordPrefix",
    "RecordReason",
    "Result",
    "Staged",
    "StagedFrom",
    "TensorSpec",
    "UNSEALED_DIGEST",
    "check_digest",
    "decode_head",
    "decode_prefix",
    "decoded_bytes",
    "decoded_header",
    "encode_head",
    "payload_digest",
    "payload_hasher",
    "raw_header",
    "release_all",
    "verify_payload",
]
