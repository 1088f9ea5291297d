"""The paper's remarks as tables: other kernels (3.2), orthogonal inputs (3.3), non-uniqueness (3.4), Equation 17.

`python -m spotlights_paper.remarks RUN` prints the tables for a run of `mnist-single`; its memory is not needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import spotlights as sl
from spotlights.results import build
from spotlights_paper.experiments.images import prepare

Weights = dict[str, Tensor]
Kernel = Callable[[Float[Tensor, "slots inputs"], Float[Tensor, "queries inputs"]], Float[Tensor, "queries slots"]]


# -- Remark 3.2: other kernels ----------------------------------------------------------------


def dot(
    keys: Float[Tensor, "slots inputs"], queries: Float[Tensor, "queries inputs"]
) -> Float[Tensor, "queries slots"]:
    """What a linear layer computes."""
    return queries @ keys.T


def softmax(
    keys: Float[Tensor, "slots inputs"], queries: Float[Tensor, "queries inputs"]
) -> Float[Tensor, "queries slots"]:
    """Attention with weights that add up to one, as in a transformer."""
    return (queries @ keys.T / keys.shape[1] ** 0.5).softmax(dim=1)


class DualLayer:
    """A layer that has no matrix: `Σ value · kernel(key, query)`. Training adds one slot for each example of a step.

    With the dot product this is a linear layer, trained by SGD from zero weights. With another kernel, the values move
    by the gradient of the output: only the dual form can be trained, and each step reads all slots.
    """

    def __init__(self, kernel: Kernel, inputs: int, outputs: int, *, lr: float) -> None:
        self.kernel, self.lr = kernel, lr
        self.keys, self.values = torch.zeros(0, inputs), torch.zeros(0, outputs)

    def __call__(self, queries: Float[Tensor, "queries inputs"]) -> Float[Tensor, "queries outputs"]:
        if not len(self.keys):
            return torch.zeros(len(queries), self.values.shape[1], dtype=queries.dtype)
        return self.kernel(self.keys, queries) @ self.values

    def step(self, inputs: Float[Tensor, "batch inputs"], labels: Int64[Tensor, "batch"]) -> None:
        """One step of gradient descent on the mean cross-entropy."""
        errors = (self(inputs).softmax(dim=1) - F.one_hot(labels, self.values.shape[1])) / len(inputs)
        self.keys = torch.cat([self.keys.to(inputs.dtype), inputs])
        self.values = torch.cat([self.values.to(inputs.dtype), -self.lr * errors])


def other_kernels(*, steps: int = 400, batch: int = 32, images: int = 1000) -> Any:
    """A layer of ten outputs trained on MNIST: its matrix, its dual form, and a dual form with a softmax kernel."""
    data = prepare("mnist", None, images)
    generator = torch.Generator().manual_seed(0)
    inputs = data.train.inputs.flatten(1)
    picks = [torch.randint(len(inputs), (batch,), generator=generator) for _ in range(steps)]
    rows = []
    weight = torch.zeros(10, inputs.shape[1])
    for name, kernel, lr in (
        ("matrix", None, 0.01),
        ("dual form, dot", dot, 0.01),
        ("dual form, softmax", softmax, 200.0),
    ):
        layer = None if kernel is None else DualLayer(kernel, inputs.shape[1], 10, lr=lr)
        took = []
        for some in picks:
            started = time.perf_counter()
            if layer is not None:
                layer.step(inputs[some], data.train.labels[some])
            else:
                errors = (inputs[some] @ weight.T).softmax(dim=1) - F.one_hot(data.train.labels[some], 10)
                weight -= lr * errors.T @ inputs[some] / batch
            took.append(1000 * (time.perf_counter() - started))
        test = data.test.inputs.flatten(1)
        said = (test @ weight.T if layer is None else layer(test)).argmax(dim=1)
        right = float((said == data.test.labels).double().mean())
        tenth = steps // 10
        times = [sum(part) / tenth for part in (took[tenth : 2 * tenth], took[-tenth:])]
        held = weight.numel() if layer is None else layer.keys.numel() + layer.values.numel()
        rows.append([name, f"{right:.1%}", *(f"{milliseconds:.2f} ms" for milliseconds in times), f"{held:,}"])
    note = f"{steps} steps of {batch} images; accuracy on {images:,} test images."
    head = ["layer", "accuracy", "a step, early", "a step at the end", "numbers held"]
    return build("Remark 3.2: training with another kernel", head, rows, note)


# -- Remarks 3.3 and 3.4, Equation 17: one trained network ------------------------------------


def _layer(weights: Weights, layer: int, inputs: Float[Tensor, "*images inputs"]) -> Float[Tensor, "*images units"]:
    return inputs @ weights[f"layers.{layer}.weight"].T + weights[f"layers.{layer}.bias"]


def _activations(weights: Weights, images: Float[Tensor, "images inputs"]) -> list[Float[Tensor, "images units"]]:
    """What reaches each layer."""
    first = _layer(weights, 0, images).relu()
    return [images, first, _layer(weights, 1, first).relu()]


def outside(
    keys: Float[Tensor, "keys inputs"], queries: Float[Tensor, "queries inputs"], *, tolerance: float = 1e-6
) -> Float[Tensor, "queries"]:
    """The share of each query's length that is orthogonal to all keys."""
    values, directions = torch.linalg.eigh(keys.double().T @ keys.double())
    spanned = directions[:, values > tolerance**2 * values[-1]]
    queries = queries.double()
    return (queries - (queries @ spanned) @ spanned.T).norm(dim=1) / queries.norm(dim=1)


