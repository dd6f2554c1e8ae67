"""Whether two decodings of one prompt are the same, and if not, whether rounding explains it.

Two correct implementations round differently, so two candidates whose logits all but tie can change places. That is
told from a fault by a third, more precise computation at that place: wavefill's logits must be as near to it as
sdpa's are (within a factor of two, or a few units of the dtype's last place), neither may be further off than rounding
takes a model of many layers, and the gap between the two candidates must be one that these errors can bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: An error this many times the other implementation's still counts as the same rounding.
ERROR_FACTOR = 2.0
#: Units in the last place of the largest logit that count as rounding whatever the other implementation's error.
FEW_ULPS = 4.0
#: Units in the last place of the largest logit beyond which an error is a fault, for dtypes of 16 and of 32 bits.
#: SmolLM2 of 30 layers was measured to err by up to 3 in bfloat16 and 19 in float32, whose sums round as they go.
MOST_ULPS = {16: 16.0, 32: 128.0}


@dataclass(frozen=True)
class FirstDifference:
    """The first place where two decodings differ.

    index:      of the new token.
    tokens:     the ids that wavefill and sdpa chose.
    gaps:       logit of the chosen id less that of the other's choice, in wavefill's logits and in sdpa's.
    exact_gap:  logit of wavefill's id less that of sdpa's in the precise computation.
    errors:     largest difference of wavefill's and of sdpa's logits from the precise computation.
    precise:    dtype of that computation.
    within_rounding: the verdict.
    """

    index: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    exact_gap: float
    errors: tuple[float, float]
    precise: str
    within_rounding: bool


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    max_logit_difference: over all logits up to and with the first difference; later ones see other inputs.
    """

    identical: bool
    count: int
    max_logit_difference: float
    first_difference: FirstDifference | None

    @property
    def acceptable(self) -> bool:
        return self.identical or (self.first_difference is not None and self.first_difference.within_rounding)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "acceptable": self.acceptable}


def compare(
    tokens: tuple[Sequence[int], Sequence[int]],
    logits: tuple[Sequence[Tensor], Sequence[Tensor]],
    precise: Callable[[int], Tensor],
    eps: float,
) -> Comparison:
    """Compare wavefill's tokens and logits with sdpa's.

    tokens:  new ids of each, equally many.
    logits:  [vocabulary] of each new token.
    precise: gives float64 logits [vocabulary] at new token `index`, given the shared ids before it; called at the
             first difference only, since it takes a whole prefill.
    eps:     unit roundoff spacing of the dtype that both computed in (torch.finfo(dtype).eps).
    """
    ours, theirs = tokens
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    seen = len(ours) if index is None else index + 1
    difference = max((_distance(logits[0][i], logits[1][i]) for i in range(seen)), default=0.0)
    if index is None:
        return Comparison(True, len(ours), difference, None)
    a, b = ours[index], theirs[index]
    mine, other, exact = logits[0][index].double(), logits[1][index].double(), precise(index).double()
    errors = _distance(mine, exact), _distance(other, exact)
    bits, ulp = (32 if eps < 1e-5 else 16), eps * float(exact.abs().max())
    exact_gap = float(exact[a] - exact[b])
    # Two ids change places only where the two errors of a logit, one up and one down, reach over the gap.
    fits = (errors[0] <= max(ERROR_FACTOR * errors[1], FEW_ULPS * ulp) and max(errors) <= MOST_ULPS[bits] * ulp
            and abs(exact_gap) <= 2 * max(errors))
    return Comparison(False, len(ours), difference, FirstDifference(
        index, (a, b), (float(mine[a] - mine[b]), float(other[b] - other[a])), exact_gap, errors,
        {16: "float32", 32: "float64"}[bits], fits))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
