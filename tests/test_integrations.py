"""Recorded, a Trainer of another library trains the same bit for bit, and its examples have their own ids."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import spotlights as sl
from training import same, state

COUNT = 12
"""Each example has a label of its own, so that a label tells which example a slot is of."""


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", sl.SpotlightsWarning)
        yield


def assert_examples_are_right(memory: sl.Memory, epochs: int) -> None:
    assert memory.status == "closed"
    examples, labels = (memory.column(name, range(len(memory))) for name in ("example", "label"))
    assert examples == labels, "slots have the ids of other examples"
    assert all(len(memory.visits(example).steps) == epochs for example in range(COUNT))


# -- transformers -----------------------------------------------------------------------------


def test_after_a_training_of_transformers_that_raised_the_next_one_is_recorded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from spotlights.integrations.transformers import SpotlightsCallback

    class Raising(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **others: Any) -> None:
            raise ArithmeticError

    callback = SpotlightsCallback(tmp_path / "run.memory", overwrite=True)
    with pytest.raises(ArithmeticError):
        hugging_face(tmp_path, [callback, Raising()])
    model, _ = hugging_face(tmp_path, [callback])
    assert sl.open(tmp_path / "run.memory").verify(model).ok


class Texts(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place: int) -> dict[str, Any]:
        tokens = torch.randint(3, 20, (4,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": torch.tensor(place)}


def hugging_face(folder: Path, callbacks: list[Any], **options: Any) -> tuple[nn.Module, list[Any]]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=20, num_labels=COUNT, max_position_embeddings=8, **sizes)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 3, "learning_rate": 1e-2, **options}
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(output_dir=str(folder / "out"), **options)
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None)
    losses = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return model, losses


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1}])
def test_a_trainer_of_transformers_is_recorded(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, losses = hugging_face(tmp_path, [], **options)
    from spotlights.integrations.transformers import SpotlightsCallback

    callback = SpotlightsCallback(tmp_path / "run.memory", columns=["labels"])
    model, recorded_losses = hugging_face(tmp_path, [callback], **options)
    assert same(state(model), state(plain)), "recording has changed the training"
    assert recorded_losses == losses
    memory = sl.open(tmp_path / "run.memory")
    assert memory.column("example", range(len(memory))) == memory.column("labels", range(len(memory)))
    assert all(len(memory.visits(example).steps) == 2 for example in range(COUNT))
    assert memory.steps == (8 if not options else 4)
    assert memory.verify(model).ok
    with torch.no_grad():
        again = model(**{"input_ids": torch.stack([Texts()[0]["input_ids"]])})
    assert again.logits.shape == (1, COUNT), "the hook is gone after training"


def test_the_callback_of_transformers_has_the_loss_of_a_recipe(tmp_path: Path) -> None:
    plain, _ = hugging_face(tmp_path, [])
    from spotlights.integrations.transformers import SpotlightsCallback

    callback = SpotlightsCallback(tmp_path / "run.memory", keep="recipe", checkpoint_every=3)
    model, _ = hugging_face(tmp_path, [callback])
    assert same(state(model), state(plain))
    memory = sl.open(tmp_path / "run.memory", model=plain, recompute=callback.loss)
    assert memory.recomputed == 0.0
    assert memory.verify(model).ok
    with pytest.raises(sl.SettingError, match="set_data"):
        SpotlightsCallback("x").loss(model, torch.arange(2))


# -- lightning --------------------------------------------------------------------------------


class Points(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.randn(5, generator=torch.Generator().manual_seed(place)), torch.tensor(place)


def lightning_run(folder: Path, callbacks: list[Any], workers: int = 0, accumulate: int = 1) -> tuple[nn.Module, list]:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, COUNT))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    loader = DataLoader(
        Points(), batch_size=3, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(4)
    )
    trainer.fit(module, loader)
    return module, losses


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (1, 2)])
def test_a_trainer_of_lightning_is_recorded(tmp_path: Path, workers: int, accumulate: int) -> None:
    plain, losses = lightning_run(tmp_path, [], workers, accumulate)
    from spotlights.integrations.lightning import SpotlightsCallback

    callback = SpotlightsCallback(tmp_path / "run.memory", columns=lambda batch: {"label": batch[1]})
    model, recorded_losses = lightning_run(tmp_path, [callback], workers, accumulate)
    assert same(state(model), state(plain)), "recording has changed the training"
    assert recorded_losses == losses
    memory = sl.open(tmp_path / "run.memory")
    assert_examples_are_right(memory, 2)
    assert memory.steps == 8 // accumulate
    assert memory.verify(model).ok


def test_the_callback_of_lightning_has_the_loss_of_a_recipe(tmp_path: Path) -> None:
    plain, _ = lightning_run(tmp_path, [])
    from spotlights.integrations.lightning import SpotlightsCallback

    callback = SpotlightsCallback(tmp_path / "run.memory", keep="recipe", checkpoint_every=3)
    model, _ = lightning_run(tmp_path, [callback])
    assert same(state(model), state(plain))
    memory = sl.open(tmp_path / "run.memory", model=plain, recompute=callback.loss)
    assert memory.recomputed == 0.0
    assert memory.verify(model).ok
