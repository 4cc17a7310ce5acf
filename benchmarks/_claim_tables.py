"""The last table of docs/papers.md: each claim of the five papers, where it stands, and what became of it."""

from __future__ import annotations

from typing import Any

from _claim import Results
from _claims import CLAIMS, Verdict, found_of

EVIDENCE = "evidence"
"""The name of the table."""

HEAD = ["row", "paper", "claim", "where in the code", "reproduced as", "held against", "verdict"]

Stored = dict[str, dict[str, Any]]


def claim_by_claim(results: Results) -> tuple[list[str], list[list[str]], str, Stored] | None:
    """Return head, rows, note and all results that the rows read; None if a script that a row reads stored nothing."""
    read: dict[str, Stored] = {}

    def kept(script: str) -> Stored:
        return read.setdefault(script, results(script))

    rows: list[list[str]] = []
    for claim in CLAIMS:
        try:
            text, verdict = found_of(claim, kept)
        except (KeyError, ValueError):
            return None
        where = f"`{claim.module}`" if claim.module else ""
        rows.append([f"`{claim.row}`", claim.paper, claim.claim, where, text, claim.against, verdict])
    counts = {verdict.value: sum(row[-1].partition(":")[0] == verdict.value for row in rows) for verdict in Verdict}
    note = f"{len(rows)} rows: {'; '.join(f'{verdict} {count}' for verdict, count in counts.items())}."
    stored = {f"{script}/{name}": payload for script, each in read.items() for name, payload in each.items()}
    return HEAD, rows, note, stored
