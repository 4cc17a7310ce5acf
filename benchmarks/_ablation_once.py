"""What many searches of one problem have in common, computed once: bounds, orders and starting points.

They do not depend on the seed, nor on most of the parts. Only for searches of equal moves: the seconds are not theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from memfit.planners import search
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.starts import starting_points

_DEPENDS_ON = {
    (search, "search_order"): ("peak_reducing_order",),
    (search, "least_budget_bound"): ("last_large_op",),
    (search, "least_recompute_seconds"): ("boundary_candidates",),
    (search, "exact"): ("boundary_candidates",),
    (starting_points, "structured"): ("peak_reducing_order", "waiting_gradients", "nested_segments"),
    (starting_points, "kept_by_stages"): ("peak_reducing_order",),
    (starting_points, "kept_by_segments"): ("peak_reducing_order",),
}
"""Functions by the module that calls them, and the parts that each depends on, beside the problem."""


@contextmanager
def computed_once(parts: Parts, known: dict[tuple[Any, ...], Any]) -> Generator[None]:
    """Let searches of one problem without some parts share what they have in common, in `known`."""
    originals = {(module, name): getattr(module, name) for module, name in _DEPENDS_ON}
    for (module, name), original in originals.items():
        key = (name, *(getattr(parts, part) for part in _DEPENDS_ON[module, name]))
        setattr(module, name, _remembered(original, key, known))
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def _remembered(original: Callable[..., Any], key: tuple[Any, ...], known: dict[tuple[Any, ...], Any]) -> Any:
    def remembered(*arguments: Any, **options: Any) -> Any:
        if key not in known:
            known[key] = original(*arguments, **options)
        return known[key]

    return remembered
