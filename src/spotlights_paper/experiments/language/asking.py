"""Asking a run of a language model: passages of the training text, the paper's queries, and a finished run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import spotlights as sl
from spotlights.errors import MemoryFormatError, SettingError, UnsupportedError
from spotlights.results import Passages
from spotlights_paper.datasets import TextDataset
from spotlights_paper.experiments.language.evaluation import Evaluation, evaluate
from spotlights_paper.experiments.language.gpt import GPT, GPTSettings
from spotlights_paper.experiments.language.lstm import LanguageModel
from spotlights_paper.experiments.language.ranks import PaperPassage, rank_papers
from spotlights_paper.experiments.language.trained import TextSettings, TrainedLanguage, digest
from spotlights_paper.experiments.language.two_levels import TwoLevels, two_levels
from spotlights_paper.experiments.paper import PaperQuery
from spotlights_paper.experiments.progress import stage
from spotlights_paper.experiments.registry import experiment_named
from spotlights_paper.experiments.running import MEMORY, MODEL, RUN, load_run, started

KERNEL = "cosine"
"""The default: the plain product favours large keys."""
_CONTINUED = {"character": 60, "word": 15}
"""Tokens that the network says after a prompt."""
_SHOWN = 10
"""Passages of each query and kernel."""


def passages(
    trained: TrainedLanguage,
    prompt: Sequence[str],
    *,
    asked: Sequence[int] = (-1,),
    k: int = 10,
    kernel: str = KERNEL,
) -> Passages:
    """The passages of the training text that tokens of a prompt attend to, through the run's layer for passages.

    Args:
        trained: a run, from `open_run` or just trained.
        prompt: its tokens.
        asked: which of them to ask about.
        k: how many passages.
        kernel: how keys and queries are compared; "dot" is what the network computes, others are for looking.
    """
    layer, (prompt, numbers) = trained.layer, _read(trained, prompt)
    spot = trained.memory.attend(trained.model, {"tokens": numbers, "last": True}, layers=[layer], kernel=kernel)
    return spot[layer].passages(trained.data.train.tokens, prompt=prompt, tokens=asked, k=k)


def passages_toward(trained: TrainedLanguage, prompt: Sequence[str], *, k: int = 10) -> Passages:
    """The passages of the training text that add most to the token that the network says after a prompt, to its logit.

    Through the last layer, whose errors the run's memory must have.
    """
    layer, (prompt, numbers) = trained.head, _read(trained, prompt)
    vocabulary = trained.data.vocabulary
    spot = trained.memory.attend(trained.model, {"tokens": numbers}, layers=[layer])
    number = int(spot.output[0, -1].argmax())

    def logit(output: Tensor) -> Tensor:
        return output[:, -1, number]

    passages = spot[layer].passages(trained.data.train.tokens, prompt=prompt, target=logit, k=k)
    initial = float(spot[layer].at(len(prompt) - 1).contributions(logit).initial[0])
    note = (
        f"toward {vocabulary.tokens[number]!r} as the next {vocabulary.unit}: {float(logit(spot.output)[0]):.2f}, of "
        f"which the initial weights of {layer} make {initial:+.2f} through this token"
    )
    return replace(passages, note="; ".join(part for part in (note, passages.note) if part))


def _read(trained: TrainedLanguage, prompt: Sequence[str]) -> tuple[Sequence[str], Int64[Tensor, "1 length"]]:
    """The end of a prompt, as much as the network can see."""
    prompt = prompt[-trained.model.context :] if isinstance(trained.model, GPT) else prompt
    return prompt, trained.data.vocabulary.encode(prompt)[None]


def before(data: TextDataset, source: str, position: int, context: int) -> Sequence[str]:
    """The tokens of the training or test text up to a position, at most `context` of them."""
    text = getattr(data, source).tokens
    if not 0 <= position < len(text):
        raise SettingError(f"There is no position {position}: the {source} text has 0 to {len(text) - 1}.")
    return text[max(0, position + 1 - context) : position + 1]


def find(data: TextDataset, source: str, words: str) -> int | None:
    """The position of the last token of the first occurrence of some words; line ends count as spaces."""
    text = getattr(data, source).tokens
    if isinstance(text, str):
        at = text.replace("\n", " ").find(words)
        return None if at < 0 else at + len(words) - 1
    wanted = list(data.vocabulary.split(words))
    for start in range(len(text) - len(wanted) + 1):
        if text[start] == wanted[0] and text[start : start + len(wanted)] == wanted:
            return start + len(wanted) - 1
    return None


# -- the paper's queries ----------------------------------------------------------------------


@dataclass(frozen=True)
class QueryPassages:
    """One query of the paper, answered with each kernel."""

    number: int
    """As the paper numbers its tables."""
    query: str
    source: str
    """Which text the query is from: "test" or "train"."""
    position: int
    """Of its last token."""
    ours: list[Passages]
    """One for each kernel. The query's own sentence is left out, as in the paper."""
    continuation: str = ""
    """What the network says after the prompt, always the most likely token."""
    papers: list[PaperPassage] = field(default_factory=list)
    """The paper's own passages."""


