"""What a model's attention costs on a GPU: shapes, bytes and FLOPs of every component, and the least time of each.

Pure arithmetic, without torch. docs/advise.md has every formula with its source.
"""

from __future__ import annotations

from wavefill.advise.components import Component, Formats, Gemm, Load, Machine, components
from wavefill.advise.models import Architecture, load
from wavefill.advise.report import Memory, Report, advise, least_gpus

__all__ = [
    "Architecture", "Component", "Formats", "Gemm", "Load", "Machine", "Memory", "Report", "advise", "components",
    "least_gpus", "load",
]
