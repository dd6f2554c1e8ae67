"""Pictures of the timelines of a `Choice`: on the terminal, as one HTML file, as PNG.

One lane a worker, time in tiles from left to right on one scale for all schedules, a colour a request, and what is idle
until the last worker is done marked as such.
"""

from __future__ import annotations

from wavefill.timeline.html import to_html, write_html
from wavefill.timeline.png import write_png
from wavefill.timeline.text import to_text

__all__ = ["to_html", "to_text", "write_html", "write_png"]
