"""Reports: a plan as one HTML file, as a picture, as a trace for Perfetto, and as plain text.

>>> from memfit.report import CurvePoint, Measured, explain, text_summary, write_html, write_png, write_trace
"""

from __future__ import annotations

from memfit.report.figures import CurvePoint, Measured
from memfit.report.page import write_html
from memfit.report.picture import write_png
from memfit.report.text import explain, text_summary
from memfit.report.trace import write_trace

__all__ = ["CurvePoint", "Measured", "explain", "text_summary", "write_html", "write_png", "write_trace"]
