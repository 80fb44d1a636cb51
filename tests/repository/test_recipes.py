"""The recipes of CONTRIBUTING.md, carried out in a copy of the source: each change is complete in
the places that its recipe names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = "libs/lmcache_core/src/lmcache_core"
LOOKUP = "services/lookup/src/lmcache_lookup"
CTL = "libs/lmcache_ctl/src/lmcache_ctl"
CHART = "helm/lmcache"
MAX_FILES = 4


@dataclass(frozen=True)
class Recipe:
    """One change.

    Attributes:
        insertions: By file, lines that are there and what is written before each.
        program: Uses what was added; fails where something is missing.
        files: New files and what they hold.
    """

    insertions: dict[str, list[tuple[str, str]]]
    program: str
    files: dict[str, str] = field(default_factory=dict)


REMOTE_TIER = Recipe(
    files={
        f"{CORE}/storage/remote/shelf.py": """
from pathlib import Path
from urllib.parse import urlsplit
from lmcache_core.storage.remote.base import RemoteOptions
from lmcache_core.storage.remote.file import FileBackend

class ShelfBackend(FileBackend):
    def __init__(self, url: str, options: RemoteOptions) -> None:
        super().__init__(Path(urlsplit(url).path), options)
        self.host, self.token = urlsplit(url).hostname, options.token

def create(url: str, options: RemoteOptions) -> ShelfBackend:
    return ShelfBackend(url, options)
"""
    },
    insertions={
        f"{CORE}/config/registry.py": [
            (
                '        "file": RemoteScheme(',
                '        "shelf": RemoteScheme(f"{_STORAGE}.remote.shelf", takes_token=True),\n',
            )
        ]
    },
    program="""
import asyncio, os
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.reference import reference
from lmcache_core.storage.tiers import HotSpec, RemoteSpec, TiersSpec, build_tiers
from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

url = "shelf://upstairs" + os.getcwd()
config = LMCacheEngineConfig.from_defaults(remote_url=url, remote_token_file="/token")
assert "shelf" in reference()

async def main():
    arena = Arena()
    remote = RemoteSpec(url=config.remote_url, timeout_s=10.0, token="secret")
    tiers = build_tiers(TiersSpec(hot=HotSpec(memory=arena.allocator), remote=remote))
    [tier] = tiers.lower
    assert (tiers.remote.host, tiers.remote.token) == ("upstairs", "secret")
    await tier.open()
    assert await tier.batched_put([make_chunk("a")]) == [True]
    [found] = await tier.batched_get([make_key("a")], arena)
    assert payload_of(found) == make_payload("a")
    assert tier.stats()["stored_chunks"] == 1
    await tier.close()

asyncio.run(main())
""",
)

EVICTION_POLICY = Recipe(
    files={
        f"{CORE}/storage/eviction/mru.py": """
from lmcache_core.storage.eviction.lru import LRUPolicy

class MRUPolicy(LRUPolicy):
    def fresh(self):
        return MRUPolicy()

    def victims(self):
        yield from list(reversed(self._order))

    def coldest_first(self):
        return list(reversed(self._order))
"""
    },
    insertions={
        f"{CORE}/config/registry.py": [
            ('        "lru": f"', '        "mru": f"{_STORAGE}.eviction.mru:MRUPolicy",\n')
        ]
    },
    program="""
import asyncio
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.reference import reference
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage.manager import engine_spec
from lmcache_core.storage.tiers import build_tiers
from tests.suites.chunks import make_chunk, make_key

config = LMCacheEngineConfig.from_env({"LMCACHE_EVICTION_POLICY": "mru"})
assert "adaptive, s3fifo, mru, lru" in reference()

async def main():
    memory = ArenaAllocator.anonymous(1 << 20)
    hot = build_tiers(engine_spec(config, memory)).hot
    payload = bytes(100_000)
    for name in range(20):
        assert await hot.batched_put([make_chunk(name, payload=payload)]) == [True]
    held = await hot.batched_contains([make_key(name) for name in range(20)])
    assert held[0] and held[19] and not all(held), "the newest are given up first"

