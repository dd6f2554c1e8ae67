"""What a model's attention costs on a GPU: shapes, bytes and FLOPs of every component, the least time of each, parallel
plans, and what to change.

Pure arithmetic, without torch. docs/advise.md has every formula with its source.
"""

from __future__ import annotations

from wavefill.advise.components import Component, Formats, Gemm, Load, Machine, components
from wavefill.advise.layouts import Plan
from wavefill.advise.memory import Memory
from wavefill.advise.models import Architecture, load
from wavefill.advise.plans import Comparison, Step, compare
from wavefill.advise.report import Report, advise, least_gpus
from wavefill.advise.rules import Finding
from wavefill.advise.sweeps import sweep

__all__ = [
    "Architecture", "Comparison", "Component", "Finding", "Formats", "Gemm", "Load", "Machine", "Memory", "Plan",
    "Report", "Step", "advise", "compare", "components", "least_gpus", "load", "sweep",
]
