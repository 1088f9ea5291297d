"""A language model's part of the report: the paper's queries, and how good such passages are."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import numpy as np

from spotlights.attention.passage_results import Passage
from spotlights.experiments.language.evaluation import MEASURES, Estimate, Evaluation, Judged
from spotlights.experiments.language.results import Table
from spotlights.experiments.language.two_levels import TwoLevels
from spotlights.figures.two_levels import Column, Snippet, plot_two_levels
from spotlights.report import tables
from spotlights.report.gather import Language
from spotlights.report.pictures import Shown

TITLES = {
    "aesop-char": "A language model of characters: Æsop's Fables",
    "aesop-gpt": "A GPT of characters: Æsop's Fables",
    "wikitext2-word": "A language model of words: WikiText-2",
    "char-lm": "A language model of characters",
    "word-lm": "A language model of words",
}
_SHARES = ("same_end", "next_true", "next_said")


def language_section(language: Language, embed: Callable[[Shown], str]) -> str:
    """One run: its settings, the passages of each query, the evaluation.

    Args:
        language: the run.
        embed: makes a figure a part of the page.
    """
    run, results = language.run, language.results
    parts = [
        f'<h2 id="{language.name}">{escape(TITLES.get(run.experiment, run.experiment))} '
        f"<small>({escape(run.preset)})</small></h2>",
        _settings(language),
    ]
    parts += [embed(_two_levels(found, f"{language.name}-two-levels")) for found in results.two_levels]
    parts += [_query(table) for table in results.tables]
    if results.evaluation is not None:
        parts.append(_evaluation(results.evaluation))
    return "\n".join(parts)


def _two_levels(found: TwoLevels, name: str) -> Shown:
    prompt, token = found.prompt, found.prompt[found.token]
    titles = {
        "alike": "training tokens that look alike (score)",
        "by_query": "why it looks there: through its query",
        "by_key": "why it is looked at: through its key",
        "by_value": f"what it adds to {found.answer!r}: through its value",
    }
    return Shown(
        name,
        f"Two levels of retrieval in block {found.block}. Above: the softmax attention of the token {token!r}. Below, "
        "for each of the tokens it looks at most: which training tokens its projections attend to. With the initial "
        "weights, what all training tokens add through the query, or through the key, makes up the inclination q·k/√d "
        "to look there; what they add through the value is first order.",
        plot_two_levels(
            prompt,
            np.array(found.weights),
            [
                (
                    looked.place,
                    f"{rank}. {prompt[looked.place]!r} at place {looked.place}: {looked.weight:.0%} of the attention, "
                    f"inclination {looked.inclination:.2f}",
                )
                for rank, looked in enumerate(found.looked, start=1)
            ],
            [
                Column(title, [[_snippet(each) for each in getattr(looked, what)] for looked in found.looked])
                for what, title in titles.items()
            ],
        ),
    )


def _snippet(passage: Passage) -> Snippet:
    hit = max(passage.hits, key=lambda hit: hit.score)
    place = hit.position - passage.start
    text = passage.text
    return Snippet("".join(text[:place]), text[place], "".join(text[place + 1 :]), hit.score)


def _settings(language: Language) -> str:
    run = language.run
    quality = "; ".join(f"{name}: {value}" for name, value in run.outcome())
    rows = [[key, value] for key, value in run.settings.items()] + [[k, v] for k, v in run.versions.items()]
    return f"""<p class="lead">Trained on {run.train_tokens:,} {run.unit}s, tested on {run.test_tokens:,};
a vocabulary of {run.vocabulary:,}. {escape(quality.capitalize())}.
A memory of {run.slots:,} slots in {run.memory_bytes / 1e6:,.0f} MB; training with recording took
{run.seconds["training"]:,.0f} seconds.
<code>spotlights run {escape(run.experiment)} --preset {escape(run.preset)} --seed {run.seed}</code></p>
<details><summary>All settings and versions</summary>
{tables.html_table(["setting", "value"], rows, numbers_from=2)}</details>"""


def _query(table: Table) -> str:
    papers = "; ".join(f"“{passage}”" for passage in table.papers)
    beside = f" The paper's passages: {papers}." if papers else ""
    found = "\n".join(f'<div class="scroll">{passages._repr_html_()}</div>' for passages in table.ours)
    return f"""<h3>“… {escape(table.query)}” <small>(the paper's Table {table.number})</small></h3>
<p class="lead">From the {escape(table.source)} text, position {table.position:,}.{escape(beside)}</p>
{found}"""


def _evaluation(found: Evaluation) -> str:
    head = ["passages", "kernel"]
    for name in MEASURES.values():
        head += [name, "trained has more"]
    verdicts = " ".join(found.verdict(kernel) for kernel in kernels(found))
    end = "the same last three characters" if found.unit == "character" else "the same last word"
    return f"""<h3>How good are the passages?</h3>
<p class="lead">Over {found.asked:,} random positions of the test text, each with {found.context} tokens before it:
the mean number of tokens that the {found.neighbours} best passages share with it, counted back from the attended
token; the share of them (%) with {end}; and how often (%) the vote of the tokens that follow them is the true next
token, or the one that the network says (the network itself is right in {_share(found.right)} %). ± is a standard
error; differences are paired by position. {escape(verdicts)}</p>
<div class="scroll">{tables.html_table(head, [evaluation_row(each) for each in found.judged], numbers_from=2)}</div>"""


def kernels(found: Evaluation) -> list[str]:
    """Those that passages were found with."""
    return [each.kernel for each in found.judged if each.how == "trained" and each.kernel is not None]


def evaluation_row(judged: Judged) -> list[object]:
    """One way of finding passages, and what the trained network's have more."""
    row: list[object] = [judged.how, judged.kernel or "–"]
    for name in MEASURES:
        shown = _share if name in _SHARES else _tokens
        row += [shown(judged.measures[name]), "–" if judged.how == "trained" else shown(judged.gain[name], sign="+")]
    return row


def _share(estimate: Estimate, sign: str = "") -> str:
    return f"{100 * estimate.mean:{sign}.1f} ± {100 * estimate.error:.1f}"


def _tokens(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.mean:{sign}.2f} ± {estimate.error:.2f}"
