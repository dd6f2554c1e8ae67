"""The environment variables that wavefill reads: all of them, typed, in one place.

`get` reads a variable at the moment of the call, so a test or a program may set it late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from wavefill.spec import invalid

PREFIX = "WAVEFILL_"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    type:    str, int, bool or Path; an int is at least 1, a bool is 0 or 1.
    default: what `get` returns when the variable is unset or empty, in words for `doctor`.
    choices: the values of a str, any if there are none.
    """

    name: str
    type: type
    default: str
    doc: str
    choices: tuple[str, ...] = ()


VARIABLES = (
    Variable("WAVEFILL_CACHE_DIR", Path, "the user's cache folder, and Triton's own for its kernels",
             "Folder for converted models and compiled GPU kernels."),
    Variable("WAVEFILL_PEERS", Path, "none",
             "Folder of kernels that `bench --device cuda` compares with: fa3.so, and Python packages in site/."),
    Variable("WAVEFILL_CHECK", bool, "0",
             "1: lengths, page ids, slots and LSEs on a GPU are checked at every call, which waits for the device."),
    Variable("WAVEFILL_PREFILL", str, "auto",
             "Who computes prompts of contiguous caches on a GPU: auto, own (wavefill's kernels), fa3 or flash.",
             ("auto", "own", "fa3", "flash")),
    Variable("WAVEFILL_DEBUG", bool, "0", "1: the command line shows the traceback of an unexpected error."),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> str | int | bool | Path | None:
    """Value of the registered variable `name`, or None when it is unset or empty.

    Raises InvalidArgument when the text is not of the variable's type, KeyError for a name not in `VARIABLES`.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if variable.type is bool:
        if text not in ("0", "1"):
            raise invalid(name, "must be 0 or 1", repr(text), "Set one of these, or unset it.")
        return text == "1"
    if variable.type is int:
        if not text.isdecimal() or int(text) < 1:
            raise invalid(name, "must be a whole number from 1", repr(text), "Set a number, or unset it.")
        return int(text)
    if variable.choices and text not in variable.choices:
        raise invalid(name, f"must be one of {', '.join(variable.choices)}", repr(text),
                      "Set one of these, or unset it.")
    return Path(os.path.expanduser(text)) if variable.type is Path else text


def flag(name: str) -> bool:
    """A bool variable, False when unset."""
    return name in os.environ and bool(get(name))


def unknown() -> list[str]:
    """Variables that are set, bear the prefix and are not registered: most often a misspelling."""
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in _BY_NAME)


def cache_dir() -> Path:
    """Folder of what wavefill computes once and keeps: WAVEFILL_CACHE_DIR, else the user's cache folder."""
    chosen = get("WAVEFILL_CACHE_DIR")
    if isinstance(chosen, Path):
        return chosen
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("wavefill", appauthor=False))
