"""Names under which the attention is registered, one for each implementation that a model may come from.

The name says where a forward without a wavefill cache goes (training, `use_cache=False`), and where `disable` goes
back to, so that nothing about a model has to be kept outside of it and a deep copy of an enabled model is complete.
"""

from __future__ import annotations

PREFIX = "wavefill"


def name_over(previous: str) -> str:
    """The registered name for a model whose implementation was `previous`."""
    return PREFIX if previous == "sdpa" else f"{PREFIX}_over_{previous}"


def previous_of(name: str | None) -> str | None:
    """The implementation that registered `name` stands over, or None when `name` is not one of ours.

    Continuous batching puts "paged|" before the name or "_flash" after it while a manager lives.
    """
    if name is not None:
        name = name.removeprefix("paged|").removesuffix("_flash")
    if name == PREFIX:
        return "sdpa"
    if name is not None and name.startswith(f"{PREFIX}_over_"):
        return name.removeprefix(f"{PREFIX}_over_")
    return None
