"""What an uninstallation may leave, and what it must not."""

from __future__ import annotations

import re
from collections.abc import Collection

from tests.cluster.names import RELEASE

DOCUMENTED = re.compile(
    rf"PersistentVolumeClaim/.*/data-{RELEASE}-lmcache-storage-\d+"
    r"|PersistentVolume/.*"
    rf"|Pod/.*/{RELEASE}-lmcache-release-test"
)
"""What stays on purpose (docs/quickstart.md, "Uninstall"); a volume belongs to its claim."""


def left_over(before: Collection[str], after: Collection[str], *, gone: bool = False) -> list[str]:
    """Return the objects that an uninstallation should have removed.

    Args:
        before: Objects before the installation, as `Kind/name`.
        after: Objects now.
        gone: Whether the namespace is deleted: then nothing may stay.
    """
    new = sorted(set(after) - set(before))
    return [one for one in new if gone or not DOCUMENTED.fullmatch(one)]
