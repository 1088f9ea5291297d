"""Claims about the page that explains an answer: it shows the numbers, and no words lie over others."""

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.text import Text

import spotlights as sl
from demos import small_demo
from spotlights_paper.experiments.demo_page import Explanation, explain, plot_explanation
from spotlights_paper.experiments.training import mlp


@cache
def explanation() -> Explanation:
    demo = small_demo()
    return explain(demo.memory, demo.network, demo.images.test.inputs[:1])


def page(*, truth: int = 1, title: str = "") -> Figure:
    images = small_demo().images
    return plot_explanation(explanation(), images.test.pixels[0], images.train.pixels_of, truth=truth, title=title)


def ticks_outside(figure: Figure) -> set[Text]:
    """The labels of ticks beyond the ends of their axis, which exist but are not drawn."""
    outside = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        outside |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return outside


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_contributions_and_the_initial_part_add_up_to_the_logit():
    shown = explanation()
    total = float(shown.by_label.values.sum()) + shown.initial
    assert total == pytest.approx(float(shown.logits[shown.answer]), abs=1e-2)  # stored as float16
    assert shown.sum in words(page())


def test_the_page_says_what_is_approximate():
    said = words(page(truth=1))
    assert "stored as float16: values are approximate" in said
    assert "exact" not in said


def test_the_page_says_whether_the_answer_is_right():
    answer = explanation().answer
    assert f"says {answer} (right)" in words(page(truth=answer))
    wrong = words(page(truth=(answer + 1) % 10))
    assert f"(wrong: it is {(answer + 1) % 10})" in wrong
    assert f"{answer}\nsaid" in wrong


def test_the_page_shows_the_pixels_of_the_examples_for_and_against():
    rows = [row for top in (explanation().pro, explanation().con) for row in top.rows()]
    expected = [small_demo().images.train.pixels_of(row["example"]) for row in rows]
    inset_images = [image for axes in page().axes for inset in axes.child_axes for image in inset.images]
    for image, pixels in zip(inset_images, expected, strict=True):
        assert np.array_equal(image.get_array(), pixels)
        assert image.get_interpolation() == "none"


def test_no_words_on_the_page_lie_over_others():
    beside = (explanation().answer + 1) % 10  # two marks that stand side by side
    figure = page(truth=beside, title="test example 2001500 of digits")
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
            recorder.batch(label=labels, example=torch.arange(8))
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
    ]
    for figure in drawn:
        assert "stored as float16" in words(figure)