asyncio.run(main())
""",
)

CONFIG_FIELD = Recipe(
    insertions={
        f"{CORE}/config/engine_config.py": [
            (
                "    def __post_init__(self)",
                """    max_shelves: int = option(
        "Disk", "Shelves to use.", unit="shelves", limits=(1, 9), default=3
    )

""",
            )
        ],
        f"{CORE}/config/contradictions.py": [
            (
                "    if c.max_local_cpu_size <= 0:",
                """    if c.max_shelves > 3 and c.local_disk is None:
        yield "max_shelves local_disk", "there is no disk to put them on; set local_disk"
""",
            )
        ],
    },
    program="""
from pathlib import Path
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.reference import reference
from lmcache_core.errors import ConfigError

def refusal(**options):
    try:
        LMCacheEngineConfig.from_defaults(**options)
    except ConfigError as exc:
        return str(exc)

assert LMCacheEngineConfig.from_defaults().max_shelves == 3
assert LMCacheEngineConfig.from_env({"LMCACHE_MAX_SHELVES": "2"}).max_shelves == 2
Path("config.yaml").write_text("max_shelves: 1")
assert LMCacheEngineConfig.from_file("config.yaml").max_shelves == 1
assert refusal(max_shelves=10) == "max_shelves=10: must be a whole number in 1 … 9 (shelves)"
assert refusal(max_shelves=4).endswith("there is no disk to put them on; set local_disk")
assert "| `max_shelves`° | `3` | 1 … 9 shelves | Shelves to use. |" in reference()
""",
)

LOOKUP_ENDPOINT = Recipe(
    insertions={
        f"{CORE}/lookup/messages.py": [
            (
                "class InstanceLease(",
                '''class CountAnswer(msgspec.Struct, frozen=True):
    """Answer to a count.

    Attributes:
        num_held: How many of the chunks have a holder.
    """

    num_held: Count
    degraded: Degraded = False


''',
            )
        ],
        f"{LOOKUP}/service.py": [
            ("    ContainsAnswer,", "    CountAnswer,\n"),
            (
                "    async def locations(",
                """    async def count(self, tenant, chunk_ids, exclude):
        found = await self.contains(tenant, chunk_ids, exclude)
        return CountAnswer(sum(found.present), found.degraded)

""",
            ),
        ],
        f"{LOOKUP}/routes.py": [
            ("    ContainsAnswer,", "    CountAnswer,\n"),
            (
                "@lookup_router.get(",
                '''@questions.post("/count", **bodies.route(CHUNKS, CountAnswer, CountAnswer))
async def count(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Count chunks. Those that have a holder."""
    body = await CHUNKS.read(request)
    return answered(request, await service.count(caller.tenant, body.ids, body.exclude))


''',
            ),
        ],
        f"{CORE}/lookup/client.py": [
            ("    ContainsAnswer,", "    CountAnswer,\n"),
            (
                "    async def locations(",
                """    async def count(self, chunk_ids, exclude=()):
        return await self._ask("/v1/count", chunk_ids, exclude, CountAnswer, None)

""",
            ),
        ],
    },
    program="""
import asyncio
import httpx
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.lookup.messages import CountAnswer
from lmcache_lookup.app import create_app
from lmcache_lookup.settings import LookupSettings
from tests.fixtures.lookup_index import AwayIndex

IDS = [bytes([number]) * 16 for number in range(3)]

async def ask(index=None):
    app = create_app(LookupSettings(), index)
    document = app.openapi()
    assert document["paths"]["/v1/count"]["post"]["summary"] == "Count chunks"
    fields = document["components"]["schemas"]["CountAnswer"]["properties"]
    assert fields.keys() == {"num_held", "degraded"}
    assert all(field["description"] for field in fields.values())
    async with app.router.lifespan_context(app):
        client = LookupClient("http://lookup", transport=httpx.ASGITransport(app))
        await client.open()
        if index is None:
            await client.renew_instance("a", incarnation=1, kind="sidecar")
            events = [StoreEvent("store", one, "hot", 1) for one in IDS[:2]]
            await client.send_events("a", incarnation=1, first_sequence=0, events=events)
        answer = await client.count(IDS)
        await client.close()
        return answer

assert asyncio.run(ask()) == CountAnswer(2)
assert asyncio.run(ask(AwayIndex())) == CountAnswer(0, degraded=True)
""",
)

COMMAND = Recipe(
    files={
        f"{CTL}/count.py": '''
