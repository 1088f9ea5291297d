"""The paper's remarks, each as a claim about the functions that make its table."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from real_data import need
from spotlights_paper.remarks import DualLayer, compact, dot, feed_forward, outside, softmax

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def batches(steps: int = 12):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randn(5, 7, generator=generator, dtype=torch.float64), torch.randint(3, (5,), generator=generator)


def test_a_dual_layer_with_the_dot_product_is_a_linear_layer_under_sgd():
    dual, weight = DualLayer(dot, 7, 3, lr=0.3), torch.zeros(3, 7, dtype=torch.float64, requires_grad=True)
    for inputs, labels in batches():
        dual.step(inputs, labels)
        (gradient,) = torch.autograd.grad(F.cross_entropy(inputs @ weight.T, labels), weight)
        weight = (weight - 0.3 * gradient).detach().requires_grad_()
    queries = next(batches())[0]
    torch.testing.assert_close(dual(queries), queries @ weight.detach().T, **EXACT)
    assert len(dual.keys) == 60


def test_a_dual_layer_with_a_softmax_kernel_learns():
    dual = DualLayer(softmax, 7, 3, lr=20.0)
    data = list(batches(1)) * 30
    for inputs, labels in data:
        dual.step(inputs, labels)
    assert torch.equal(dual(data[0][0]).argmax(dim=1), data[0][1])


def test_only_what_is_orthogonal_to_all_keys_is_outside():
    keys = torch.eye(6)[:3] @ torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    inside = torch.tensor([[1.0, -2.0, 0.5]]) @ keys
    orthogonal = torch.linalg.svd(keys)[2][3:4]
    mixed = inside / inside.norm() * 0.8 + orthogonal * 0.6
    shares = outside(keys, torch.cat([inside, orthogonal, mixed]))
    torch.testing.assert_close(shares, torch.tensor([0.0, 1.0, 0.6], dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    need("mnist")
    generator = torch.Generator().manual_seed(2)
    sizes = (784, 20, 16, 10)
    shapes = {f"layers.{i}.weight": (sizes[i + 1], sizes[i]) for i in range(3)}
    shapes |= {f"layers.{i}.bias": (sizes[i + 1],) for i in range(3)}
    return {name: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def test_all_singular_directions_make_the_layer_and_fewer_do_not(weights: dict[str, torch.Tensor]):
    lines = compact(weights, slots=1000, images=50).rows
    errors = [float(line[2]) for line in lines[:-2]]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[-2]
    assert lines[-1][1] == f"{1000 * (20 + 16):,}"


def test_hidden_units_as_a_memory_add_up_to_the_logit(weights: dict[str, torch.Tensor]):
    terms = [float(line[3]) for line in feed_forward(weights, image=3).rows]
    assert sum(terms[:-1]) == pytest.approx(terms[-1], abs=5e-3)
