import sys

import numpy as np
import pytest

from batchwright.batching.analyze.report import compute_length_histogram
from batchwright.errors import CannotWrite, ConfigError
from batchwright.report.figures import histogram_png, packing_png

image = pytest.importorskip("matplotlib.image")

VIVID = 0.25
"""Text and frames are grey; only blocks and bars have colours further apart than this."""


def vivid(picture) -> np.ndarray:
    return np.ptp(picture[..., :3], axis=-1) > VIVID


def test_blocks_cover_the_share_of_the_rows_that_is_useful(tmp_path) -> None:
    full, half = tmp_path / "full.png", tmp_path / "half.png"
    packing_png(full, [[50, 50]] * 12, 100, "same height")
    packing_png(half, [[50]] * 12, 100, "same height")

    # The colour scale at the right is the same in both, so only the rows differ.
    a, b = (vivid(image.imread(path)) for path in (full, half))
    left = a[:, : a.shape[1] * 8 // 10].sum(), b[:, : b.shape[1] * 8 // 10].sum()
    assert a.shape == b.shape
    assert left[0] > 1.5 * left[1]


def test_the_same_picture_is_the_same_bytes_and_leaves_nothing_beside_it(tmp_path) -> None:
    for name in ("one.png", "two.png"):
        packing_png(tmp_path / name, [[3, 4], [], [8]], 8, "title")

    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_many_rows_draw_no_taller_than_the_most_shown(tmp_path) -> None:
    for n in (10, 1000):
        packing_png(tmp_path / f"{n}.png", [[5, 3]] * n, 8, max_rows=10)

    shapes = {image.imread(tmp_path / f"{n}.png").shape for n in (10, 1000)}
    assert len(shapes) == 1


def test_rows_that_cannot_be_drawn_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="at most 8 tokens, got 9"):
        packing_png(tmp_path / "x.png", [[4, 5]], 8)
    with pytest.raises(ConfigError, match="0 rows"):
        packing_png(tmp_path / "x.png", [], 8)
    assert list(tmp_path.iterdir()) == []


def test_edges_add_lines_to_the_histogram(tmp_path) -> None:
    histogram = compute_length_histogram(np.arange(1, 500), num_bins=30)
    histogram_png(tmp_path / "plain.png", histogram)
    histogram_png(tmp_path / "edges.png", histogram, (100, 101, 300, 600), "Lengths")

    def orange(path) -> int:
        picture = image.imread(path)[..., :3]
        return int((picture[..., 0] > picture[..., 2] + VIVID).sum())

    assert orange(tmp_path / "plain.png") == 0
    assert orange(tmp_path / "edges.png") > 500


def test_a_single_length_makes_a_picture(tmp_path) -> None:
    histogram_png(tmp_path / "one.png", compute_length_histogram([7, 7]), (7,))
    packing_png(tmp_path / "row.png", [[1]], 1)
    packing_png(tmp_path / "empty.png", [[]], 5)

    assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CannotWrite, match=r"x\.png"):
        packing_png(tmp_path / "file" / "x.png", [[1]], 1)


def test_drawing_leaves_pyplot_alone(tmp_path) -> None:
    before = "matplotlib.pyplot" in sys.modules

    packing_png(tmp_path / "a.png", [[1]], 1)

    assert ("matplotlib.pyplot" in sys.modules) == before
