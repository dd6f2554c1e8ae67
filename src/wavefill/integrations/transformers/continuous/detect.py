"""Which contract the installed transformers has: by release and by shape, and both must agree."""

from __future__ import annotations

import re

from wavefill.integrations.transformers.continuous.contract import PARAM, Contract, Shape
from wavefill.integrations.transformers.continuous.v5_17 import V517
from wavefill.integrations.transformers.continuous.v5_18 import V518
from wavefill.integrations.transformers.continuous.v5_19 import V519
from wavefill.integrations.transformers.continuous.v5_24 import V524
from wavefill.spec import BackendUnavailable, complaint

#: Oldest first. A new contract is one more file and one more line here.
CONTRACTS: tuple[Contract, ...] = (V517(), V518(), V519(), V524())


def tested_range() -> str:
    """The releases that `generate_batch` is tested with, for messages."""
    first, last = CONTRACTS[0].first, CONTRACTS[-1].last
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


def gpu_releases() -> str:
    """Those of them that it is tested with on a GPU."""
    return " and ".join(contract.name for contract in CONTRACTS if contract.on_gpu)


def detect(version: str, shape: Shape) -> Contract:
    """The contract of transformers `version`, whose paged calls look like `shape`.

    Raises `BackendUnavailable` for a release outside the tested range, and for one whose shape is another contract's
    or no known one's: a contract is never guessed.
    """
    release = _minor(version)
    contract = next((c for c in CONTRACTS if c.covers(release)), None)
    if contract is None:
        raise refusal(f"must be {tested_range()}", f"transformers {version}")
    seen = [c for c in CONTRACTS if c.matches(shape)]
    if seen != [contract]:
        looks = " and ".join(c.name for c in seen) or "no known release"
        raise refusal(f"must look as transformers {contract.name} does", f"{version}, which looks like {looks}")
    return contract


def refusal(rule: str, got: str) -> BackendUnavailable:
    """The error for a transformers that `generate_batch` can't run through wavefill on."""
    next_step = (f"Install a transformers release from {tested_range()}, or call disable(model) to run generate_batch "
                 "without wavefill.")
    return BackendUnavailable(complaint(PARAM, rule, got, next_step))


def _minor(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise refusal(f"must be {tested_range()}", f"transformers {version}")
    return int(numbers[1]), int(numbers[2])
