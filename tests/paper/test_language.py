"""The language experiments: runs that can be asked for passages, on a small text of one's own."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
from explorers import get
from real_data import need
from spotlights.cli import app
from spotlights.explorer.explorer import Explorer
from spotlights_paper.datasets import read_text
from spotlights_paper.experiments.language.asking import before, find, open_run, passages
from spotlights_paper.experiments.language.evaluation import MEASURES, attended, choose, untrained
from spotlights_paper.experiments.language.lstm import LAYER, LanguageModel, windows
from spotlights_paper.experiments.language.products import TabledLSTM, cross_entropy
from spotlights_paper.experiments.registry import experiment_named, preset_named
from spotlights_paper.experiments.running import load_results, load_run, repeat, run_experiment
from spotlights_paper.subjects import subject_of

SENTENCES = (
    "The hen sat on the fence.",
    "A fox saw the hen.",
    "“Come down,” said the fox!",
    "The hen did not come down.",
)
TEXT = " ".join(SENTENCES[(i * i + i // 3) % 4] + "\n" * (i % 5 == 4) for i in range(60))


def spotlights(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def characters(book: Path) -> Path:
    torch.set_num_threads(1)
    return run_experiment("char-lm", preset="quick", steps=14, text=book, out=book.parent / "characters")


@pytest.fixture(scope="module")
def words(book: Path) -> Path:
    return run_experiment("word-lm", preset="quick", steps=14, text=book, out=book.parent / "words")


# -- training -----------------------------------------------------------------------------------


@given(st.integers(5, 60), st.integers(1, 4), st.integers(1, 7))
def test_an_epoch_reads_every_position_once_and_the_next_token_is_the_target(tokens: int, batch: int, unroll: int):
    text = torch.arange(tokens) * 7
    length = (tokens - 1) // batch
    epoch = list(islice(windows(text, batch=batch, unroll=unroll), -(-length // unroll)))
    positions = torch.cat([window.positions.flatten() for window in epoch])
    assert sorted(positions.tolist()) == list(range(batch * length))
    assert [window.first for window in epoch] == [True] + [False] * (len(epoch) - 1)
    for one, following in pairwise(epoch):
        assert torch.equal(one.positions[:, -1] + 1, following.positions[:, 0])
    for window in epoch:
        assert torch.equal(window.tokens, text[window.positions])
        assert torch.equal(window.targets, text[window.positions + 1])


def test_a_text_that_is_too_short_for_the_batch_is_refused():
    with pytest.raises(sl.SettingError, match="cannot be cut into 8 sequences"):
        next(windows(torch.arange(5), batch=8, unroll=3))


def test_presets_are_the_papers_and_what_a_laptop_can_do():
    paper = preset_named("aesop-char", "paper")
    assert (paper.embedding, paper.projection, paper.hidden) == (64, 1024, 1024)
    assert (paper.lr, paper.clip, paper.batch, paper.unroll, paper.steps) == (1e-3, 1.0, 64, 100, 5000)
    paper = preset_named("wikitext2-word", "paper")
    assert (paper.hidden, paper.dropout, paper.lr, paper.clip) == (200, 0.5, 3e-3, 0.3)
    assert (paper.batch, paper.unroll, paper.steps) == (128, 100, 10_000)
    for experiment in map(experiment_named, ("aesop-char", "wikitext2-word")):
        for preset in ("paper", "laptop"):
            assert experiment.presets[preset].fold
            assert not experiment.presets[preset].errors
        assert experiment.presets["sgd"].errors
        assert experiment.presets["sgd"].optimizer == "sgd"
    assert next(iter(experiment_named("char-lm").presets)) == "laptop"


def keys_by_a_plain_loop(model: LanguageModel, tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """`[x; h of the token before]` for every position, each stretch of the text read in one go."""
    length = (len(tokens) - 1) // batch
    lanes = tokens[: batch * length].view(batch, length)
    with torch.no_grad():
        inputs = model.projection(model.embedding(lanes))
        hidden = model.rnn(inputs)[0]
        held = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
    return torch.cat([inputs, held], dim=-1).flatten(0, 1)


@pytest.mark.parametrize(("bfloat16", "error"), [(None, 1e-5), ("states", 1e-3)])
def test_the_memory_holds_the_keys_of_a_network_that_reads_on_from_step_to_step(
    book: Path, bfloat16: str | None, error: float
):
    data = read_text(book, "character")
    settings = replace(preset_named("char-lm", "quick"), projection=10, bfloat16=bfloat16)
    with untrained(data, settings, seed=3) as (model, memory):
        assert model.embedding.weight.grad is None, "a gradient that nobody empties grows with every step"
        keys = keys_by_a_plain_loop(model, data.train.numbers, settings.batch)
        assert len(memory) == len(keys)
        query = data.test.numbers[None, :9]
        spot = memory.attend(model, {"tokens": query, "last": True})[LAYER]
        with torch.no_grad():
            inputs = model.projection(model.embedding(query))[0]
            hidden = model.rnn(inputs[None])[0][0]
        expected = keys @ torch.cat([inputs[-1], hidden[-2]])
        top = spot.at(8).top(len(keys))
        places = torch.tensor(top.columns["example"][0][0])
        assert torch.allclose(top.values[0, 0].float(), expected[places], atol=error)

        asked = choose(model.eval(), data.test.numbers, asked=6, context=9, seed=0)
        found = attended(memory, model, asked.contexts, kernel="dot", k=4)
        for row, context in zip(found, asked.contexts, strict=True):
            with torch.no_grad():
                inputs = model.projection(model.embedding(context[None]))
                query = torch.cat([inputs[0, -1], model.rnn(inputs)[0][0, -2]])
            best = (keys @ query).topk(4).values
            assert torch.allclose((keys @ query)[row], best, atol=error)
            assert int(asked.said[0]) == int(model(asked.contexts[:1], last=True).argmax())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_table_of_inputs_gives_the_gradients_of_the_lstm(dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    settings = replace(preset_named("char-lm", "quick"), hidden=32, projection=20)
    model, tokens = LanguageModel(11, settings), torch.randint(0, 11, (4, 30))
    states, gradients = [], []
    for tabled in (False, True):
        vectors = model.projection(model.embedding.weight)
        start = torch.randn(2, 1, 4, 32, generator=torch.Generator().manual_seed(1)).unbind()
        with TabledLSTM(tokens, vectors, dtype) if tabled else nullcontext():
            found, (last, cell) = model.rnn(vectors[tokens], start)
        states.append(torch.cat([found.flatten(), last.flatten(), cell.flatten()]).detach())
        (found.square().sum() + cell.sin().sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    for one, other in zip([states[0], *gradients[0]], [states[1], *gradients[1]], strict=True):
        assert (one - other).norm() <= tolerance * one.norm()


def test_a_softmax_in_blocks_gives_the_loss_and_its_gradients():
    torch.manual_seed(0)
    inputs = [each.requires_grad_() for each in (torch.randn(1100, 20), torch.randn(60, 20) / 4, torch.randn(60))]
    targets = torch.randint(0, 60, (1100,))
    ours = 3 * cross_entropy(*inputs, targets)
    expected = 3 * F.cross_entropy(F.linear(*inputs), targets)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-3)
    for one, other in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert (one - other).norm() <= 0.01 * other.norm()


def test_surprise_does_not_depend_on_how_the_text_is_cut(book: Path):
    data = read_text(book, "word")
    torch.manual_seed(0)
    model = LanguageModel(len(data.vocabulary), replace(preset_named("char-lm", "quick"), dropout=0.5))
    numbers = data.train.numbers
    whole = model.surprise(numbers, block=10_000)
    assert model.surprise(numbers, block=7) == pytest.approx(whole, rel=1e-5)
    with torch.no_grad():
        chances = model.eval()(numbers[None, :-1])[0]
    assert whole == pytest.approx(-float(chances.gather(1, numbers[1:, None]).mean()), rel=1e-5)


def test_an_adaptive_softmax_gives_the_same_chances_one_by_one_and_together():
    torch.manual_seed(0)
    model = LanguageModel(40, replace(preset_named("char-lm", "quick"), cutoffs=(5, 12, 90))).eval()
    tokens = torch.randint(40, (2, 6))
    with torch.no_grad():
        chances = model(tokens)
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], None)
        assert torch.allclose(chances.exp().sum(dim=-1), torch.ones(2, 6), atol=1e-5)
        assert torch.allclose(model(tokens, last=True), chances[:, -1:], atol=1e-6)
    assert float(loss) == pytest.approx(-float(chances[:, :-1].gather(2, tokens[:, 1:, None]).mean()), rel=1e-5)


# -- runs ---------------------------------------------------------------------------------------


def test_a_run_says_how_good_the_network_is_and_can_be_repeated(characters: Path, book: Path):
    run = load_run(characters)
    trained, _ = open_run(characters)
    assert run.unit == "character"
    assert run.train_tokens + run.test_tokens == len(TEXT)
    assert run.surprise["test"] == pytest.approx(trained.model.surprise(trained.data.test.numbers), rel=1e-5)
    assert run.slots == (run.train_tokens - 1) // 8 * 8
    assert run.outcome()[1][0] == "bits per character, test text"
    again = load_run(repeat(characters, out=book.parent / "again", keep=False))
    assert again.surprise == pytest.approx(run.surprise, rel=1e-5)
    assert again.text_sha256 == run.text_sha256


@pytest.mark.parametrize("which", ["characters", "words"])
def test_a_run_is_judged_against_what_needs_no_training(which: str, request: pytest.FixtureRequest):
    evaluation = load_results(request.getfixturevalue(which)).evaluation
    ways = {(each.how, each.kernel) for each in evaluation.judged}
    kernels = ("cosine", "cosine-parts", "dot")
    assert ways == {(how, kernel) for how in ("trained", "untrained") for kernel in kernels} | {
        ("longest common suffix", None),
        ("random", None),
    }
    longest = evaluation.of("longest common suffix").measures["suffix"].mean
    for each in evaluation.judged:
        assert set(each.measures) == set(each.gain) == set(MEASURES)
        assert each.measures["suffix"].mean <= longest
    for kernel in kernels:
        ours, before = (evaluation.of(how, kernel) for how in ("trained", "untrained"))
        for name in MEASURES:
            difference = ours.measures[name].mean - before.measures[name].mean
            assert before.gain[name].mean == pytest.approx(difference)


def test_sgd_with_errors_is_exact(book: Path):
    folder = run_experiment("char-lm", preset="sgd", steps=3, text=book, out=book.parent / "sgd")
    run = load_run(folder)
    assert run.exact
    assert "rnn.l0" in run.exactness
    trained, _ = open_run(folder)
    prompt = trained.data.vocabulary.split("the hen")
    assert len(passages(trained, prompt, k=3)) == 3
    numbers = trained.data.vocabulary.encode(prompt)[None]
    logit = trained.memory.attend(trained.model, numbers)["decoder"].contributions(lambda out: out[:, -1, 3])
    assert logit.top(3, by="example").values.shape == (1, 1, 3)


# -- asking -------------------------------------------------------------------------------------


def test_passages_have_the_word_that_was_asked_about(words: Path):
    trained, settings = open_run(words)
    data = trained.data
    prompt = data.vocabulary.split("A fox saw the hen")
    found = passages(trained, prompt, k=5)
    assert found.prompt == ["A", "fox", "saw", "the", "hen"]
    for passage in found:
        assert passage.hits[0].visits >= 1
        assert "".join(passage.text) == "".join(data.train.tokens[passage.start : passage.stop])
    both = passages(trained, prompt, asked=(-2, -1), k=3)
    assert both.tokens == [3, 4]
    assert {hit.token for passage in both for hit in passage.hits} == {3, 4}
    place = find(data, "test", "The hen")
    assert list(before(data, "test", place, settings.context))[-2:] == ["The", "hen"]
    assert find(data, "test", "hen hen hen") is None


def test_the_command_asks_what_python_asks(characters: Path):
    done = spotlights("passages", characters, "--prompt", "The hen s", "-k", 3, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    trained, _ = open_run(characters / "run.memory")
    expected = passages(trained, "The hen s", k=3)
    assert said == list(expected.rows())
    done = spotlights("passages", characters, "--prompt", "The hen s", "--last", 2, "--kernel", "dot", "--json")
    both = passages(trained, "The hen s", asked=(-2, -1), kernel="dot")
    assert json.loads(done.stdout) == list(both.rows())
    shown = spotlights("passages", characters, "--prompt", "The hen s")
    assert "passage" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--prompt"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "x", "--kernel", "gauss"], "Unknown kernel"),
    ],
)
def test_the_command_explains_what_it_needs(characters: Path, arguments: list[str], said: str):
    done = spotlights("passages", characters, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr.replace("\n", " ")


def test_what_is_no_language_run_is_refused_in_a_sentence(characters: Path, book: Path, tmp_path: Path):
    with pytest.raises(sl.MemoryFormatError, match="no finished run"):
        open_run(tmp_path)
    alone = tmp_path / "alone.memory"
    alone.mkdir()
    (alone / "memory.json").write_text("{}")
    with pytest.raises(sl.SettingError, match="Give them in Python"):
        open_run(alone)
    with pytest.raises(sl.SettingError, match="--text"):
        run_experiment("char-lm", preset="quick", out=tmp_path / "run")
    with pytest.raises(sl.SettingError, match="has data of its own"):
        run_experiment("mnist-single", preset="quick", text=book, out=tmp_path / "run")
    saved = book.read_text(encoding="utf-8")
    try:
        book.write_text(saved.replace("fox", "cat"), encoding="utf-8")
        with pytest.raises(sl.SettingError, match="is not the text any more"):
            open_run(characters)
    finally:
        book.write_text(saved, encoding="utf-8")


# -- the report ---------------------------------------------------------------------------------


def test_the_report_has_the_judgement_and_the_settings(characters: Path, words: Path, tmp_path: Path):
    done = spotlights("report", characters, words, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("How good are the passages?") == 2
    assert "longest common suffix" in page
    assert "Training added, by kernel cosine-parts" in page
    assert "bits per character" in page
    assert "Perplexity" in page


def test_the_report_shows_the_papers_queries_with_marks(tmp_path: Path):
    need("aesop")
    folder = run_experiment("aesop-char", preset="quick", steps=3, out=tmp_path / "r")
    tables = load_results(folder).tables
    assert [table.number for table in tables] == [2, 3]  # the third is not in the first 6,000 characters
    assert tables[1].ours[0].prompt[-9:] == list("a little d")[-9:]
    spotlights("report", folder)
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert "«d»" in page
    assert "the paper&#x27;s Table 3" in page or "the paper's Table 3" in page
    assert "The network continues: “" in page


# -- the explorer -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["characters", "words"])
def test_the_explorer_opens_a_run_and_finds_what_the_library_finds(which: str, request: pytest.FixtureRequest):
    folder: Path = request.getfixturevalue(which)
    explorer = Explorer(subject_of(folder), prepare=False)
    about = get("run", explorer)
    assert (about["visits"], about["audit"], about["prompt"]) == (False, False, True)
    assert [measure["name"] for measure in about["measures"]] == ["score"]
    trained, _ = open_run(folder)
    prompt = trained.data.vocabulary.split("the hen sat")
    found = get("layer", explorer, q="text:the hen sat", measure="score", layer=LAYER, top=5)
    numbers = trained.data.vocabulary.encode(prompt)
    expected = trained.memory.attend(trained.model, numbers[None], kernel="cosine")[LAYER].at(len(prompt) - 1).top(5)
    assert [row["example"] for row in found["top"]] == expected.columns["example"][0][0]
    for row in found["top"]:
        shown, token = row["shown"], trained.data.train.tokens[row["example"]]
        assert shown["text"][shown["start"] : shown["end"]] == token
    example = found["top"][0]["example"]
    assert get("examples", explorer, code=404)
    assert get(f"examples/{example}", explorer)["columns"]["visits"] > 0
    assert get("query", explorer, q=f"train:{example}")["tokens"]
    assert "folded" in get("mask", explorer, code=422, q="text:the hen sat")["error"]["message"]
