"""Names under which the attention is registered, one for each implementation that a model may come from.

The name says where a forward without a wavefill cache goes (training, `use_cache=False`), and where `disable` goes
back to, so that nothing about a model has to be kept outside of it and a deep copy of an enabled model is complete.
"""

from __future__ import annotations

PREFIX = "wavefill"

#: Begins the name of a model's implementation while a continuous-batching manager lives: one looks for "flash" in it.
BATCHED = "flash_"
#: Attribute of an enabled decoder: the schedule of its attention, None for what "auto" stands for.
SCHEDULE = "_wavefill_schedule"


def name_over(previous: str) -> str:
    """The registered name for a model whose implementation was `previous`."""
    return PREFIX if previous == "sdpa" else f"{PREFIX}_over_{previous}"


def plain_name(name: str) -> str:
    """The name outside of continuous batching, of a name used in or outside of it ("paged|" is 5.17's and 5.18's)."""
    return name.removeprefix("paged|").removeprefix(BATCHED)


def previous_of(name: str | None) -> str | None:
    """The implementation that registered `name` stands over, or None when `name` is not one of ours.

    In continuous batching too, where a name has more in front.
    """
    plain = None if name is None else plain_name(name)
    if plain == PREFIX:
        return "sdpa"
    if plain is not None and plain.startswith(f"{PREFIX}_over_"):
        return plain.removeprefix(f"{PREFIX}_over_")
    return None
