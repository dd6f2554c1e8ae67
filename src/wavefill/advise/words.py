"""Numbers as reports print them."""

from __future__ import annotations


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def gb(nbytes: float) -> str:
    """Bytes in GB, from 1,000 of them in TB."""
    return f"{figure(nbytes / 1e9)} GB" if nbytes < 999.5e9 else f"{figure(nbytes / 1e12)} TB"


def ms(seconds: float) -> str:
    """Seconds in ms, from 1,000 of them in s."""
    return f"{figure(seconds * 1e3)} ms" if seconds < 0.9995 else f"{figure(seconds)} s"


def size(n: float) -> str:
    """A whole number, from 128K on in K, M or G of 1,024 where it comes out even."""
    for power, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if n >= max(power, 1 << 17) and n % power == 0:
            return f"{n / power:.0f}{unit}"
    return f"{n:.0f}"
