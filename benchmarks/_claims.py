"""The claims, figures, tables and algorithms of the five papers: where each stands in memfit, and what shows it.

The written verdict has to agree with `Found.holds`: `tests/test_claims.py` fails where a stored figure says otherwise,
and the table says so.
"""

from __future__ import annotations

import _claims_chen as chen
import _claims_dqn as dqn
import _claims_feng as feng
import _claims_mxnet as mxnet
import _claims_sekiyama as sekiyama
from _claim import Claim, Results, Verdict

from memfit.errors import InvalidOptionError

NOT_AS_WRITTEN = "**not as written**"
CLAIMS: tuple[Claim, ...] = (*chen.CLAIMS, *feng.CLAIMS, *mxnet.CLAIMS, *sekiyama.CLAIMS, *dqn.CLAIMS)


def found_of(claim: Claim, results: Results) -> tuple[str, str]:
    """Return how a claim is reproduced, and its verdict, in words.

    Raises:
        KeyError, ValueError: the script that it reads stored nothing, or not enough.
    """
    written = f"{claim.verdict.value}: {claim.why}" if claim.why else claim.verdict.value
    if claim.measure is not None:
        found = claim.measure(results)
        agrees = found.holds == (claim.verdict in (Verdict.REPRODUCED, Verdict.OTHER))
        return found.text, written if agrees else f"{NOT_AS_WRITTEN}, which is: {written}"
    if claim.is_test:
        return f"the test `{claim.command[0].rpartition('::')[2]}`", written
    return "–", written


def claim_named(row: str) -> Claim:
    """Return the claim of a row; InvalidOptionError: no such row."""
    for claim in CLAIMS:
        if claim.row == row:
            return claim
    raise InvalidOptionError(f"no row is called {row!r}; `make evidence` lists the {len(CLAIMS)} that there are")
