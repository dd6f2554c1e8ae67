"""What stands between a dot product and the softmax, and which combinations of it are served.

The order is the same everywhere: scale, soft cap, ALiBi, then what hides keys (causal, window, the mask of a draft),
then the softmax, in whose denominator a sink is one more logit. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any

from wavefill.spec import DTYPE_BYTES, SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Options:
    """The optional parts of an attention call's scores, as a backend takes them.

    softcap:      scores s become softcap * tanh(s / softcap); above 0.
    sinks:        [HQ] float32, one further logit of each query head, without a value; not scaled, capped or biased.
    alibi_slopes: [HQ] float32; scores lose slope * |pos - j| for query position pos and key j.
    mask:         [T, W] int32, packed bits: bit j % 32 of word j // 32 of row t says whether query token t sees token
                  j of its request's own query tokens. It only hides.

    Tensors are contiguous and on q's device.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None


NONE = Options()
#: The names of the optional parts, which are those of the arguments.
OPTIONS = tuple(field.name for field in fields(Options))


# ---- the matrix of options


@dataclass(frozen=True)
class Cell:
    """One combination of options; the fields are those of `AXES`."""

    dtype: str
    sinks: bool
    softcap: bool
    window: bool
    alibi_slopes: bool
    mask: bool
    q_len: str
    schedule: str
    run: str


#: The values of each axis, in words where they are more than a name.
AXES: dict[str, dict[Any, str]] = {
    "dtype": {name: name for name in DTYPE_BYTES},
    "sinks": {False: "none", True: "[HQ]"},
    "softcap": {False: "none", True: "a number"},
    "window": {False: "none", True: "a number of keys"},
    "alibi_slopes": {False: "none", True: "[HQ]"},
    "mask": {False: "none", True: "[T, W]"},
    "q_len": {
        "1": "1 (`decode_attention`)", "draft": "2 to 16 (`attention`)", "chunk": "more, mixed with 1 (`attention`)",
    },
    "schedule": {name: name for name in SCHEDULES if name != "auto"},
    "run": {"eager": "eager", "compiled": "under `torch.compile`", "graph": "in a captured CUDA graph"},
}

#: What a device does not have: values of axes, and the words of the error that a call with all of them raises.
_REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = tuple(
    (device, {"mask": True, "q_len": "1"}, "got an unexpected keyword argument 'mask'") for device in ("cpu", "cuda")
)
_RUNS = {"cpu": ("eager", "compiled"), "cuda": ("eager", "compiled", "graph")}


def cells(device: str) -> Iterator[Cell]:
    """Every combination that can be asked of a device ("cpu", "cuda"), served or not."""
    for values in product(*(_RUNS[device] if name == "run" else axis for name, axis in AXES.items())):
        yield Cell(*values)


def refusal(cell: Cell, device: str) -> str | None:
    """Words of the error with which a device refuses a combination, None where it serves it."""
    given = asdict(cell)
    for where, values, words in _REFUSED:
        if where == device and all(given[name] == value for name, value in values.items()):
            return words
    return None


def table() -> str:
    """The matrix in Markdown: the axes, and what is not served."""
    lines = ["| axis | values |", "| --- | --- |"]
    lines += [f"| `{name}` | {'; '.join(axis.values())} |" for name, axis in AXES.items()]
    counts = []
    for device, word in (("cpu", "CPU"), ("cuda", "GPU")):
        every = list(cells(device))
        served = sum(refusal(cell, device) is None for cell in every)
        counts.append(f"{served:,} of {len(every):,} on the {word}")
    lines += ["", f"Served are {' and '.join(counts)}. The others are refused:", "",
              "| device | combination | error |", "| --- | --- | --- |"]
    for device, values, words in _REFUSED:
        combination = ", ".join(f"`{name}` {AXES[name][value]}" for name, value in values.items())
        lines.append(f"| {device} | {combination} | {words} |")
    return "\n".join(lines)
