"""What somebody decided about training examples in the explorer's audit: the file that it exports, read back."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlights.errors import SettingError

WORDS = ("keep", "relabel", "drop")


@dataclass(frozen=True)
class Decisions:
    """Decisions about training examples."""

    rows: tuple[dict[str, Any], ...]
    """`example`, `decision` ("keep", "relabel" or "drop"), `given` label, and the new `label` of a relabelled one."""

    @classmethod
    def read(cls, path: str | Path) -> Decisions:
        """Reads what the explorer exported, as JSON or CSV."""
        try:
            if Path(path).exists() and not Path(path).is_file():  # reading a pipe would wait for a writer
                raise OSError("it is not a file")
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise SettingError(f"Cannot read decisions from {path}: {error}.") from None
        try:
            rows = csv.DictReader(io.StringIO(text)) if Path(path).suffix == ".csv" else json.loads(text)["decisions"]
            return cls(tuple(_row(row) for row in rows))
        except (KeyError, TypeError, ValueError, RecursionError, csv.Error) as error:
            raise SettingError(
                f"{path} does not hold decisions as the explorer's audit exports them: rows of example, decision "
                f"({', '.join(WORDS)}), given and label. What is wrong: {error!r}."
            ) from None

    @property
    def dropped(self) -> list[int]:
        """The examples to leave out."""
        return [row["example"] for row in self.rows if row["decision"] == "drop"]

    @property
    def relabelled(self) -> dict[int, int]:
        """The new labels of examples."""
        return {row["example"]: row["label"] for row in self.rows if row["decision"] == "relabel"}


def _row(row: Any) -> dict[str, Any]:
    decision = row["decision"]
    if decision not in WORDS:
        raise ValueError(f"decision {decision!r}")
    given, label = (None if row[name] in (None, "") else _whole_number(row[name]) for name in ("given", "label"))
    if decision == "relabel" and label is None:
        raise ValueError(f"no new label for example {row['example']}")
    return {"example": _whole_number(row["example"]), "decision": decision, "given": given, "label": label}


def _whole_number(value: Any) -> int:
    """A number of 64 bits; not 1.5 or True, which `int` would take as 1."""
    number = int(value) if type(value) in (int, str) else None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(f"{str(value)[:40]} is not a whole number of 64 bits")
    return number
