"""A whole input is the sum of its rows: `whole()` says what the rows say one by one, whatever the optimizer."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
import training
from explorers import get
from spotlights.explorer.explorer import Explorer

EXACT = {"rtol": 1e-10, "atol": 1e-10}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Picture(nn.Module):
    """Convolutions, one of them grouped, over an image of 6 × 6."""

    def __init__(self) -> None:
        super().__init__()
        self.strokes = nn.Conv2d(1, 4, 3, stride=2)
        self.shapes = nn.Conv2d(4, 4, 2, groups=2, bias=False)
        self.classes = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.shapes(self.strokes(images).tanh()).tanh().flatten(1))


@pytest.fixture(scope="module", params=OPTIMIZERS)
def recorded(request, tmp_path_factory) -> tuple[sl.Memory, nn.Module, Tensor]:
    model = training.fill(Picture().double())
    optimizer = OPTIMIZERS[request.param](model.parameters())
    images = torch.randn(12, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    path = tmp_path_factory.mktemp("whole") / f"{request.param}.memory"
    with sl.record(model, optimizer, path, dtype="float64") as recorder:
        for step in range(6):
            ids = torch.randint(12, (4,), generator=torch.Generator().manual_seed(step))
            recorder.batch(example=ids, label=ids % 3, name=[f"class {number}" for number in (ids % 3).tolist()])
            optimizer.zero_grad()
            F.cross_entropy(model(images[ids]), ids % 3).backward()
            optimizer.step()
    return sl.open(path), model.eval(), images


@pytest.mark.parametrize("layer", ["strokes", "shapes", "classes"])
def test_a_whole_image_is_the_sum_of_its_positions(recorded, layer: str):
    memory, model, images = recorded
    found = memory.attend(model, images[:1])[layer]
    if layer != "shapes":  # a grouped convolution has a score for each group
        torch.testing.assert_close(found.whole().scores()[0], found.scores().sum(dim=0), **EXACT)
    rows = found.contributions(1)
    whole = rows.whole()
    torch.testing.assert_close(torch.tensor(whole.numpy()[0]), torch.tensor(rows.numpy()).sum(dim=0), **EXACT)
    torch.testing.assert_close(whole.initial, rows.initial.sum(dim=0, keepdim=True), **EXACT)
    torch.testing.assert_close(
        whole.totals("label").values[0],
        rows.totals("label").values.sum(dim=0).to(whole.totals("label").values),
        **EXACT,
    )
    assert ("added up over the" in (whole.note or "")) == (layer == "strokes")


def test_whole_inputs_have_a_contribution_each(recorded):
    memory, model, images = recorded
    several = memory.attend(model, images[:2])["strokes"].whole().contributions(lambda output: output[:, 1])
    single = [memory.attend(model, image[None])["strokes"].contributions(1) for image in images[:2]]
    totals = torch.cat([contributions.total() for contributions in single])
    torch.testing.assert_close(several.total(), totals, **EXACT)


def test_the_sum_of_cosines_is_that_of_every_row(recorded):
    memory, model, images = recorded
    found = memory.attend(model, images[:1], kernel="cosine")["strokes"]
    torch.testing.assert_close(found.whole().scores()[0], found.scores().sum(dim=0), **EXACT)


def test_few_rows_of_a_large_layer_add_up_too(recorded):
    memory, model, images = recorded
    rows = memory.attend(model, images[:2])["classes"].contributions(lambda output: output[:, 1])
    torch.testing.assert_close(torch.tensor(rows.whole().numpy()[0]), torch.tensor(rows.numpy()).sum(dim=0), **EXACT)


def test_the_explorer_asks_about_the_whole_image(recorded):
    memory, model, images = recorded
    explorer = Explorer(sl.Subject(memory, model, images), prepare=False)
    rows = memory.attend(model, images[:1])["strokes"]
    for measure, expected in (("contribution", torch.tensor(rows.contributions(1).numpy())), ("score", rows.scores())):
        found = get("layer", explorer, q="test:0", layer="strokes", measure=measure, target=1, by="slot", top=5)
        summed, slots = expected.sum(dim=0), [row["slot"] for row in found["top"]]
        assert [row["value"] for row in found["top"]] == pytest.approx(summed.topk(5).values.tolist(), rel=1e-9)
        assert summed[slots].tolist() == pytest.approx(summed.topk(5).values.tolist(), rel=1e-9)  # some are alike
        assert found["rows"] == 4
        assert found["caution"] == ("first order" if measure == "contribution" else "4 positions added up")
        assert "added up over the 4 rows" in found["note"]


def test_columns_that_only_rename_another_are_no_groups_of_their_own(recorded):
    memory, model, images = recorded
    about = get("run", Explorer(sl.Subject(memory, model, images), prepare=False))
    assert list(about["groups"]) == ["label"]
    query = get("query", Explorer(sl.Subject(memory, model, images), prepare=False), q="test:0")
    assert query["layer"] == "classes"  # the one that makes the outputs is looked at first
