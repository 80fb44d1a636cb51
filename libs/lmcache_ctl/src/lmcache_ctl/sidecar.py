"""`lmcachectl sidecar`: one running sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_ctl.options import ONE_SIDECAR, reaches
from lmcache_ctl.output import (
    Columns,
    Output,
    OutputFormat,
    print_table,
    print_text,
    show,
    size_text,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind


@reaches(Kind.SIDECAR, ONE_SIDECAR)
def status(reach: Reach, output: Output = OutputFormat.TABLE) -> None:
    """Show a sidecar's memory, tiers, connected engines, and the progress of a drain."""
    names = ("status", "tiers", "clients")
    found = {name: reach.ask(Kind.SIDECAR, "GET", f"/v1/{name}") for name in names}
    show(found, output, _print_status)


def _print_status(found: Mapping[str, Any]) -> None:
    status, drain = found["status"], found["status"]["drain"]
    figures = ("arena", "reserved", "held", "pinned", "pending")
    arena, reserved, held, pinned, pending = (size_text(status[f"{one}_bytes"]) for one in figures)
    drained = (
        ""
        if drain["state"] == "serving"
        else f": {drain['total']} chunks, "
        + ", ".join(
            f"{drain[name]} {name.replace('_', ' ')}"
            for name in ("handed_over", "already_elsewhere", "failed", "left")
        )
    )
    lines = {
        "sidecar": (
            f"{status['instance']} {status['version']}, up {status['uptime_s']:.0f} s,"
            f" {status['distributed_url']}"
        ),
        "registered": "yes" if status["registered"] else "no",
        "memory": f"{arena}, verified {status['verify_hot']}",
        "in use": f"{reserved} being filled, {held} held by engines",
        "pinned": pinned,
        "pending": f"{pending} for slower tiers",
        "drain": drain["state"] + drained,
    }
    for name, value in lines.items():
        print_text(f"{name:<11}{value}")
    rows = [
        (
            name,
            str(tier["num_chunks"]),
            size_text(tier["used_bytes"]),
            size_text(tier["capacity_bytes"]),
        )
        for name, tier in found["tiers"]["tiers"].items()
    ]
    print_table("", Columns(("tier", "chunks", "used", "of")), rows)
    clients = [
        (
            one["client"],
            one["model"],
            f"{one['rank']} of {one['world_size']}",
            str(one["pid"]),
            size_text(one["pinned_bytes"]),
        )
        for one in found["clients"]["clients"]
    ]
    if clients:
        print_table("", Columns(("client", "model", "rank", "pid", "pinned"), left=2), clients)
