"""What `--help` shows of each command: how it is called."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

EXAMPLES: Final = MappingProxyType(
    {
        "status": (
            "lmcachectl status --lookup-url http://lookup:8081 --storage-url http://storage:8080",
            "lmcachectl status -n lmcache -o json",
        ),
        "top": ("lmcachectl top -n lmcache", "lmcachectl top --once --interval 10 -o json"),
        "explain": (
            "lmcachectl explain --tokens ids.txt",
            "lmcachectl explain -n lmcache --tokens - < ids.txt",
        ),
        "evict": (
            "lmcachectl evict sidecar --size 512MiB",
            "lmcachectl evict storage/lmcache-storage-0 --everything --yes",
        ),
        "pin": (
            "lmcachectl pin --tokens ids.txt --ttl 3600",
            "lmcachectl pin --at storage/lmcache-storage-0",
        ),
        "drain": (
            "lmcachectl drain storage/lmcache-storage-0 --within 300",
            "lmcachectl drain peer/pod-a --no-wait",
        ),
        "bench": (
            "lmcachectl bench lm://storage:65432 --seconds 5 --token-file token",
            "lmcachectl bench lookup -n lmcache",
            "lmcachectl bench lm/lmcache-storage-0 -n lmcache --size 1MiB",
        ),
        "doctor": (
            "lmcachectl doctor -n lmcache --strict",
            "lmcachectl doctor --check-config sidecar=sidecar.yaml -o json",
        ),
        "version": ("lmcachectl version -n lmcache", "lmcachectl version --client"),
        "certify blend": (
            (
                "lmcachectl certify blend --model ./llama --separator ' # # ' --certificates"
                " /etc/lmcache/certificates"
            ),
            (
                "lmcachectl certify blend --model ./llama --separator ' # # ' --text held-out.txt"
                " --prompts 200"
            ),
        ),
        "certify codec": (
            "lmcachectl certify codec --profile lossless",
            "lmcachectl certify codec --kv kv.safetensors --max-error 0.1",
        ),
        "codec stats": ("lmcachectl codec stats --url http://127.0.0.1:8083",),
        "codec inspect": ("lmcachectl codec inspect /var/lib/lmcache",),
        "codec measure": ("lmcachectl codec measure --profile lossless --kv kv.safetensors",),
        "lookup status": ("lmcachectl lookup status --url http://lookup:8081",),
        "lookup tenants": ("lmcachectl lookup tenants -n lmcache --token-file admin-token",),
        "lookup prefix": ("lmcachectl lookup prefix 00112233445566778899aabbccddeeff",),
        "lookup locations": (
            "lmcachectl lookup locations 00112233445566778899aabbccddeeff -o json",
        ),
        "lookup route": ("lmcachectl lookup route 00112233445566778899aabbccddeeff",),
        "sidecar status": ("lmcachectl sidecar status --url http://127.0.0.1:8083",),
        "sidecar explain": ("lmcachectl sidecar explain --tokens ids.txt",),
    }
)


def examples_of(command: str) -> str:
    """For the end of its help. An empty line keeps each on a line of its own."""
    return "\n\n".join(("Examples:", *EXAMPLES[command]))
