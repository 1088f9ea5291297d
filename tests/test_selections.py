"""Claims about the grammar of selections: what is written is what is meant, and mistakes get sentences."""

import string
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spotlights as sl
from spotlights.selections import format_selections, parse_selections, read_selections

CASES = {
    "label=3": [{"label": 3}],
    "label=3,5": [{"label": [3, 5]}],
    "label=3,5 step=0-300 example=12": [{"label": [3, 5], "step": range(0, 300), "example": 12}],
    "label=3; source=mnist": [{"label": 3}, {"source": "mnist"}],
    ' source="old mail, \\"new\\"" ;; ': [{"source": 'old mail, "new"'}],
    "shift=-3,-1.5,1e-3": [{"shift": [-3, -1.5, 0.001]}],
    "shift=-5--2": [{"shift": range(-5, -2)}],
    'source="3"': [{"source": "3"}],
    "label=1 step=0-10,20-30": [{"label": 1, "step": range(0, 10)}, {"label": 1, "step": range(20, 30)}],
    "day=2019-01-02": [{"day": "2019-01-02"}],
    "": [],
}


@pytest.mark.parametrize("text", CASES)
def test_a_text_means_these_conditions(text: str):
    assert parse_selections(text) == CASES[text]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("label", "write column=value"),
        ("label:7", "write column=value"),
        ("label=", "write column=value"),
        ("label=3,", "write column=value"),
        ("label=3 label=5", "given twice"),
        ("step=9-3", "holds nothing"),
        ("source='old mail'", "double quotes"),
        ('source="old', "double quotes"),
        ('source="a""b"', "a comma between"),
        ("example=" + "9" * 30, "at most 18 digits"),
        ("=3", "write column=value"),
    ],
)
def test_a_mistake_gets_a_sentence(text: str, sentence: str):
    with pytest.raises(sl.SettingError, match=sentence):
        parse_selections(text)


WHOLE = st.integers(-(10**18) + 1, 10**18 - 1)
RANGES = st.tuples(WHOLE, WHOLE).filter(lambda ends: ends[0] < ends[1]).map(lambda ends: range(*ends))
VALUES = st.one_of(WHOLE, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=12))
COLUMNS = st.text(string.ascii_letters + string.digits + "_.-é", min_size=1, max_size=8)
CONDITIONS = st.one_of(VALUES, RANGES, st.lists(VALUES, min_size=2, max_size=4))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(COLUMNS, CONDITIONS, min_size=1, max_size=3), max_size=3))
def test_conditions_survive_being_written(selections: list[dict]):
    read = parse_selections(format_selections(selections))
    assert read == selections
    assert [[type(value) for value in each.values()] for each in read] == [
        [type(value) for value in each.values()] for each in selections
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str):
    try:
        selections = parse_selections(text)
    except sl.SettingError:
        return
    assert parse_selections(format_selections(selections)) == selections


KNOWN = {"label": [0, 1, 2], "source": ["2019", "a-b", "10-20"], "example": list(range(100, 200)), "step": range(50)}


def resolved(text: str) -> list[dict]:
    memory: Any = SimpleNamespace(columns=list(KNOWN), distinct=KNOWN.__getitem__, steps=len(KNOWN["step"]))
    return read_selections(text, memory)


def test_values_become_those_that_the_columns_hold():
    assert resolved("source=2019,10-20") == [{"source": "10-20"}, {"source": "2019"}]
    assert resolved("step=40-300") == [{"step": range(40, 50)}]
    assert resolved('label="1",2') == [{"label": [1, 2]}]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("colour=3", "It has: label, source, example, step"),
        ("label=7", "The column has: 0, 1, 2"),
        ("example=7", "The column has 100 to 199"),
        ("example=0-50", "The column has 100 to 199"),
        ("step=50-60", "No slot has step=50-60. The column has 0 to 49"),
        ("source=mnist", '"2019", a-b, "10-20"'),
    ],
)
def test_what_no_slot_has_is_refused_with_what_there_is(text: str, sentence: str):
    with pytest.raises(sl.UnknownNameError) as error:
        resolved(text)
    assert sentence in str(error.value)
