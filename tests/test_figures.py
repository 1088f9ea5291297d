"""Claims about the figures: they show the numbers, in the colours, and nothing lies over anything else."""

from functools import cache
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import spotlights as sl
from demos import small_demo
from spotlights import figures
from spotlights.attention.results import Label, Top, Totals
from spotlights.experiments.network import mlp
from spotlights.figures import Captioned, palette
from spotlights.figures.case import LayerPanel, Task, plot_case

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


@cache
def explanation() -> figures.Explanation:
    return figures.explain(small_demo().spotlights(), k=50)


def page(query: int = 0, **options) -> Figure:
    images = small_demo().images
    image = images.dataset.test.images[query].numpy()
    return figures.plot_explanation(explanation(), query, image, images.of_training, **options)


def ticks_outside(figure: Figure) -> set[Text]:
    """The labels of ticks beyond the ends of their axis, which exist but are not drawn."""
    outside = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        outside |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return outside


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
@pytest.mark.parametrize("colours", [palette.CLASSES, (palette.FOR, palette.AGAINST), tuple(palette.SOURCES.values())])
def test_colours_differ_for_all_eyes(eyes: str, colours: tuple[str, ...]):
    seen = lab(list(colours), np.array(SEEN_BY[eyes]))
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


def test_a_class_has_its_colour_whatever_else_is_shown():
    assert palette.colours("label", [7, 3])[1] == palette.colours("label", [3])[0] == palette.CLASSES[3]
    assert palette.colours("source", ["fashion-mnist"]) == palette.colours("source", ["mnist", "fashion-mnist"])[1:]


def test_the_user_s_own_style_comes_back():
    before = dict(matplotlib.rcParams)
    page()
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
    top = memory.attend(small_demo().network, small_demo().images.test[:1])["layers.0"].top(30, per="label")
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


# -- the page ---------------------------------------------------------------------------------


def test_contributions_and_the_initial_part_add_up_to_the_logit():
    last = explanation().layers[-1]
    assert last.exact
    assert not any(layer.exact for layer in explanation().layers[:-1])
    assert last.contributions is not None
    assert last.initial is not None
    total = last.contributions.values.sum(dim=1) + last.initial
    chosen = explanation().output.gather(1, torch.tensor(explanation().targets)[:, None])[:, 0]
    assert total.tolist() == pytest.approx(chosen.tolist(), abs=1e-4)


def test_the_page_says_what_is_exact_and_what_is_first_order():
    said = words(page(truth=1))
    assert said.count("exact: ") == 1
    assert said.count("first order: ") == 2


def test_the_page_says_whether_the_answer_is_right():
    answer = explanation().answers[0]
    assert f"right: it is {answer}" in words(page(truth=answer))
    wrong = words(page(truth=(answer + 1) % 10))
    assert f"wrong: it is {(answer + 1) % 10}" in wrong
    assert f"{answer}\nsaid" in wrong


def test_the_page_shows_the_pixels_of_the_top_examples():
    top = explanation().layers[0].examples
    assert top is not None
    expected = [small_demo().images.of_training(row["example"]) for row in top.rows(0)]
    inset_images = [image for axes in page().axes for inset in axes.child_axes for image in inset.images]
    for image, pixels in zip(inset_images[:3], expected, strict=True):
        assert np.array_equal(image.get_array(), pixels)
        assert image.get_interpolation() == "none"


@pytest.mark.parametrize("names", [{}, {0: "T-shirt", 1: "trouser", 5: "sandal", 9: "ankle boot"}])
def test_no_words_on_the_page_lie_over_others(names: dict[int, str]):
    beside = (explanation().answers[0] + 1) % 10  # two marks that stand side by side
    figure = page(truth=beside, names=names, title="test example 2001500 of digits")
    figure.draw_without_rendering()
    frame = figure.bbox
    boxes = []
    outside = ticks_outside(figure)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text() and text not in outside:
            box = text.get_window_extent()
            if box.width:
                assert frame.x0 - 1 <= box.x0, text
                assert box.x1 <= frame.x1 + 1, text
                boxes.append((text.get_text(), box, text.get_rotation()))
    for (one, a, turned), (other, b, also_turned) in combinations(boxes, 2):
        if turned in (0, 90) and also_turned in (0, 90):  # slanted words have boxes larger than themselves
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            up = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across <= 1 or up <= 1, f"{one!r} and {other!r}"


def other_memory(tmp_path: Path, **options) -> tuple[sl.Memory, torch.nn.Module, torch.Tensor]:
    network = mlp((6, 5, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    inputs, labels = torch.randn(8, 6), torch.arange(8) % 3
    with sl.record(network, optimizer, tmp_path / "other.memory", **options) as recorder:
        for _ in range(4):
            recorder.batch(label=labels)
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
    return sl.open(tmp_path / "other.memory"), network, inputs


def test_approximate_answers_say_so_in_the_picture(tmp_path: Path):
    memory, network, inputs = other_memory(tmp_path, dtype="float16")
    spotlights = memory.attend(network, inputs)
    attention = spotlights["layers.0"]
    drawn = [
        attention.plot(k=4),
        attention.top(4).plot(),
        attention.totals("label").plot(),
        figures.plot_explanation(figures.explain(spotlights), 0, np.zeros((2, 3)), lambda example: np.zeros((2, 3))),
    ]
    for figure in drawn:
        assert "stored as float16" in words(figure)


def test_a_memory_of_keys_alone_gets_a_page_without_contributions(tmp_path: Path):
    memory, network, inputs = other_memory(tmp_path, errors=False)
    found = figures.explain(memory.attend(network, inputs))
    figure = figures.plot_explanation(found, 0, np.zeros((2, 3)), lambda example: np.zeros((2, 3)))
    assert "contribution" not in words(figure)
    assert "total score by label" in words(figure)


# -- files ------------------------------------------------------------------------------------


def test_figures_are_saved_with_150_dots_per_inch_or_as_pdf(tmp_path: Path):
    figure = small_demo().attend().totals("label").plot()
    png = figures.save(figure, tmp_path / "new" / "totals.png").read_bytes()
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == tuple(figure.get_size_inches() * 150)
    assert figures.save(figure, tmp_path / "totals.pdf").read_bytes().startswith(b"%PDF")


def test_tasks_that_share_a_scale_are_all_shown_whole():
    def top(scale: float) -> Top:
        values = scale * torch.tensor([[[2.0, 1.0], [3.0, 1.0]]])
        slots = torch.arange(4).reshape(1, 2, 2)
        return Top("0", "score", values, slots, {"step": slots.tolist()}, "label", [0, 1])

    def totals(scale: float) -> Totals:
        return Totals("0", "score", "label", scale * torch.tensor([[2.0, 5.0]]), torch.tensor([2, 2]), [0, 1])

    image = Captioned(np.zeros((4, 4)), "6", "said 6")
    panel = LayerPanel("0", [top(1), top(10)], [totals(1), totals(10)], [image])
    names: dict[Label, str] = {0: "a", 1: "b"}
    figure = plot_case(image, [panel], [Task("mnist", names, {}), Task("fashion-mnist", names, {})])
    drawn = [axes for axes in figure.axes if axes.get_title(loc="left")]
    highest = {axes.get_title(loc="left"): axes.get_ylim()[1] for axes in drawn}
    assert highest["fashion-mnist: top 2 of each class"] >= 30
    assert highest["total score"] >= 50
    assert all(axes.get_ylim()[0] == 0 for axes in drawn[:4])
