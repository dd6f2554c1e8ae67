"""Where the Hopper kernel looks for an element of a tile, against where the tensor memory accelerator puts it."""

from __future__ import annotations

from functools import reduce

import pytest

pytest.importorskip("triton.experimental.gluon")

from wavefill.backends.gpu import hopper, kernels

BOX = 16


def _place(token: int, column: int, block: list[int]) -> int:
    """Byte at which the accelerator writes an element, from its documentation: the rows of a box one after the other in
    the order of its dimensions, then the chunk bits (4 and up) of the address changed by its bits 7 and up."""
    pieces, box, piece = block[2:]
    row = column // piece * box + token % box
    address = (token // box * pieces * box + row) * piece * 2 + column % piece * 2
    width = kernels.shared_layout(block).swizzle_byte_width
    return address ^ (address >> 7 & (width // 16 - 1)) << 4 if width else address


@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
def test_the_layout_is_that_of_the_copy(tokens: int, D: int) -> None:
    block = kernels.box_shape(BOX, D)
    columns = block[2] * block[4]
    bases = hopper.tile_layout.fn(tokens, columns, BOX, block[4]).offset_bases
    assert 1 << len(bases) == tokens * columns
    for offset in range(0, tokens * columns, 7):
        token, column = reduce(lambda a, b: (a[0] ^ b[0], a[1] ^ b[1]),
                               (base for i, base in enumerate(bases) if offset >> i & 1), (0, 0))
        assert _place(token, column, block) == 2 * offset
