"""Claims about the figures: they show the numbers, in the colours, and nothing lies over anything else."""

from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import spotlights as sl
from demos import small_demo
from spotlights import figures
from spotlights.figures import palette

SEEN_BY = {
    "most people": np.eye(3),
    "protanopes": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopes": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopes": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
"""What colour-blind eyes make of linear RGB (Machado, Oliveira and Fernandes, 2009)."""


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


# -- colours ----------------------------------------------------------------------------------


def lab(colours: list[str], seen: np.ndarray) -> np.ndarray:
    rgb = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ np.array(seen).T, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(linear @ to_xyz.T / [0.9505, 1, 1.089]).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("colours", [palette.CLASSES, (palette.FOR, palette.AGAINST)])
def test_colours_differ_for_all_eyes(eyes: str, colours: tuple[str, ...]):
    seen = lab(list(colours), np.array(SEEN_BY[eyes]))
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


def test_a_class_has_its_colour_whatever_else_is_shown():
    assert palette.colours([7, 3])[1] == palette.colours([3])[0] == palette.CLASSES[3]


def test_the_user_s_own_style_comes_back():
    before = dict(matplotlib.rcParams)
    small_demo().attend().plot(k=5)
    assert dict(matplotlib.rcParams) == before


# -- numbers ----------------------------------------------------------------------------------


def test_top_is_drawn_in_descending_order_group_by_group():
    top = small_demo().attend().top(20, per="label")
    axes = top.plot(1).axes[0]
    drawn = axes.get_lines()[:10]
    for group, line in enumerate(drawn):
        heights = np.asarray(line.get_ydata())[::2]
        assert heights.tolist() == top.values[1, group].tolist() == sorted(heights, reverse=True)
        assert to_hex(line.get_color()) == palette.CLASSES[group]
    starts = [np.asarray(line.get_xdata())[0] for line in drawn]
    assert starts == sorted(starts)


def test_groups_with_fewer_slots_are_drawn_as_far_as_they_go():
    memory = small_demo().memory.where(example=range(2_000_000, 2_000_015), step=range(12))
    top = memory.attend(small_demo().network, small_demo().images.test.inputs[:1])["layers.0"].top(30, per="label")
    lines = top.plot().axes[0].get_lines()[:10]
    assert [len(np.asarray(line.get_ydata())) // 2 for line in lines] == (top.slots[0] >= 0).sum(dim=1).tolist()


def test_totals_are_bars_of_their_height_in_the_colour_of_their_class():
    totals = small_demo().attend().totals("label")
    bars = totals.plot(2).axes[0].patches
    assert [bar.get_height() for bar in bars] == pytest.approx(totals.values[2].tolist())
    assert [to_hex(bar.get_facecolor()) for bar in bars] == list(palette.CLASSES)


def test_contributions_are_coloured_by_their_sign():
    totals = small_demo().attend().contributions(target=3).totals("label")
    assert totals.values[0].min() < 0 < totals.values[0].max()
    for bar in totals.plot().axes[0].patches:
        expected = palette.FOR if bar.get_height() >= 0 else palette.AGAINST
        assert to_hex(bar.get_facecolor()) == expected


def test_binned_totals_are_drawn_over_their_ranges():
    totals = small_demo().attend().totals("step", bins=8)
    axes = totals.plot().axes[0]
    assert axes.get_xlim() == (0, 40)
    assert np.asarray(axes.get_lines()[0].get_ydata())[::2].tolist() == totals.values[0].tolist()


def test_many_groups_are_a_line_along_steps_and_sorted_over_examples():
    attention = small_demo().attend()
    steps = small_demo().memory.steps
    along = attention.totals("step").plot().axes[0]
    assert len(along.patches) + len(np.asarray(along.get_lines()[0].get_xdata())) >= steps
    line = attention.totals("example").plot().axes[0].get_lines()[0]
    heights = np.asarray(line.get_ydata()).tolist()
    assert heights == sorted(heights, reverse=True)


def test_groups_can_have_names_and_marks():
    totals = small_demo().attend().totals("label")
    figure = totals.plot(names={0: "T-shirt", 9: "ankle boot"}, marks={9: "said"})
    assert {"T-shirt", "ankle boot (said)", "4"} <= set(words(figure).splitlines())


def test_attention_is_drawn_with_its_totals_beside_it():
    figure = small_demo().attend().plot(k=30)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "scores of the top 30 slots of each label in layers.1",
        "total score by label",
    ]


def test_a_query_that_does_not_exist_gets_a_sentence():
    with pytest.raises(sl.SettingError, match="there are 3 queries, 0 to 2"):
        small_demo().attend().totals("label").plot(3)


def test_a_picture_takes_arrays_and_knows_no_memory():
    panel = figures.TotalsPanel(np.array([1.0, -2.0]), ["yes", "no"], "votes", "answer", signed=True)
    bars = figures.plot_totals(panel).axes[0].patches
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [palette.FOR, palette.AGAINST]


# -- files ------------------------------------------------------------------------------------


def test_figures_are_saved_with_150_dots_per_inch_or_as_pdf(tmp_path: Path):
    figure = small_demo().attend().totals("label").plot()
    png = figures.save(figure, tmp_path / "new" / "totals.png").read_bytes()
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == tuple(figure.get_size_inches() * 150)
    assert figures.save(figure, tmp_path / "totals.pdf").read_bytes().startswith(b"%PDF")
