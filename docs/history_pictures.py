"""Makes the pictures and the numbers of docs/history.md: `python docs/history_pictures.py` (two minutes).

1. Forgetting, as it happens: a network learns MNIST, then Fashion-MNIST. For digits that it knew in between and has
   forgotten at the end: the margin of the right answer after every step, with what each task added to it.
2. One wrong label: a network that is trained with a single mislabelled image, similar to a test digit, answers that
   digit wrongly. The history of the wrong answer finds the image.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from spotlights_paper.datasets import load

IMAGES = Path(__file__).parent / "images"
BATCH = 64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def images_of(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels."""
    data = load(name)
    return tuple(  # type: ignore[return-value]
        tensor for split in (data.train, data.test) for tensor in (split.images.flatten(1).float() / 255, split.labels)
    )


Batches = Iterator[tuple[Tensor, Tensor, dict[str, object]]]


def train(model: nn.Module, batches: Batches, path: Path | None, *, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    recorder = None if path is None else sl.record(model, optimizer, path).__enter__()
    for images, labels, columns in batches:
        if recorder is not None:
            recorder.batch(label=labels, **columns)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if recorder is not None:
        recorder.__exit__(None, None, None)


# -- forgetting --------------------------------------------------------------------------------


def forgetting(folder: Path, steps: int, digits: int) -> None:
    tasks = {name: images_of(name) for name in ("mnist", "fashion-mnist")}
    model, path = network(), folder / "continual.memory"
    images, labels = tasks["mnist"][2:]
    known = torch.zeros(len(labels), dtype=torch.bool)

    def batches() -> Batches:
        for number, (name, (inputs, classes, *_)) in enumerate(tasks.items()):
            generator = torch.Generator().manual_seed(number)
            for _ in range(steps):
                ids = torch.randint(len(classes), (BATCH,), generator=generator)
                yield inputs[ids], classes[ids], {"example": ids + 100_000 * number, "source": name}
            if name == "mnist":
                known.copy_(model(images).argmax(dim=1) == labels)

    train(model, batches(), path, lr=0.02)
    right = model(images).argmax(dim=1) == labels
    print(f"MNIST: {known.float().mean():.1%} right after its own {steps} steps, {right.float().mean():.1%} at the end")
    chosen = (known & ~right).nonzero().flatten()[:digits]
    wanted = labels[chosen]

    def margin(output: Tensor) -> Tensor:
        others = output.masked_fill(F.one_hot(wanted, 10).bool(), -torch.inf).amax(dim=1)
        return output.gather(1, wanted[:, None])[:, 0] - others

    history = sl.open(path).attend(model, images[chosen]).history({"margin": margin})
    print(history)
    by_source = history.totals("source")
    for name, total in zip(by_source.groups, by_source.values.mean(dim=0).tolist(), strict=True):
        print(f"mean over {len(chosen)} forgotten digits: {name} added {total:+.2f}")
    print(history.forgetting(longest=1).to_pandas().head(5).to_string())
    panels = [history.panel(number, by="source") for number in range(len(chosen))]
    mean = replace(
        panels[0],
        curve=np.mean([panel.curve for panel in panels], axis=0),
        areas=np.mean([panel.areas for panel in panels], axis=0),
        what="margin of the right digit",
        title=f"{len(chosen)} digits that the network forgot: who taught them, who erased them, when",
    )
    sl.figures.save(sl.figures.plot_history(mean), IMAGES / "history-forgetting.png")


# -- one wrong label ---------------------------------------------------------------------------


def wrong_label(folder: Path, steps: int) -> None:
    inputs, classes, tests, answers = images_of("mnist")
    inputs, classes = inputs[:5000], classes[:5000]

    def batches(wrong: tuple[Tensor, int] | None) -> Batches:
        generator = torch.Generator().manual_seed(1)
        for step in range(steps):
            ids = torch.randint(len(classes), (BATCH,), generator=generator)
            images, labels = inputs[ids], classes[ids]
            if wrong is not None and step % 8 == 0:  # it comes once in eight batches
                images, labels, ids = images.clone(), labels.clone(), ids.clone()
                images[0], labels[0], ids[0] = wrong[0], wrong[1], len(classes)
            yield images, labels, {"example": ids}

    clean = network()
    train(clean, batches(None), None, lr=0.05)
    logits = clean(tests).detach()
    margins = logits.gather(1, answers[:, None])[:, 0] - logits.scatter(1, answers[:, None], -torch.inf).amax(dim=1)
    query = int((margins - 2.0).abs().argmin())  # an answer that is right, but not by much
    right = int(answers[query])
    wrong = int(logits[query].scatter(0, answers[query], -torch.inf).argmax())
    noisy = (tests[query] + 0.1 * torch.randn(784, generator=torch.Generator().manual_seed(2))).clamp(0, 1)
    model, path = network(), folder / "wrong.memory"
    train(model, batches((noisy, wrong)), path, lr=0.05)
    said = int(model(tests[query : query + 1]).argmax())
    before = int(logits[query].argmax())
    print(f"test digit {query}, a {right}: without the wrong label the network says {before}, with it {said}")
    memory = sl.open(path)
    history = memory.attend(model, tests[query : query + 1]).history(f"{wrong}-{right}")
    print(history)
    print(history.top(3))
    first = next(history.top(1).rows(0))
    print(f"the mislabelled image is example {len(classes)}; the history's first is {first['example']}")
    by_contribution = memory.attend(model, tests[query : query + 1])["4"].contributions(f"{wrong}-{right}")
    print("first by contribution to the last layer:", next(by_contribution.top(1, by="example").rows(0))["example"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="Of each task.")
    parser.add_argument("--digits", type=int, default=24, help="How many forgotten digits.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        forgetting(Path(name), options.steps, options.digits)
        wrong_label(Path(name), options.steps)
