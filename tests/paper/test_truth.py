"""The harness that compares estimates with retraining: is it itself truthful?"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
from spotlights.cli import app
from spotlights_paper.experiments.truth import settings as truth_settings
from spotlights_paper.experiments.truth.data import Data, ExampleRows, margins
from spotlights_paper.experiments.truth.harness import evaluate
from spotlights_paper.experiments.truth.margins import Margins
from spotlights_paper.experiments.truth.mislabelled import auc, flipped, precision_at
from spotlights_paper.experiments.truth.retraining import Job, halves, retrain, retrained
from spotlights_paper.experiments.truth.scoring import ceiling, correlation, lds, redrawn, score_of, spearman
from spotlights_paper.experiments.truth.settings import Setting, epoch_orders, initial_network


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def toy(optimizer: str = "sgd") -> tuple[Setting, Data]:
    setting = Setting(name="toy", data="", network=network, optimizer=optimizer, lr=0.05, batch=8, epochs=3)
    generator = torch.Generator().manual_seed(0)
    inputs, tests = torch.randn(40, 6, generator=generator), torch.randn(7, 6, generator=generator)

    def rows(inputs: torch.Tensor) -> ExampleRows:
        return ExampleRows(inputs, inputs[:, :3].argmax(dim=1), torch.arange(len(inputs)))

    return setting, Data(rows(inputs), rows(tests), ("a", "b", "c"))


# -- retraining -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("own_order", [True, False])
def test_networks_trained_at_once_are_those_trained_one_by_one(optimizer: str, own_order: bool):
    setting, data = toy(optimizer)
    order = None if own_order else epoch_orders(40, setting.epochs, 5)
    members = halves(4, 40)
    jobs = [Job(row.nonzero().flatten(), seed, order) for seed, row in enumerate(members)]
    found = retrain(setting, data, jobs)
    for job, margin in zip(jobs, found, strict=True):
        model = initial_network(setting, job.seed)
        if optimizer == "sgd":
            updates: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        else:
            updates = torch.optim.Adam(model.parameters(), lr=0.05)
        for epoch in job.epochs(setting.epochs):
            assert sorted(epoch.tolist()) == job.members.tolist()
            for batch in epoch.split(8):
                updates.zero_grad()
                F.cross_entropy(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
                updates.step()
        torch.testing.assert_close(
            margin, margins(model(data.test.inputs), data.test.labels).detach(), rtol=1e-4, atol=1e-4
        )


def test_what_has_been_retrained_is_not_retrained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    setting, data = toy()
    first = retrained(tmp_path, setting, data, kind="fresh", count=6)
    monkeypatch.setattr("spotlights_paper.experiments.truth.retraining.retrain", lambda *_: pytest.fail("again"))
    assert torch.equal(retrained(tmp_path, setting, data, kind="fresh", count=6), first)


def test_halves_are_halves_and_stay_the_same():
    assert (halves(5, 40).sum(dim=1) == 20).all()
    assert torch.equal(halves(9, 40)[:5], halves(5, 40))


# -- scoring ----------------------------------------------------------------------------------


def test_the_columns_of_spearman_are_scipy_s():
    from scipy import stats

    values = torch.randint(0, 5, (20, 3), generator=torch.Generator().manual_seed(0)).double()
    other = torch.rand(20, 3, generator=torch.Generator().manual_seed(1)).double()
    for column in range(3):
        truth = stats.spearmanr(values[:, column].numpy(), other[:, column].numpy()).statistic
        assert float(spearman(values, other)[column]) == pytest.approx(truth, abs=1e-12)
    assert spearman(torch.ones(20, 3), other).tolist() == [0.0, 0.0, 0.0]


def test_auc_is_scikit_learn_s_and_precision_counts():
    from sklearn.metrics import roc_auc_score

    scores = torch.randint(0, 9, (50,), generator=torch.Generator().manual_seed(0)).double()
    wrong = torch.rand(50, generator=torch.Generator().manual_seed(1)) < 0.3
    assert auc(scores, wrong) == pytest.approx(roc_auc_score(wrong.numpy(), scores.numpy()), abs=1e-12)
    assert precision_at(wrong.double(), wrong, int(wrong.sum())) == 1.0


def test_flipped_labels_are_wrong_and_the_others_are_not():
    labels = torch.arange(200) % 10
    given, wrong = flipped(labels, 0.1, 10)
    assert int(wrong.sum()) == 20
    assert torch.equal(given != labels, wrong)


def test_a_linear_model_with_closed_form_leave_one_out_has_a_score_of_about_one():
    """Ridge regression: every half is solved exactly, and so is leaving each example out of all of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(120, 5, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.randn(5, generator=generator, dtype=torch.float64)
    targets += torch.randn(120, generator=generator, dtype=torch.float64)
    tests = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    penalty = 1.0 * torch.eye(5, dtype=torch.float64)

    def solve(chosen: torch.Tensor) -> torch.Tensor:
        x, y = inputs[chosen], targets[chosen]
        return torch.linalg.solve(x.T @ x + penalty, x.T @ y)

    everything = torch.ones(120, dtype=torch.bool)
    whole = solve(everything)
    inverse = torch.linalg.inv(inputs.T @ inputs + penalty)
    residual = targets - inputs @ whole
    leverage = (inputs @ inverse * inputs).sum(dim=1)
    leave_one_out = (tests @ inverse @ inputs.T) * (residual / (1 - leverage))  # what the answer loses without each
    without = everything.clone()
    without[7] = False
    torch.testing.assert_close(tests @ (whole - solve(without)), leave_one_out[:, 7], rtol=1e-10, atol=1e-12)

    members = halves(100, 120)
    truth = torch.stack([tests @ solve(row) for row in members])
    score = lds(leave_one_out, members, truth)
    assert score.mean > 0.95
    assert score.error < 0.01
    shuffled = leave_one_out[:, torch.randperm(120, generator=generator)]
    assert abs(lds(shuffled, members, truth).mean) < 0.2


def test_the_ceiling_of_noisy_truth_is_what_the_signal_itself_reaches():
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(300, 30, generator=generator)
    first, again = (signal + 0.7 * torch.randn(300, 30, generator=generator) for _ in range(2))
    assert ceiling(first, again).mean == pytest.approx(float(spearman(signal, first).mean()), abs=0.02)


def test_a_difference_of_two_scores_is_known_better_than_either():
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(60, 40, generator=generator).double()
    first = truth + torch.randn(60, 1, generator=generator)  # the halves' own noise, which both methods share
    second = first + 0.1 * torch.randn(60, 40, generator=generator)
    a, b = redrawn(first, truth), redrawn(second, truth)
    assert score_of(a - b).mean == pytest.approx(score_of(a).mean - score_of(b).mean)
    assert score_of(a - b).error < 0.3 * score_of(a).error
    assert correlation(first, truth) == score_of(a)


def test_margins_are_log_odds():
    output = torch.randn(4, 10, dtype=torch.float64)
    labels = torch.tensor([1, 0, 9, 3])
    p = output.softmax(dim=1)[torch.arange(4), labels]
    torch.testing.assert_close(margins(output, labels), (p / (1 - p)).log())


# -- the whole --------------------------------------------------------------------------------


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MNIST setting on data that is always there."""
    small = Setting(
        name="mnist-mlp", data="digits", network=lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        train_images=200, test_images=20, batch=40, epochs=8, lr=0.1,
    )  # fmt: skip
    monkeypatch.setitem(truth_settings.SETTINGS, "mnist-mlp", small)


def test_evaluate_truth_ranks_influence_before_contributions_and_labels(tmp_path: Path, digits: None):
    arguments = ["evaluate", "truth", "mnist-mlp", "--out", str(tmp_path), "--retrains", "40", "--again", "4"]
    arguments += ["--same", "4", "--removals", "2", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    means = {row["method"]: row["fresh"]["mean"] for row in found["rows"]}
    assert means["influence"] > max(means["contribution"], means["score"], means["same label"])
    assert found["mislabelled"]["auc"] > 0.8
    behind = {row["method"]: row["behind"] for row in found["rows"]}
    assert behind.pop("influence") is None
    for method, less in behind.items():
        assert less["mean"] == pytest.approx(means["influence"] - means[method])
    curves = {each["method"]: each for each in found["removal"]}
    assert set(curves) == {"influence", "contribution", "score", "random"}
    assert curves["influence"]["dropped"] == [0, 20, 80]
    assert curves["influence"]["margin"][2] < curves["random"]["margin"][2]
    assert json.loads((tmp_path / "mnist-mlp" / "truth.json").read_text()) == found
    table = CliRunner().invoke(app, arguments[:-1]).stdout
    assert "about the best possible" in " ".join(table.split())


def test_an_unknown_setting_is_a_sentence():
    result = CliRunner().invoke(app, ["evaluate", "truth", "imagenet"])
    assert result.exit_code == 2
    assert "There are: mnist-mlp" in result.stderr
    with pytest.raises(sl.SettingError, match="at least 4"):
        evaluate("mnist-mlp", out=Path("nowhere"), retrains=2)


# -- margins as files -----------------------------------------------------------------------------


def test_a_method_is_scored_from_a_file_of_margins_alone(tmp_path: Path):
    members = halves(12, 40)
    scores = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    fresh = members.float() @ scores.T + 0.1 * torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    Margins("toy", members, fresh, fresh[:6] + 0.1).save(tmp_path / "toy.npz")
    found = Margins.load(tmp_path / "toy.npz")
    assert torch.equal(found.members, members)
    assert torch.equal(found.fresh, fresh)
    assert found.lds(scores) == lds(scores, members, fresh)
    np.savez(tmp_path / "mine.npz", scores=scores.numpy(), method="mine")
    np.savez(tmp_path / "noise.npz", scores=torch.randn(7, 40, generator=torch.Generator().manual_seed(2)).numpy())
    command = ["evaluate", "scores", str(tmp_path / "noise.npz"), str(tmp_path / "mine.npz")]
    said = CliRunner().invoke(app, [*command, "--margins", str(tmp_path / "toy.npz"), "--json"])
    rows = json.loads(said.stdout)["rows"]
    assert [row["method"] for row in rows] == ["mine", "noise"]
    assert rows[0]["lds"]["mean"] == pytest.approx(lds(scores, members, fresh).mean)
    assert rows[1]["behind"]["mean"] == pytest.approx(rows[0]["lds"]["mean"] - rows[1]["lds"]["mean"])
    assert "best possible" in CliRunner().invoke(app, [*command, "--margins", str(tmp_path / "toy.npz")]).stdout


def test_scores_of_another_shape_are_refused(tmp_path: Path):
    margins = Margins("toy", halves(4, 40), torch.zeros(4, 7))
    with pytest.raises(sl.SettingError, match=r"7 test inputs and 40 training examples"):
        margins.lds(torch.zeros(40, 7))
    (tmp_path / "broken.npz").write_bytes(b"nothing")
    with pytest.raises(sl.SettingError, match="not a file of margins"):
        Margins.load(tmp_path / "broken.npz")


def test_dattri_scores_the_same_margins_as_we_do():
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed")
    members = halves(12, 40)
    scores = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    margins = Margins("toy", members, members.float() @ scores.T + 5 * noise)
    assert float(metric.lds(scores.T, margins.for_dattri)[0].mean()) == pytest.approx(margins.lds(scores).mean)


KEPT = sorted((Path(__file__).parents[2] / "docs" / "truth").glob("*.npz"))


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_the_margins_in_docs_are_those_of_a_setting(path: Path):
    kept = Margins.load(path)
    setting = truth_settings.setting_named(path.stem)
    assert kept.setting == setting.name
    assert kept.fresh.shape == (len(kept.members), setting.test_images)
    assert torch.equal(kept.members, halves(*kept.members.shape))
    assert path.stat().st_size < 1 << 20