from lmcache_ctl.output import Output, show

def count(words: list[str], output: Output = "table") -> None:
    """Count words."""
    show({"count": len(words)}, output, lambda found: print(found["count"]))
'''
    },
    insertions={
        f"{CTL}/cli.py": [
            ("from lmcache_ctl.dashboard", "from lmcache_ctl.count import count\n"),
            ('    "dashboard": ', '    "count": count,\n'),
            ("dashboard -n lmcache\n", "count one two\n"),
        ]
    },
    program="""
import subprocess, sys

def lmcachectl(*words):
    return subprocess.run(
        [sys.executable, "-m", "lmcache_ctl", *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout

assert "Count words." in lmcachectl("--help")
assert "lmcachectl count one two" in lmcachectl("count", "--help")
assert lmcachectl("count", "one", "two", "-o", "json").split() == ["{", '"count":', "2", "}"]
""",
)

CHART_VALUE = Recipe(
    insertions={
        f"{CHART}/values.yaml": [
            ("# Defaults of every entry of `models`.", "# Shelves of the cache.\nshelves: 3\n")
        ],
        f"{CHART}/values.schema.json": [
            ('    "modelDefaults": {', '    "shelves": {"type": "integer", "maximum": 9},\n')
        ],
    },
    program="""
import json
from pathlib import Path
from tests.helm.tools.describe_values import with_descriptions, with_table

chart = Path("helm/lmcache")
values = (chart / "values.yaml").read_text()
schema = with_descriptions(json.loads((chart / "values.schema.json").read_text()), values)
shelves = schema["properties"]["shelves"]
assert shelves == {"description": "Shelves of the cache.", "type": "integer", "maximum": 9}
readme = (chart / "README.md").read_text()
assert "| `shelves` | Shelves of the cache |" in with_table(readme, values)
""",
)

RECIPES = {
    "A remote tier": REMOTE_TIER,
    "An eviction policy": EVICTION_POLICY,
    "A config field": CONFIG_FIELD,
    "A lookup endpoint": LOOKUP_ENDPOINT,
    "A chart value": CHART_VALUE,
    "A command": COMMAND,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_is_complete_where_its_recipe_says(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"### {name}\n")[1].split("\n### ")[0]
    touched = {*recipe.files, *recipe.insertions}
    assert len(touched) <= MAX_FILES
    for package in (CORE, LOOKUP, CTL, CHART):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path, content in recipe.files.items():
        (tmp_path / path).write_text(content)
        place = path.removeprefix(f"{CORE}/").rpartition("/")[0]
        assert f"`{place}/<" in text, f"the recipe does not name {place}"
    for path, insertions in recipe.insertions.items():
        content = (tmp_path / path).read_text()
        for before, added in insertions:
            assert before in content, f"{path} has changed: correct this test"
            content = content.replace(before, added + before, 1)
        (tmp_path / path).write_text(content)
        place = path.removeprefix(f"{CORE}/")
        assert f"`{place}`" in text, f"the recipe does not name {place}"
    sources = [tmp_path / Path(package).parent for package in (CORE, LOOKUP, CTL)]
    done = subprocess.run(
        [sys.executable, "-c", recipe.program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*sources, ROOT]))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
