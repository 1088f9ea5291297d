"""Passages against brute force: on the memory of a small network that reads letters."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from memories import ROOT
from spotlights.results import sentence_at

TEXT = (
    "The hen sat. A fox saw the hen! “Come down,” said he. The hen laughed.\n\nA fox is a fox; the hen knew. "
    "The end of the hen came late, in the end. No fox saw it."
)
LETTERS = sorted(set(TEXT))


class Reader(nn.Module):
    """Each position reads its own letter and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 5)
        self.mix = nn.Linear(10, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        read = self.embedding(letters)
        before = F.pad(read, (0, 0, 1, 0))[:, :-1]
        return self.mix(torch.cat([read, before], dim=-1))


@cache
def trained(fold: str | None = None) -> tuple[sl.Memory, Reader]:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    length = (len(TEXT) - 1) // 4
    positions = torch.arange(4 * length).view(4, length)
    path = ROOT / f"passages-{fold}.memory"
    with sl.record(model, optimizer, path, layers="mix", fold=fold, overwrite=True) as recorder:
        for epoch in range(3):
            for start in range(0, length, 10 + epoch):
                some = positions[:, start : start + 10 + epoch]
                recorder.batch(example=some)
                loss = F.cross_entropy(model(letters[some]).flatten(0, 1), letters[some + 1].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return sl.open(path), model


def numbers(prompt: str) -> torch.Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in prompt]])


def ask(prompt: str, kernel: str = "dot", fold: str | None = None, **options):
    memory, model = trained(fold)
    return memory.attend(model, numbers(prompt), kernel=kernel)["mix"].passages(TEXT, prompt=prompt, **options)


def brute_scores(prompt: str, token: int) -> dict[int, float]:
    """By position: key·query, added up over visits."""
    memory, model = trained()
    spot = memory.attend(model, numbers(prompt))["mix"]
    scores, sums = spot.scores()[token].tolist(), {}
    every = spot.top(len(scores))
    position_of = dict(zip(every.slots[token, 0].tolist(), every.columns["example"][token][0], strict=True))
    for slot, score in enumerate(scores):
        sums[position_of[slot]] = sums.get(position_of[slot], 0.0) + score
    return sums


@pytest.mark.parametrize("fold", [None, "example"])
@settings(max_examples=15, deadline=None)
@given(
    prompt=st.text(alphabet=LETTERS, min_size=2, max_size=8),
    k=st.integers(1, 5),
    around=st.integers(0, 12),
    tokens=st.sampled_from([[-1], [-2, -1]]),
)
def test_passages_are_those_of_brute_force(fold: str | None, prompt: str, k: int, around: int, tokens: list[int]):
    found = ask(prompt, fold=fold, tokens=tokens, k=k, around=around)
    spans: dict[tuple[int, int], dict[int, float]] = {}
    for token in tokens:
        scores = brute_scores(prompt, token)
        for position in sorted(scores, key=lambda p: (-round(scores[p], 4), p))[: 5 * k]:
            start, stop = sentence_at(TEXT, position, around)
            best = {token: scores[position]}
            for held in [span for span in spans if span[0] < stop and start < span[1]]:
                for other, score in spans.pop(held).items():
                    best[other] = max(score, best.get(other, score))
                start, stop = min(start, held[0]), max(stop, held[1])
            spans[start, stop] = best
    ranked = sorted(spans, key=lambda span: -sum(spans[span].values()))[:k]
    assert [p.score for p in found] == pytest.approx([sum(spans[span].values()) for span in ranked], rel=1e-4, abs=1e-4)
    for passage in found:
        assert "".join(passage.text) == TEXT[passage.start : passage.stop]
        places = {hit.position - passage.start for hit in passage.hits}
        assert passage.attended <= places
        assert len(passage.attended) <= len(tokens)
        assert sum(hit.score for hit in passage.best.values()) == pytest.approx(passage.score)


@pytest.mark.parametrize("fold", [None, "example"])
def test_a_hit_says_how_often_and_when_it_was_visited(fold: str | None):
    memory, _ = trained()
    for hit in ask("the hen", fold=fold, k=3)[0].hits:
        visits = memory.where(example=hit.position)
        assert hit.visits == len(visits) == 3
        steps = [step for step in range(memory.steps) if len(visits.where(step=step))]
        assert (hit.first_step, hit.last_step) == (steps[0], steps[-1])


def test_sentences_end_where_a_reader_would_end_them():
    def around(words: str, reach: int = 100) -> str:
        start, stop = sentence_at(TEXT, TEXT.index(words), reach)
        return TEXT[start:stop].strip()

    assert around("saw") == "A fox saw the hen!"
    assert around("Come") == "“Come down,” said he."
    assert around("laughed") == "The hen laughed."
    assert around("fox is") == "A fox is a fox; the hen knew."
    assert around("saw", 3) == "fox saw"[1:]


def test_sentences_of_words_end_at_marks_and_paragraphs():
    words = [*("=", "Title", "=", "<eos>"), *("The", "hen", "sat", "."), *("She", "slept", "<eos>")]
    assert sentence_at(words, 5, 50) == (4, 8)
    assert sentence_at(words, 0, 50) == (0, 4)
    assert sentence_at(words, 9, 50) == (8, 11)
    assert sentence_at(words, 5, 1) == (4, 7)


# -- what people see ----------------------------------------------------------------------------


def test_text_marks_what_is_attended_to():
    text = str(ask("the h", k=2))
    assert "«" in text.partition("”")[2]
    assert "for “the «h»”" in text
    assert "visits" in text


def test_results_convert(tmp_path: Path):
    found = ask("the hen", k=3)
    assert len(found.to_pandas()) == len(found) == len(list(found.rows()))
    assert json.loads(json.dumps(list(found.rows())))[0]["position"] == found[0].hits[0].position
    assert found.kernel == "dot"


def test_other_kernels_say_so():
    assert "cosine" in str(ask("the", kernel="cosine"))


# -- what is refused ----------------------------------------------------------------------------


def test_questions_that_make_no_sense_are_refused_in_sentences():
    memory, model = trained()
    spot = memory.attend(model, numbers("the"))["mix"]
    with pytest.raises(sl.SettingError, match="at least one passage"):
        spot.passages(TEXT, k=0)
    with pytest.raises(sl.SettingError, match="tokens 0 to 2"):
        spot.passages(TEXT, tokens=[3])
    with pytest.raises(sl.SettingError, match="2 tokens, and there are 3 queries"):
        spot.passages(TEXT, prompt="th")
    with pytest.raises(sl.SettingError, match="not positions of this text"):
        spot.passages(TEXT[:10])