@dataclass(frozen=True)
class LanguageResults:
    """Every analysis of one run."""

    tables: list[QueryPassages] = field(default_factory=list)
    evaluation: Evaluation | None = None
    two_levels: list[TwoLevels] = field(default_factory=list)
    """Of a GPT."""


def analyse(trained: TrainedLanguage, settings: Any, *, queries: Sequence[PaperQuery]) -> LanguageResults:
    """The passages of some queries; of an LSTM how good they are, of a GPT also contributions and both levels."""
    is_gpt = isinstance(trained.model, GPT)
    prompts, tables, levels = {}, [], []
    for query in queries:
        position = find(trained.data, query.source, query.words)
        if position is None:  # a short text may not have all of them
            continue
        prompt = before(trained.data, query.source, position, settings.context)
        own = position if query.source == "train" else None
        prompts[query] = (prompt, own)
        with stage(f"the query of Table {query.table}"):
            ours = [_others(passages(trained, prompt, k=_SHOWN + 1, kernel=k), own) for k in settings.kernels]
            if is_gpt:
                ours.append(_others(passages_toward(trained, prompt, k=_SHOWN + 1), own))
            said = continuation(trained, prompt)
        tables.append(QueryPassages(query.table, query.words, query.source, position, ours, said))
        if is_gpt and not levels:
            with stage("two levels of retrieval"):
                levels.append(two_levels(trained, prompt))
    if not is_gpt and prompts:
        with stage("the ranks of the paper's passages"):
            ranked = rank_papers(trained, settings, prompts)
        tables = [replace(table, papers=ranked[query]) for table, query in zip(tables, prompts, strict=True)]
    return LanguageResults(tables, None if is_gpt else evaluate(trained, settings), levels)


def _others(passages: Passages, own: int | None) -> Passages:
    """Without the sentence of the query itself, if the query is from the training text."""
    kept = [passage for passage in passages if own is None or not passage.start <= own < passage.stop]
    return replace(passages, passages=kept[:_SHOWN])


def continuation(trained: TrainedLanguage, prompt: Sequence[str]) -> str:
    """What the network says after a prompt, always the most likely token."""
    vocabulary = trained.data.vocabulary
    numbers = vocabulary.encode(prompt)[None]
    count = _CONTINUED[vocabulary.unit]
    with torch.no_grad():
        for _ in range(count):
            read = numbers[:, -trained.model.context :] if isinstance(trained.model, GPT) else numbers
            numbers = torch.cat([numbers, trained.model(read)[:, -1:].argmax(dim=-1)], dim=1)
    said = vocabulary.decode(numbers[0, -count:])
    return said if isinstance(said, str) else " ".join(said)


# -- a finished run ---------------------------------------------------------------------------


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
    data = experiment_named(name).load(settings)
    if digest(data) != run.text_sha256:
        raise SettingError(f"{settings.text} is not the text any more that {folder} was trained on.")
    try:
        model = _restored(folder / MODEL, len(data.vocabulary), settings)
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise MemoryFormatError(
            f"{folder / MODEL} is not the network that {folder / RUN} describes ({error})."
        ) from None
    return TrainedLanguage(sl.open(folder / MEMORY), model, data, run.seed, run.surprise["train"]), settings


def _restored(file: Path, vocabulary: int, settings: Any) -> Any:
    """The network of a run. It is built only if the file has all of its weights, however large the settings are."""
    weights = load_file(file)
    network: Any = GPT if isinstance(settings, GPTSettings) else LanguageModel
    if getattr(settings, "blocks", 0) > len(weights):
        raise ValueError(f"{settings.blocks:,} blocks, {len(weights)} weights")
    with torch.device("meta"):
        wanted = {name: weight.shape for name, weight in network(vocabulary, settings).state_dict().items()}
    if wanted != {name: weight.shape for name, weight in weights.items()}:
        raise ValueError("other names or shapes of weights")
    model = network(vocabulary, settings)
    model.load_state_dict(weights)
    return model.eval()
