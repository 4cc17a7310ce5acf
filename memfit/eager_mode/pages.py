"""How much of a budget calls may take where an allocator takes whole pages, which tensors leave unused in part."""

from __future__ import annotations

from memfit.eager_mode.contents import Contents
from memfit.eager_mode.needs import Needs
from memfit.memory.contract import Aim, Contract, Standing, Usage, Warnings
from memfit.system.recorder import empty_cache, held_bytes, page_bytes, record
from memfit.torch_private.cuda import LastStream

_UNUSED_BLOCKS = 2  # of the largest size, which the allocator may leave unused beyond what a pass has shown
_UNUSED_SHARE = 1 / 3  # of the budget, in the allocator's pages on CUDA, before a pass has shown it


class Pages:
    """Leaves the allocator as much of the budget as passes show to be unused in its pages.

    Args:
        given_bytes: the budget, with the reserve.
        contents: of a CUDA device, whose budget is set.
        needs: of its calls.
        may_grow: whether calls get more of the budget where passes leave some: not where torch's allocator takes whole
            blocks, of which more may be unused then.
    """

    def __init__(self, given_bytes: int, contents: Contents, needs: Needs, *, may_grow: bool) -> None:
        self._contents, self._needs, self._may_grow = contents, needs, may_grow
        self._last_stream = LastStream(needs.device)
        self._contract = Contract(given_bytes, page_bytes=page_bytes(needs.device))
        self._standing = Standing(expected_error_bytes=int(_UNUSED_SHARE * given_bytes), is_most=not may_grow)
        self._warnings = Warnings()
        contents.return_unused = self._return_unused
        self._aim(self._contract.aim_bytes(self._standing))

    def _aim(self, aim_bytes: int) -> None:
        self._aim_bytes, contents = aim_bytes, self._contents
        contents.stranded_bytes = self._last_stream.stranded_bytes
        contents.budget_bytes = aim_bytes - contents.reserve_bytes - contents.stranded_bytes

    def follow_stream(self) -> None:
        """Leave out of the budget what torch's allocator keeps for other streams than the current one."""
        self._last_stream.follow(follows_thread=False)
        self._aim(self._aim_bytes)

    def _return_unused(self, need_bytes: int) -> None:
        """Return what passes have left unused to the device, before a call for which nothing more can be freed."""
        if held_bytes(self._needs.device) + need_bytes > self._contract.budget_bytes:
            empty_cache(self._needs.device)

    def open(self) -> None:
        """Begin to measure a pass."""
        self._window = record(self._needs.device).begin()

    def close(self) -> None:
        """End the measurement of the last pass; warn if it took more than the budget."""
        self._tell(self._usage())
        self._contents.return_unused = lambda _need_bytes: None  # which refers to this object

    def _usage(self) -> Usage:
        usage = self._window.close()
        return Usage(taken_bytes=usage.most_taken_bytes, live_bytes=usage.most_live_bytes)

    def _tell(self, usage: Usage) -> None:
        if usage.taken_bytes > self._contract.budget_bytes:
            self._warnings.warn(self._contract.over_text(usage), "over")

    def judge(self) -> None:
        """Aim at what the pass that ends has shown, and begin to measure the next one."""
        usage = self._usage()
        self._tell(usage)
        verdict = self._contract.judge(self._standing, usage, self._aim_bytes)
        if isinstance(verdict, Aim) and (verdict.aim_bytes > self._aim_bytes) == verdict.is_larger:
            if verdict.is_larger:  # what is unused does not grow evenly: by some blocks at once
                more_bytes = verdict.aim_bytes - self._aim_bytes - _UNUSED_BLOCKS * self._needs.largest_bytes
                aim_bytes = self._aim_bytes + max(0, more_bytes) // 2
            else:
                aim_bytes = verdict.aim_bytes
                empty_cache(self._needs.device)
            if aim_bytes != self._aim_bytes:
                self._standing.replace_plan(is_least=False, is_most=not self._may_grow)
                self._aim(aim_bytes)
        self.open()
