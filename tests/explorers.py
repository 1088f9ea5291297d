"""Small explorers for the tests: scikit-learn's digits, and a language model of a few letters."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from starlette.testclient import TestClient
from torch import nn
from torch.nn import functional as F

import spotlights as sl
import training
from demos import run, settings
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.server import build_app
from spotlights_paper.experiments.running import run_experiment
from spotlights_paper.subjects import subject_of

ROOT = Path(tempfile.mkdtemp(prefix="spotlights-explorers-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
HERE = "http://127.0.0.1:8733"
VERSE = "the wolf and the lamb. the fox and the crow. the ant and the dove. the wolf and the crane. "


def prepared(subject: sl.Subject) -> Explorer:
    """An explorer whose masks and verdict, and what influence needs, are there already."""
    explorer = Explorer(subject, prepare=False)
    explorer.prepare(explorer.opened)
    explorer.opened.memory.prepare_influence()
    return explorer


@cache
def client(explorer: Explorer) -> TestClient:
    """A server that lives as long as the tests; starting one for each request would take most of their time."""
    started = TestClient(build_app(explorer), base_url=HERE).__enter__()
    atexit.register(started.__exit__)
    return started


def get(path: str, explorer: Explorer | None = None, code: int = 200, **parameters):
    answer = client(explorer or digits()).get(f"/api/{path}", params=parameters)
    assert answer.status_code == code, answer.text
    return answer.json()


def first() -> int:
    """The id of the first test input."""
    return digits().subject.inputs.ids[0]


@cache
def digits() -> Explorer:
    """The demo's network, recorded in float32, so that its contributions are exact."""
    chosen = settings(ROOT / "digits", dtype="float32")
    run(chosen)
    return prepared(subject_of(chosen.out))


class Letters:
    """A tokenizer of single letters."""

    known = sorted(set(VERSE))

    def encode(self, text: str) -> list[int]:
        return [self.known.index(letter) for letter in text]

    def decode(self, tokens) -> str:
        return "".join(self.known[token] for token in tokens)


class Speller(nn.Module):
    """Says which letter may follow, from the letter and the one before."""

    def __init__(self) -> None:
        super().__init__()
        letters = len(Letters.known)
        self.embed = nn.Embedding(letters, 8)
        self.inner = nn.Linear(16, 12)
        self.head = nn.Linear(12, letters)

    def forward(self, tokens):
        now = self.embed(tokens)
        before = F.pad(now, (0, 0, 1, 0))[:, :-1]
        return self.head(torch.relu(self.inner(torch.cat([now, before], dim=-1))))


@cache
def speller() -> Explorer:
    torch.manual_seed(0)
    model, letters = Speller(), Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    text = torch.tensor(letters.encode(VERSE * 3))
    starts = torch.arange(0, len(text) - 17, 4)
    path = ROOT / "speller.memory"
    with sl.record(model, optimizer, path) as recorder:
        for step in range(60):
            batch = starts[torch.randint(len(starts), (8,), generator=torch.Generator().manual_seed(step))]
            rows = text[batch[:, None] + torch.arange(17)]
            recorder.batch(example=batch, label=rows[:, 1:])
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    passages = {int(start): letters.decode(text[start : start + 17].tolist()) for start in starts}
    inputs = text[starts[:12, None] + torch.arange(16)]
    return prepared(sl.Subject(path, model, inputs, tokenizer=letters, show=lambda example: passages[example]))


@cache
def reader_run() -> Path:
    """The folder of a language run of the command line: characters of a short text, folded, as by default."""
    text = ROOT / "verse.txt"
    text.write_text(VERSE * 12, encoding="utf-8")
    return run_experiment("char-lm", preset="quick", steps=14, text=text, out=ROOT / "reader")


@cache
def exact_run() -> tuple[sl.Memory, nn.Module]:
    """A network in float64, recorded with labels and two sources."""
    model = training.network()
    optimizer = training.sgd(model, momentum=0.9, weight_decay=0.01)
    inputs, labels = training.examples()
    path = ROOT / "exact.memory"
    with sl.record(model, optimizer, path, dtype="float64") as recorder:
        for step in range(20):
            ids = training.chosen(step)
            recorder.batch(example=ids, label=labels[ids], source=["odd" if i % 2 else "even" for i in ids.tolist()])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    return sl.open(path), model.eval()


@cache
def coloured() -> sl.Subject:
    """Colour images with named classes, under Adam; nobody says how examples look."""
    torch.manual_seed(0)
    names = ["red disc", "green square", "a blue triangle"]
    labels = torch.arange(30) % 3
    images = 0.1 * torch.rand(30, 3, 8, 8)
    images[torch.arange(30), labels, 2:6, 2:6] += 0.8
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.ReLU(), nn.Linear(12, 3))
    path = ROOT / "coloured.memory"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with sl.record(model, optimizer, path) as recorder:
        for step in range(24):
            ids = torch.arange(6) + 6 * (step % 5)
            recorder.batch(example=ids, label=labels[ids])
            loss = F.cross_entropy(model(images[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return sl.Subject(path, model, images[:9], labels=labels[:9], classes=names)
