"""The paper's queries and passages in our texts, their ranks, and a run that goes on after an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from real_data import need
from spotlights.results.passages import sentence_at
from spotlights_paper import datasets
from spotlights_paper.datasets import read_text
from spotlights_paper.experiments import paper
from spotlights_paper.experiments.language.asking import _others, continuation, passages
from spotlights_paper.experiments.language.lstm import CHECKPOINT, train_lstm
from spotlights_paper.experiments.language.ranks import rank_papers
from spotlights_paper.experiments.language.trained import TrainedLanguage
from spotlights_paper.experiments.paper import PaperQuery
from spotlights_paper.experiments.registry import preset_named

SENTENCES = ("The hen sat on the fence.", "A fox saw the hen.", "“Come down,” said the fox!", "The hen did not come.")
TEXT = " ".join(SENTENCES[(i * i + i // 3) % 4] for i in range(60))
SETTINGS = replace(preset_named("char-lm", "quick"), steps=12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguage:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("passages")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    return train_lstm(SETTINGS, data=read_text(folder / "book.txt", "character"), seed=0, path=folder / "run.memory")


def test_the_papers_passages_of_aesop_stand_where_we_say():
    need("aesop")
    text = datasets.load_text("aesop").train.tokens
    ends = {2: "as fast as", 3: "a single d", 4: "at "}
    following = {2: (" he could, he found",), 3: ("ay than", "og, I faint", "rop to"), 4: ("most", "times", "last")}
    for query in paper.AESOP:
        for place in query.papers:
            assert text[: place + 1].lower().replace("\n", " ").endswith(ends[query.table])
        for place, words in zip(query.papers, following[query.table], strict=False):
            assert text[place + 1 :].replace("\n", " ").startswith(words)


def test_the_papers_passages_of_wikitext_stand_where_we_say():
    need("wikitext-2")
    text = datasets.load_text("wikitext-2").train.tokens
    found = [[" ".join(text[place - 1 : place + 2]) for place in query.papers] for query in paper.WIKITEXT_2]
    assert found == [
        ["his contribution to", "his contribution as", "his contribution to"],
        ["Her main battery", "Her secondary armament", "Her primary offensive"],
        ['it as "', "it as a", 'it as "'],
    ]


@pytest.mark.parametrize("own", [None, 40])
def test_ranks_are_those_of_a_sorted_list_of_all_scores(trained: TrainedLanguage, own: int | None):
    prompt, places = "the fox saw the h", (57, 301, 640)
    query = PaperQuery(2, prompt, papers=places)
    found = rank_papers(trained, SETTINGS, {query: (prompt, own)})[query]
    text = trained.data.train.tokens
    numbers = trained.data.vocabulary.encode(prompt)[None]
    for kernel in ("dot", "cosine"):
        spot = trained.memory.attend(trained.model, {"tokens": numbers, "last": True}, kernel=kernel)[trained.layer]
        totals = spot.at(len(prompt) - 1).totals("example")
        scores = dict(zip(totals.groups, totals.numpy()[0], strict=True))
        if own is not None:
            start, stop = sentence_at(text, own)
            scores = {place: score for place, score in scores.items() if not start <= place < stop}
        best: dict[int, float] = {}
        for place, score in scores.items():
            start = sentence_at(text, place)[0]
            best[start] = max(best.get(start, -np.inf), score)
        for passage in found:
            ours = next(r for r in passage.ranks if (r.network, r.kernel) == ("trained", kernel))
            score, sentence = scores[passage.position], sentence_at(text, passage.position)[0]
            assert ours.by_position == 1 + sum(other > score for other in scores.values())
            assert ours.by_sentence == 1 + sum(s > score for start, s in best.items() if start != sentence)
    assert all(len(passage.ranks) == 4 for passage in found)
    assert found[0].text[found[0].text.index("«") + 1] == text[57]


def test_a_query_from_the_training_text_does_not_find_its_own_sentence(trained: TrainedLanguage):
    text, own = trained.data.train.tokens, 200
    found = passages(trained, text[own - 30 : own + 1], k=20)
    assert any(each.start <= own < each.stop for each in found)
    assert not any(each.start <= own < each.stop for each in _others(found, own))


def test_the_continuation_is_greedy(trained: TrainedLanguage):
    said, prompt = continuation(trained, "The hen "), "The hen "
    for character in said[:5]:
        numbers = trained.data.vocabulary.encode(prompt)[None]
        with torch.no_grad():
            assert trained.data.vocabulary.tokens[int(trained.model(numbers)[0, -1].argmax())] == character
        prompt += character


@pytest.mark.parametrize("bfloat16", [None, "states", "softmax"])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bfloat16: str | None
):
    torch.set_num_threads(1)
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    data = read_text(tmp_path / "book.txt", "character")
    settings = replace(SETTINGS, dropout=0.0 if bfloat16 == "states" else 0.2, state_drop=0.3, checkpoint_every=5)
    settings = replace(settings, bfloat16=bfloat16)
    paths = [tmp_path / name / "run.memory" for name in ("whole", "parts")]
    for path in paths:
        path.parent.mkdir()
    whole = train_lstm(settings, data=data, seed=1, path=paths[0])

    encode, calls = torch.nn.LSTM.forward, []

    def fails(self, *arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return encode(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.LSTM, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            train_lstm(settings, data=data, seed=1, path=paths[1])
    assert paths[1].with_name(CHECKPOINT).exists()
    parts = train_lstm(settings, data=data, seed=1, path=paths[1])
    assert not paths[1].with_name(CHECKPOINT).exists()
    assert whole.surprise == parts.surprise
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other)
    prompt = data.vocabulary.encode("The hen")[None]
    ours, theirs = (
        each.memory.attend(each.model, {"tokens": prompt, "last": True})[each.layer].at(6).totals("example").numpy()
        for each in (whole, parts)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
