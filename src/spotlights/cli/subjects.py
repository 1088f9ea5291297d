"""Finds the subject of a memory: `--subject`, a run that a package knows, or `./spotlights.toml`.

Only what the user names is executed, on the command line or in the working directory's `spotlights.toml`: nothing found
inside a memory or a run's folder is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import stat
import sys
import tomllib
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import spotlights as sl
from spotlights.errors import SettingError

SETTINGS = Path("spotlights.toml")
_ADVICE = """\
{path} holds a memory, but not the network and the inputs to ask about.
Write them down once, for example in my_subject.py:

    import spotlights as sl
    from train import ...  # your own network and data

    subject = sl.Subject("{path}",
        model=lambda memory: memory.primal(Net()),  # or a function that loads the trained network
        inputs=x_test, labels=y_test,  # one row for each test input
        show=lambda example: x_train[example])

Then add  --subject my_subject.py:subject  to the command, or put this line into ./spotlights.toml:

    subject = "my_subject.py:subject"
"""


def find_subject(path: Path, named: str | None) -> sl.Subject:
    """The subject of a memory; if there is none, an error that shows what to write."""
    subject = known_subject(path, named)
    if subject is None:
        sl.open(path)  # says what is wrong if this is not a memory
        raise SettingError(_ADVICE.format(path=path))
    return subject


def known_subject(path: Path, named: str | None) -> sl.Subject | None:
    """The subject of a memory, if there is one."""
    if named is None:
        subject = sl.Subject.recognised(path)
        if subject is not None:
            return subject
        named = _configured()
    if named is None:
        return None
    subject = load_subject(named)
    return subject if subject.path.resolve() == path.resolve() else subject.at(path)


def memory_path(path: Path) -> Path:
    """The memory itself, where a run's folder is given."""
    subject = None if (path / "memory.json").is_file() else sl.Subject.recognised(path)
    return path if subject is None else subject.path


def other_subject(first: sl.Subject, memory: Path, named: str | None) -> sl.Subject:
    """The subject of a memory to compare with: the same one, unless the run has a subject of its own."""
    return (known_subject(memory, None) if named is None else None) or first.at(memory_path(memory))


def load_subject(named: str) -> sl.Subject:
    """The subject that `FILE.py:NAME` or `module:name` names, or that the function of this name returns."""
    source, colon, name = named.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise SettingError(f"--subject {named}: write FILE.py:NAME or module:name, such as train.py:subject.")
    module = _run_file(Path(source)) if source.endswith(".py") else _run(source, importlib.import_module, source)
    if not hasattr(module, name):
        known = [variable for variable, value in vars(module).items() if isinstance(value, sl.Subject)]
        raise SettingError(f"{source} has no {name!r}. Its subjects: {', '.join(known) or 'none'}.")
    value = getattr(module, name)
    subject = value if isinstance(value, sl.Subject) or not callable(value) else _run(named, value)
    if not isinstance(subject, sl.Subject):
        raise SettingError(f"{named} is a {type(subject).__name__}, not an sl.Subject or a function that gives one.")
    return subject


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingError(f"--subject: there is no file {path}. The working directory is {Path.cwd()}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import would do
    sys.path.insert(0, str(path.parent.resolve()))
    _run(str(path), spec.loader.exec_module, module)
    return module


def _run(name: str, function: Any, *arguments: Any) -> Any:
    """Runs the user's code; what goes wrong there is told with its line."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return function(*arguments)
    except sl.SpotlightsError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingError(
            f"{name} failed: {type(error).__name__}: {error} ({last.filename}, line {last.lineno}). A file that also "
            'trains must train under  if __name__ == "__main__":  alone.'
        ) from error


def _configured() -> str | None:
    if not SETTINGS.is_file():
        return None
    if _may_be_planted(SETTINGS):
        raise SettingError(
            f"{SETTINGS.resolve()} names code to run, belongs to another user, and lies where everybody may write. "
            "Name the subject with --subject, or work in a directory of your own."
        )
    try:
        named = tomllib.loads(SETTINGS.read_text(encoding="utf-8")).get("subject")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{SETTINGS} cannot be read: {error}.") from None
    if named is not None and not isinstance(named, str):
        raise SettingError(f'{SETTINGS}: write  subject = "FILE.py:NAME"  or  subject = "module:name".')
    return named


def _may_be_planted(file: Path) -> bool:
    """Whether anybody may have put a file into the working directory, such as /tmp."""
    open_to_all = bool(Path.cwd().stat().st_mode & stat.S_IWOTH)
    return hasattr(os, "getuid") and open_to_all and file.stat().st_uid != os.getuid()
