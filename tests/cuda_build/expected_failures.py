"""What does not hold its budget yet, by case and share of the bytes that eager reserves."""

from __future__ import annotations

EXPECTED: dict[str, tuple[float, ...]] = {
    "accumulation by percentage": (0.9, 0.75, 0.6),
    "backend": (0.9, 0.75),
    "backend, accumulation": (0.9, 0.75, 0.6),
    "backend, no segments can be mapped": (0.75, 0.6),
    "backend, second device": (0.9, 0.75),
    "compile, Inductor": (0.6,),
    "compile, batches of three sizes": (0.9, 0.75, 0.6),
    "compile, no segments can be mapped": (0.6,),
    "compile, side streams": (0.9, 0.75, 0.6),
    "compile, the user's expandable segments": (0.75,),
    "eager": (0.75, 0.6),
    "eager, GradScaler": (0.75, 0.6),
    "eager, accumulation": (0.9, 0.75, 0.6),
    "eager, no segments can be mapped": (0.9, 0.75, 0.6),
    "eager, second device": (0.75, 0.6),
    "eager, side streams": (0.9, 0.75, 0.6),
    "fit, accumulation": (0.9, 0.75, 0.6),
    "fit, batches of three sizes": (0.9, 0.75, 0.6),
    "fit, offloading, side streams": (0.6,),
    "fit, torch's allocator, side streams": (0.9,),
    "graph break": (0.9, 0.75, 0.6),
    "graph break, backend": (0.75, 0.6),
    "graph break, compile": (0.9, 0.75, 0.6),
    "graph break, eager": (0.75, 0.6),
    "side streams": (0.6,),
}
"""Each of these must fail: one that passes is to be taken off the list."""
