"""Write the snapshot of the chart's default rendering, which a test compares
(`make chart-snapshot`).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.helm.conftest import Chart, fetch_helms
from tests.helm.snapshot import SNAPSHOT, snapshot_of


def main() -> None:
    """Write it."""
    folder = Path(tempfile.mkdtemp())
    try:
        chart = Chart.built(folder, fetch_helms())
        SNAPSHOT.write_text(snapshot_of(chart.render()), encoding="utf-8")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
