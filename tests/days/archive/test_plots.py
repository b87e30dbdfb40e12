"""examples/plots.py: two plots of an archive of flights."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from outbox_pipelines.days.archive import open_archive

# An example; its archive takes fifteen seconds.
pytestmark = pytest.mark.extended
PLOTS = Path(__file__).parents[3] / "examples" / "plots.py"


def test_two_plots(flights_archive: Path, tmp_path: Path) -> None:
    """Guards against an example that fails, or draws empty axes."""
    subprocess.run([sys.executable, PLOTS, flights_archive, tmp_path / "plots"], check=True)
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [picture.name for picture in pictures] == ["delays.png", "departures.png"]
    for picture in pictures:
        pixels = (image.imread(picture) * 255).astype(np.uint8)
        colours = {tuple(pixel.tobytes()) for pixel in np.unique(pixels.view(np.uint32))}
        # Those of matplotlib's first three lines or areas: one for each airport.
        assert {(31, 119, 180, 255), (255, 127, 14, 255), (44, 160, 44, 255)} <= colours


def test_what_is_drawn(flights_archive: Path) -> None:
    """Guards against plots of other figures than the archive's."""
    sys.path.insert(0, str(PLOTS.parent))
    try:
        plots = importlib.import_module("plots")
    finally:
        sys.path.pop(0)
    archive = open_archive(str(flights_archive))
    counts = plots.departures(archive)
    assert list(counts.columns) == ["EWR", "JFK", "LGA"]
    assert counts.to_numpy().sum() == 3435
    assert len(counts) == 4 * 24 - 10
    late = plots.delays(archive)
    assert dict(late.groupby("origin").size()) == {"EWR": 1267, "JFK": 1183, "LGA": 985}
    assert dict(late.groupby("origin").minutes.median()) == {"EWR": 2, "JFK": -1, "LGA": -2}
