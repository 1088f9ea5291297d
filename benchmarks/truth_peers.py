"""Other tools' answers to the same question, through their own published packages, beside ours.

    pip install 'spotlights[peers]'
    spotlights evaluate truth mnist-mlp --out runs/truth      # the truth and our own answers
    python benchmarks/truth_peers.py mnist-mlp --out runs/truth
    spotlights evaluate truth mnist-mlp --out runs/truth      # the table, now with the peers

Each peer writes one file, `scores/NAME.npz`, with a number for each test image and training image and its seconds;
whatever lies there is scored against the same retrained networks. All peers get the network of the recorded run (TRAK
with ten models gets ten of its own) and the margin of the true class as the number of interest. EK-FAC gets several
dampings, and the table has each.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from spotlights_paper.experiments.truth.data import Data
from spotlights_paper.experiments.truth.margins import MethodScores, keep_answer
from spotlights_paper.experiments.truth.recorded import record
from spotlights_paper.experiments.truth.retraining import Job, trained
from spotlights_paper.experiments.truth.settings import (
    Setting,
    epoch_orders,
    initial_network,
    prepare,
    setting_named,
)

MODELS = 10
"""Of TRAK's ensemble."""
CHECKPOINTS = 10
"""Of TracIn, evenly over training."""
DAMPINGS = (None, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Of EK-FAC; None is the package's own choice."""
PROJECTION = 512
"""Dimensions of TRAK's random projection: dattri's default."""


def loaders(data: Data, batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train = TensorDataset(data.train.inputs, data.train.labels)
    test = TensorDataset(data.test.inputs, data.test.labels)
    return DataLoader(train, batch_size=batch), DataLoader(test, batch_size=batch)


def checkpoints(setting: Setting, data: Data, count: int) -> list[dict[str, Tensor]]:
    """The recorded run's network at the end of evenly spaced epochs."""
    model = initial_network(setting, 0)
    optimizer = setting.make_optimizer(model.parameters())
    found, every = [], setting.epochs / count
    for number, epoch in enumerate(epoch_orders(len(data.train), setting.epochs, 0), start=1):
        for batch in epoch.split(setting.batch):
            optimizer.zero_grad()
            data.loss(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
            optimizer.step()
        if number >= every * (len(found) + 1) - 1e-9:
            found.append({name: held.clone() for name, held in model.state_dict().items()})
    return found


def ensemble(setting: Setting, data: Data, folder: Path) -> list[dict[str, Tensor]]:
    """Networks trained on all examples with seeds of their own."""
    path = folder / "ensemble.pt"
    if not path.exists():
        everything = torch.arange(len(data.train))
        stacked = next(trained(setting, data, [Job(everything, 9000 + seed) for seed in range(MODELS)]))
        torch.save([{name: held[i].clone() for name, held in stacked.items()} for i in range(MODELS)], path)
    return torch.load(path, weights_only=True)


# -- dattri -----------------------------------------------------------------------------------


def _task(setting: Setting, data: Data, states: list[dict[str, Tensor]]) -> tuple[Any, nn.Module]:
    from dattri.task import AttributionTask

    model = setting.network()

    def loss(params: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        image, label = pair
        return data.loss(functional_call(model, params, (image[None],)), label[None])

    def margin(params: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        image, label = pair
        return data.number(functional_call(model, params, (image[None],)), label[None])[0]

    return AttributionTask(loss, model, states, target_func=margin), model


def grad_dot(setting: Setting, data: Data, states: list[dict[str, Tensor]]) -> Tensor:
    """Products of gradients at one checkpoint (GradDot) or several (TracIn). A loss's gradient: the sign is turned."""
    from dattri.algorithm.tracin import TracInAttributor

    task, _ = _task(setting, data, states)
    attributor = TracInAttributor(task, torch.ones(len(states)), normalized_grad=False)
    train, test = loaders(data, 500)
    attributor.projector_kwargs = None
    return -attributor.attribute(train, test).T


def trak(setting: Setting, data: Data, states: list[dict[str, Tensor]], folder: Path) -> tuple[Tensor, float]:
    """The mean over models of TRAK's kernel, times the mean of 1 − p, and its seconds.

    Each model's part is kept, for it takes long: a run that was stopped goes on with the next model.
    """
    parts = [trak_part(setting, data, state, folder / f"trak-{number}.pt") for number, state in enumerate(states)]
    kernels, doubts, seconds = zip(*parts, strict=True)
    return torch.stack(kernels).mean(dim=0) * torch.stack(doubts).mean(dim=0), sum(seconds)


def trak_part(setting: Setting, data: Data, state: dict[str, Tensor], path: Path) -> tuple[Tensor, Tensor, float]:
    from dattri.algorithm.trak import TRAKAttributor

    if not path.exists():
        started = time.perf_counter()
        task, model = _task(setting, data, [state])

        def probability(params: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
            image, label = pair
            output = functional_call(model, params, (image[None],))
            if data.kind == "squared":  # 1 − this is what the answer lacks: the error of the loss with its sign turned
                return 1 - (label - output[0, 0])
            return (-data.loss(output, label[None])).exp()

        attributor = TRAKAttributor(task, probability, projector_kwargs={"proj_dim": PROJECTION})
        attributor.grad_loss_func = attributor.grad_target_func  # TRAK's features are gradients of the margin
        train, test = loaders(data, len(data.train))  # the projection is drawn anew for every batch
        with torch.no_grad():
            attributor.cache(train)
            doubt, attributor.Q = attributor.Q, torch.ones(len(data.train))
            kernel = attributor.attribute(test).T
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save((kernel, doubt, time.perf_counter() - started), path)
    return torch.load(path, weights_only=True)


# -- kronfluence ------------------------------------------------------------------------------


def ekfac(setting: Setting, data: Data, state: dict[str, Tensor], folder: Path, damping: float | None) -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Margin(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, labels = batch
            output = model(inputs)
            if sample:
                with torch.no_grad():
                    if data.kind == "squared":
                        labels = output[:, 0] + torch.randn(len(output)) * 0.5**0.5
                    else:
                        labels = torch.multinomial(output.flatten(0, -2).softmax(dim=-1), 1).view(labels.shape)
            return data.loss(output, labels) * len(inputs)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            inputs, labels = batch
            return -data.number(model(inputs), labels).sum()

    model = setting.network()
    model.load_state_dict(state)
    task = Margin()
    model = prepare_model(model.eval(), task)
    analyzer = Analyzer("truth", model, task, cpu=True, disable_tqdm=True, output_dir=str(folder / "ekfac"))
    train = TensorDataset(data.train.inputs, data.train.labels)
    test = TensorDataset(data.test.inputs, data.test.labels)
    if not (folder / "ekfac" / "truth" / "factors_ekfac").exists():
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=500, factor_args=FactorArguments("ekfac"))
    arguments = ScoreArguments(damping_factor=damping)
    analyzer.compute_pairwise_scores(
        scores_name=f"damping-{damping}",
        factors_name="ekfac",
        query_dataset=test,
        train_dataset=train,
        per_device_query_batch_size=100,
        per_device_train_batch_size=500,
        score_args=arguments,
        overwrite_output_dir=True,
    )
    return analyzer.load_pairwise_scores(f"damping-{damping}")["all_modules"]


# -- captum -----------------------------------------------------------------------------------


def captum_tracin(setting: Setting, data: Data, states: list[dict[str, Tensor]], last: str) -> Tensor:
    """TracIn on the last layer, against the loss: what this package offers for many test images."""
    from captum.influence import TracInCPFast

    model = setting.network()

    def load(module: nn.Module, state: dict[str, Tensor]) -> float:
        module.load_state_dict(state)
        return 1.0

    peer = TracInCPFast(
        model,
        model.get_submodule(last),
        TensorDataset(data.train.inputs, data.train.labels),
        states,  # type: ignore[arg-type]
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=500,
    )
    return peer.influence((data.test.inputs, data.test.labels))


def _damping(word: str) -> float | None:
    return None if word == "own" else float(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setting", help="as given to spotlights evaluate truth")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"), help="as given to spotlights evaluate truth")
    parser.add_argument("--only", nargs="*", help="some of: graddot tracin captum ekfac trak trak10")
    parser.add_argument(
        "--damping", nargs="*", type=_damping, default=DAMPINGS, help="of EK-FAC; own for the package's own choice"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own, about their dependencies

    setting = setting_named(options.setting)
    data = prepare(setting)
    folder = options.out / setting.name
    recorded = record(setting, data, folder)
    state = {name: held.clone() for name, held in recorded.model.state_dict().items()}
    last = [name for name, module in recorded.model.named_modules() if isinstance(module, nn.Linear)][-1]

    def kept(name: str, key: str, compute: Callable[[], Tensor | tuple[Tensor, float]]) -> None:
        if options.only and key not in options.only:
            return
        started = time.perf_counter()
        try:
            found = compute()
        except Exception as error:  # a peer that does not work here must not stop the others
            print(f"{name}: {type(error).__name__}: {error}")
            return
        scores, took = found if isinstance(found, tuple) else (found, time.perf_counter() - started)
        keep_answer(folder, MethodScores(name, scores.detach().double(), took))
        print(f"{name}: {took:.1f} s", flush=True)

    kept("GradDot (dattri)", "graddot", lambda: grad_dot(setting, data, [state]))
    for damping in options.damping:
        shown = "own damping" if damping is None else f"damping {damping:g}"
        kept(f"EK-FAC, {shown} (kronfluence)", "ekfac", lambda d=damping: ekfac(setting, data, state, folder, d))
    kept("TRAK, 1 model (dattri)", "trak", lambda: trak(setting, data, [state], folder / "trak-1"))
    kept(
        f"TRAK, {MODELS} models (dattri)",
        "trak10",
        lambda: trak(setting, data, ensemble(setting, data, folder), folder / "trak-10"),
    )
    kept(
        f"TracIn, {CHECKPOINTS} checkpoints (dattri)",
        "tracin",
        lambda: grad_dot(setting, data, checkpoints(setting, data, CHECKPOINTS)),
    )
    kept(
        f"TracIn, last layer, {CHECKPOINTS} checkpoints (captum)",
        "captum",
        lambda: captum_tracin(setting, data, checkpoints(setting, data, CHECKPOINTS), last),
    )


if __name__ == "__main__":
    main()
