"""The joint estimate of influence: Gauss-Newton over all layers, in the space of examples."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights.query.example_gradients import Gram, LayerGradients
from spotlights.query.joint import find_joint

EXAMPLES, LR = 24, 0.05
Loss = Callable[[Tensor, Tensor], Tensor]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square().mean()


class Run:
    """A recorded run, and the same gradients by autograd, one example at a time."""

    def __init__(self, path: Path, loss: Loss, *, images: bool = False, steps: int = 12, adam: bool = False) -> None:
        torch.manual_seed(0)
        outputs = 1 if loss is squared else 3
        if images:
            self.inputs = torch.randn(EXAMPLES, 1, 5, 5).double()
            self.model: nn.Module = nn.Sequential(
                nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, outputs)
            ).double()
        else:
            self.inputs = torch.randn(EXAMPLES, 4).double()
            self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
        self.targets = torch.randn(EXAMPLES).double() if loss is squared else torch.arange(EXAMPLES) % 3
        self.parameters = list(self.model.parameters())
        self.visits: list[tuple[int, Tensor, Tensor]] = []
        """The example, the gradient of its own loss, and the gradient of that loss with respect to the output."""
        fresh = copy.deepcopy(self.model)
        optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(self.parameters, lr=LR)
        with sl.record(self.model, optimizer, path, dtype="float64") as recorder:
            for step in range(steps):
                batch = torch.arange(EXAMPLES).roll(5 * step)[:6]
                fresh.load_state_dict(self.model.state_dict())
                self.visits += [(example, *self._own(fresh, loss, example)) for example in batch.tolist()]
                recorder.batch(example=batch, label=batch % 3)
                optimizer.zero_grad()
                loss(self.model(self.inputs[batch]), self.targets[batch]).backward()
                optimizer.step()
        self.memory = sl.open(path)

    def _own(self, model: nn.Module, loss: Loss, example: int) -> tuple[Tensor, Tensor]:
        output = model(self.inputs[example : example + 1])
        one = loss(output, self.targets[example : example + 1])
        error, *gradients = torch.autograd.grad(one, [output, *model.parameters()])
        return torch.cat([gradient.flatten() for gradient in gradients]), error[0]

    def gradients(self, target: Callable[[Tensor], Tensor], queries: Tensor) -> Tensor:
        rows = []
        for query in queries:
            grads = torch.autograd.grad(target(self.model(query[None])).sum(), self.parameters)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
        return torch.stack(rows)

    def dense(self, target: Callable[[Tensor], Tensor], queries: Tensor, *, balance: bool, damping: float) -> Tensor:
        """score = R (A Aᵀ + λ mean(diag) I)⁻¹ A F, from dense matrices."""
        signed = self.visits[0][2].numel() == 1
        A, R = torch.zeros(EXAMPLES, self.visits[0][1].numel()).double(), torch.zeros(EXAMPLES).double()
        counts = torch.zeros(EXAMPLES).double()
        for example, gradient, error in self.visits:
            rho = error[0] if signed else error.norm().sqrt()
            A[example] += gradient / rho
            R[example] -= LR / 6 * rho
            counts[example] += 1
        A /= counts[:, None]
        F_ = self.gradients(target, queries)
        if balance:
            sizes = [p.numel() for p in self.parameters]
            layers = [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]  # a weight and its bias
            parts = [part / part.square().sum(dim=1).mean().sqrt() for part in A.split(layers, dim=1)]
            norms = [part.square().sum(dim=1).mean().sqrt() for part in A.split(layers, dim=1)]
            F_ = torch.cat([f / n for f, n in zip(F_.split(layers, dim=1), norms, strict=True)], dim=1)
            A = torch.cat(parts, dim=1)
        gram = A @ A.T
        gram += damping * gram.diagonal().mean() * torch.eye(EXAMPLES).double()
        return (R[:, None] * torch.linalg.solve(gram, A @ F_.T)).T


def in_order(totals: sl.results.Totals) -> Tensor:
    return totals.values[:, torch.tensor(totals.groups).argsort()]


def first(output: Tensor) -> Tensor:
    return output[:, 0]


@pytest.mark.parametrize("loss", [squared, F.cross_entropy])
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("balance", [False, True])
def test_the_joint_estimate_equals_the_dense_computation(tmp_path: Path, loss: Loss, images: bool, balance: bool):
    run = Run(tmp_path / "a.memory", loss, images=images)
    queries = run.inputs[:3] + 0.1
    influence = run.memory.attend(run.model, queries).influence(first, rule="joint", damping=0.7, balance=balance)
    truth = run.dense(first, queries, balance=balance, damping=0.7)
    torch.testing.assert_close(in_order(influence.totals("example")), truth, rtol=1e-9, atol=1e-10 * truth.abs().max())
    torch.testing.assert_close(influence.total(), truth.sum(dim=1), rtol=1e-9, atol=1e-12)


def test_under_adam_the_preconditioner_is_left_out(tmp_path: Path):
    run = Run(tmp_path / "a.memory", squared, adam=True)
    influence = run.memory.attend(run.model, run.inputs[:2]).influence(first)
    assert influence.rule == "joint"
    truth = run.dense(first, run.inputs[:2], balance=True, damping=1.0)
    torch.testing.assert_close(in_order(influence.totals("example")), truth, rtol=1e-9, atol=1e-12)


def test_keys_that_are_stored_once_give_the_same_products(tmp_path: Path):
    run = Run(tmp_path / "a.memory", F.cross_entropy)
    view, everyone = run.memory.view, torch.arange(EXAMPLES)
    numbers = find_joint(view, ["0", "2"], "2", None).visits.gradient
    by_keys, by_slots = (LayerGradients(view, view.reader.layer("0"), numbers, by_keys=by) for by in (True, False))
    assert by_keys.by_keys
    for chosen in (everyone, torch.tensor([2, 3, 11])):
        for quick, slow in zip(by_keys.gram(chosen, balance=False), by_slots.gram(chosen, balance=False), strict=True):
            torch.testing.assert_close(quick, slow, rtol=1e-10, atol=1e-12)


def test_classes_take_both_estimates_with_one_spread(tmp_path: Path):
    run = Run(tmp_path / "a.memory", F.cross_entropy)
    spot = run.memory.attend(run.model, run.inputs[:3])
    both, whitened, joint = (
        in_order(spot.influence(1, rule=rule).totals("example")) for rule in (None, "whitened", "joint")
    )
    spread = [each.std(dim=1, correction=0, keepdim=True) for each in (whitened, joint)]
    assert spot.influence(1).rule == "both"
    torch.testing.assert_close(both, whitened + joint * spread[0] / spread[1], rtol=1e-9, atol=1e-12)
    of_view = run.memory.where(label=2).attend(run.model, run.inputs[:3]).influence(1)
    torch.testing.assert_close(of_view.total(), both[:, 2::3].sum(dim=1), rtol=1e-9, atol=1e-12)


def test_the_loss_is_told_by_the_errors_or_asked_for(tmp_path: Path):
    run = Run(tmp_path / "a.memory", F.cross_entropy)
    spot = run.memory.attend(run.model, run.inputs[:1])
    assert "cross-entropy" in str(spot.influence(1, rule="joint").note)
    assert "squared" in str(spot.influence(1, rule="joint", loss="squared").note)
    assert spot.influence(1, loss="squared").rule == "joint"
    with pytest.raises(sl.SettingError, match="there are classes, squared, tokens"):
        spot.influence(1, loss="hinge")
    with pytest.raises(sl.SettingError, match="there are whitened, joint, both"):
        spot.influence(1, rule="best")


def test_a_joint_estimate_that_takes_long_is_made_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path / "a.memory", F.cross_entropy)
    monkeypatch.setattr("spotlights.query.attention.MOST_UNASKED", 10.0)
    spot = run.memory.attend(run.model, run.inputs[:1])
    unasked = spot.influence(1)
    assert unasked.rule == "whitened"
    assert "joint estimate" in str(unasked.note)
    assert spot.influence(1, rule="both").rule == "both"
    monkeypatch.setattr("spotlights.query.attention.MOST", 10.0)
    with pytest.raises(sl.TooLargeError, match="layers="):
        sl.open(run.memory.path).attend(run.model, run.inputs[:1]).influence(1, rule="both")


def test_as_many_landmarks_as_examples_give_the_exact_inverse(tmp_path: Path):
    run = Run(tmp_path / "a.memory", F.cross_entropy)
    layers = list(run.memory.layers)
    joint = find_joint(run.memory.view, layers, layers[-1], None)
    products = torch.randn(EXAMPLES, 2).double()
    few, all_, exact = (
        Gram(list(joint.layers.values()), EXAMPLES, balance=True, landmarks=landmarks).solve(products, 1.0)
        for landmarks in (12, EXAMPLES, None)
    )
    torch.testing.assert_close(all_, exact, rtol=1e-6, atol=1e-6)
    assert (few - exact).norm() < 0.3 * exact.norm()


@pytest.mark.parametrize("wide", [False, True])
def test_where_an_example_holds_many_answers_the_inverse_is_that_of_kfac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: bool
):
    if wide:
        monkeypatch.setattr("spotlights.query.kronecker._WIDE", 2)
    torch.manual_seed(0)
    texts, answers = torch.randn(EXAMPLES, 3, 4).double(), torch.randint(3, (EXAMPLES, 3))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    visits: list[list[list[tuple[Tensor, Tensor]]]] = [[] for _ in range(EXAMPLES)]
    """Of each example and visit: the keys and the errors of both layers."""
    networks: list[nn.Sequential] = []

    def rows(example: int) -> list[tuple[Tensor, Tensor]]:
        hidden = model[0](texts[example])
        inside = hidden.tanh()
        output = model[2](inside)
        errors = torch.autograd.grad(F.cross_entropy(output, answers[example]), [hidden, output])
        keys = [torch.cat([key.detach(), torch.ones(3, 1).double()], dim=1) for key in (texts[example], inside)]
        return list(zip(keys, errors, strict=True))

    with sl.record(model, optimizer, tmp_path / "a.memory", dtype="float64") as recorder:
        for step in range(24):
            batch = torch.arange(EXAMPLES).roll(5 * step)[:6]
            recorder.batch(example=batch)
            optimizer.zero_grad()
            F.cross_entropy(model(texts[batch]).flatten(0, 1), answers[batch].flatten()).backward()
            with recorder.paused():
                for example in batch.tolist():
                    visits[example].append(rows(example))
            optimizer.step()
            if step + 1 in (6, 12, 18, 24):  # after each quarter
                networks.append(copy.deepcopy(model))

    def number(output: Tensor) -> Tensor:
        return output.log_softmax(dim=-1)[..., 0].mean(dim=-1)

    asked = texts[:2] + 0.1
    late = [seen[-len(seen) // 2 :] for seen in visits]
    truth = torch.zeros(2, EXAMPLES).double()
    for place in range(2):
        k = torch.cat([visit[place][0] for seen in visits for visit in seen])
        e = torch.cat([visit[place][1] / len(seen) for seen in late for visit in seen])
        c, b = 3 * k.T @ k / len(k), e.T @ e / len(e)  # three rows for each input
        b = torch.diag(b.diagonal()) if wide else b
        sides = [(m + 0.1 * m.diagonal().mean() * torch.eye(len(m)).double()).inverse() for m in (b, c)]
        for query in range(2):
            parts = [
                torch.autograd.grad(number(network(asked[query])), [own.weight, own.bias])
                for network in networks
                for own in (network[2 * place],)
            ]
            weight, bias = (torch.stack(some).mean(dim=0) for some in zip(*parts, strict=True))
            solved = sides[0] @ torch.cat([weight, bias[:, None]], dim=1) @ sides[1]
            for example, seen in enumerate(late):
                total = torch.stack([visit[place][1].T @ visit[place][0] for visit in seen]).sum(dim=0)
                truth[query, example] -= LR / 6 * (total * solved).sum()
    influence = sl.open(tmp_path / "a.memory").attend(model, asked).influence(number, damping=0.1)
    torch.testing.assert_close(in_order(influence.totals("example")), truth, rtol=1e-9, atol=1e-12)
    assert influence.loss == "tokens"
    assert "over training, as for a cross-entropy at each position" in str(influence.note)
    vars(model)["lock"] = threading.Lock()  # nothing that can be copied
    alone = sl.open(tmp_path / "a.memory").attend(model, asked).influence(number, damping=0.1)
    assert "of the trained network alone" in str(alone.note)
