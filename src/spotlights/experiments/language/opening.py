"""From the folder of a language run to what can be asked: its memory, its network and its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import spotlights as sl
from spotlights.errors import MemoryFormatError, SettingError, UnsupportedError
from spotlights.experiments.language.gpt import GPT, GPTSettings
from spotlights.experiments.language.gpt_training import trained_gpt
from spotlights.experiments.language.network import LanguageModel
from spotlights.experiments.language.settings import LanguageSettings, TextSettings
from spotlights.experiments.language.training import TrainedLanguage, digest
from spotlights.experiments.registry import experiment_named
from spotlights.experiments.running import MEMORY, MODEL, RUN, load_run, started


def open_run(path: str | Path) -> tuple[TrainedLanguage, TextSettings]:
    """Opens a language run's folder, or the memory inside one."""
    path = Path(path)
    folder = path if (path / RUN).is_file() else path.absolute().parent
    if not (folder / RUN).is_file():
        if (path / "memory.json").is_file():
            raise SettingError(
                f"{path} holds a memory, but not the network and the text. Give them in Python: "
                'sl.open(path).attend(model, tokens)["rnn.l0"].passages(text).'
            )
        raise MemoryFormatError(f"There is no finished run at {path}. Make one: spotlights run aesop-char.")
    name, settings = started(folder)
    if not isinstance(settings, TextSettings):
        raise SettingError(f"{folder} is a run of {name}, which is about images. Passages are of texts.")
    if not (folder / MEMORY).exists():
        raise UnsupportedError(f"{folder} has no memory: it was thrown away. Run it again without --discard-memory.")
    run = load_run(folder)
    experiment: Any = experiment_named(name)  # of text, so that it can load one
    data = experiment.load(settings)
    if digest(data) != run.text_sha256:
        raise SettingError(f"{settings.text} is not the text any more that {folder} was trained on.")
    memory, surprise = sl.open(folder / MEMORY), run.surprise["train"]
    if isinstance(settings, GPTSettings):
        gpt = GPT(len(data.vocabulary), settings)
        gpt.load_state_dict(load_file(folder / MODEL))
        return trained_gpt(memory, gpt.eval(), data, run.seed, surprise), settings
    assert isinstance(settings, LanguageSettings)
    model = LanguageModel(len(data.vocabulary), settings)
    model.load_state_dict(load_file(folder / MODEL))
    return TrainedLanguage(memory, model.eval(), data, run.seed, surprise), settings
