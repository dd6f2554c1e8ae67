"""What the machine code of the kernel of several query tokens must keep to, without a GPU: products follow each other
and run beside softmax, and nothing is read before the kernel that makes the rows has ended.

The first two were lost once without a word from the compiler, a fifth of the speed of a prompt; the third was, too.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile

import pytest
from triton import knobs

from wavefill.backends.gpu import many, nvrtc
from wavefill.backends.gpu.kernels import CHUNKS, ROUNDS, SPLITS, STREAM_K

BUILDS = [many.Build("bfloat16", D, queries, 16, kind, False, False, False, False, False)
          for D in (64, 128) for queries, kind in ((128, ROUNDS), (64, STREAM_K))]


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: f"D{build.D}-{build.queries}")
def loop(request: pytest.FixtureRequest) -> list[str]:
    """Instructions, without operands, from the first product of the loop over tiles to the wait for its last."""
    names = instructions(request.param)
    # The only wait that leaves products to run is that of the loop, after those of scores and values.
    assert names.count("WAIT1") == 1
    middle = names.index("WAIT1")
    begin = max(i for i, name in enumerate(names[:middle]) if name == "WAIT0")
    return names[begin + 1 : middle + names[middle:].index("WAIT0") + 1]


def instructions(build: many.Build) -> list[str]:
    """The names of a build's instructions, without what follows a dot; waits for products with the number left."""
    code, _ = nvrtc.compile_source(build)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True,
                              check=True).stdout
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9.]+)([^;]*);", text, re.MULTILINE)
    return [name.split(".")[0] if name != "WARPGROUP.DEPBAR.LE" else f"WAIT{operands.split(',')[1].strip()[-1]}"
            for name, operands in found]


def test_no_product_waits_for_its_descriptor(loop: list[str]) -> None:
    """Between two products lie sums of the warp's own registers: none that lanes work out and hand over."""
    products = [i for i, name in enumerate(loop) if name == "HGMMA"]
    gaps = [loop[a + 1 : b] for a, b in itertools.pairwise(products)]
    assert len(products) >= 8
    # One gap, between the scores' and the values', holds what values need.
    assert sum("R2UR" in gap for gap in gaps) <= 1, gaps


def test_scores_become_weights_while_the_products_with_values_run(loop: list[str]) -> None:
    """All exponentials of a tile come before the wait for them."""
    assert loop[loop.index("WAIT1"):].count("MUFU") >= 32


@pytest.mark.parametrize("kind", [SPLITS, CHUNKS, STREAM_K, ROUNDS])
@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_no_row_is_read_before_the_wait(queries: int, kind: int, masked: bool) -> None:
    """A program may begin while the kernel before it still makes the rows; it waits for that, and then reads them."""
    build = many.Build("bfloat16", 128, queries, 16, kind, False, False, False, False, masked)
    names = instructions(build)
    assert build.joined or not {"LDG", "LD"} & set(names[: names.index("ACQBULK")])