def orthogonal_inputs(weights: Weights, *, images: int = 1000) -> Any:
    """How much of real test inputs lies outside the span of the keys."""
    data = prepare("mnist", None, images)
    keys = _activations(weights, data.train.inputs.flatten(1))
    queries = _activations(weights, data.test.inputs.flatten(1))
    rows = []
    for layer, (some, asked) in enumerate(zip(keys, queries, strict=True)):
        share = outside(some, asked)
        rank = int(torch.linalg.matrix_rank(some.double().T @ some.double(), hermitian=True))
        spanned, far = f"{rank} of {some.shape[1]}", f"{int((share > 0.01).sum())}"
        rows.append([f"layers.{layer}", spanned, f"{share.median():.1e}", f"{share.max():.1e}", far])
    note = f"{images:,} test images. Keys: the training images as they reach each layer at the end of training."
    head = ["layer", "directions spanned", "outside, median", "outside, largest", "images with more than 1 %"]
    return build("Remark 3.3: how much of a test input is orthogonal to all keys", head, rows, note)


def compact(weights: Weights, *, slots: int, images: int = 1000) -> Any:
    """The middle layer as an attention over r singular directions, beside the dual form over all slots."""
    data = prepare("mnist", None, images)
    weight = weights["layers.1.weight"]
    u, s, vt = torch.linalg.svd(weight)
    queries = _activations(weights, data.test.inputs.flatten(1))[1]
    outputs, inputs = weight.shape
    rows = []
    for r in sorted({r for r in (1, 2, 5, 10, 20, 50, 100, 200, 400, 800) if r <= len(s)} | {len(s)}):
        keys, values = s[:r, None] * vt[:r], u[:, :r].T
        attended = sl.dot_attention(keys, values, queries)
        error = float((queries @ weight.T - attended).norm() / (queries @ weight.T).norm())
        logits = _layer(weights, 2, (attended + weights["layers.1.bias"]).relu())
        right = float((logits.argmax(dim=1) == data.test.labels).double().mean())
        rows.append([f"{r} singular directions", f"{r * (inputs + outputs):,}", f"{error:.1e}", f"{right:.1%}"])
    rows.append(["the matrix", f"{inputs * outputs:,}", "0", rows[-1][3]])
    rows.append([f"the dual form, {slots:,} slots", f"{slots * (inputs + outputs):,}", "rounding", rows[-1][3]])
    note = f"layers.1, {images:,} test images. A singular direction belongs to no training example."
    head = ["keys and values", "numbers", "error", "accuracy"]
    return build("Remark 3.4: one layer, many attention systems", head, rows, note)


def feed_forward(weights: Weights, *, image: int = 5938, k: int = 5) -> Any:
    """Equation 17: two layers as a memory of hidden units, for one test image and its answer."""
    test = prepare("mnist", None, image + 1).test
    query = _activations(weights, test.inputs[image : image + 1].flatten(1))[1][0]
    scores = _layer(weights, 1, query).relu()
    logits = _layer(weights, 2, scores)
    target = int(logits.argmax())
    values = weights["layers.2.weight"][target]
    terms = scores * values
    order = terms.abs().argsort(descending=True)
    rows = [
        [f"hidden unit {unit}", f"{scores[unit]:.3f}", f"{values[unit]:+.3f}", f"{terms[unit]:+.3f}"]
        for unit in order[:k].tolist()
    ]
    others = f"the other {len(terms) - k} units ({int((scores > 0).sum())} of all are active)"
    rows.append([others, "", "", f"{terms[order[k:]].sum():+.3f}"])
    rows.append(["bias", "", "", f"{weights['layers.2.bias'][target]:+.3f}"])
    rows.append([f"logit of {target}", "", "", f"{logits[target]:+.3f}"])
    head = ["key: a row of W₁", "score after ReLU", "value: an entry of W₂", "score · value"]
    note = "The keys are weights, not training examples; in the dual form each of both layers is a sum over examples."
    return build(f"Equation 17: test image {image} through layers.1 and layers.2", head, rows, note)


def main(folder: Path) -> None:
    """Prints all tables."""
    from spotlights.cli.options import print_result
    from spotlights_paper.experiments.running import MODEL, load_run

    weights, run = load_file(folder / MODEL), load_run(folder)
    for table in (
        other_kernels(),
        orthogonal_inputs(weights),
        compact(weights, slots=run.slots),
        feed_forward(weights),
    ):
        print_result(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
