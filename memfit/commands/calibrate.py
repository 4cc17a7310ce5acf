"""`memfit calibrate`: measure this device and its link to the host, and compile what plans need."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from memfit.commands import options
from memfit.commands.answer import Answer, rows_table
from memfit.commands.work import working

EXAMPLES = """
Examples:

memfit calibrate

memfit calibrate --host-dir /mnt/nvme

memfit calibrate --device cuda:0 --json
"""


def calibrate(
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="As torch names it: cpu, cuda:0.")] = "cpu",
    host_dir: options.HostDir = None,
) -> Answer:
    """Measure compute, memory and link rates of a device that is here, and keep them for later plans.

    The link of a CPU is that to the disk of --host-dir; plans that offload to that disk use its rates.

    Also compiles searches, packers and the recorder, which the first plan on a machine would wait for.
    """
    from memfit.compile_ahead import compile_ahead
    from memfit.cost.calibration import calibrate as measure_device
    from memfit.cost.environment import find_device
    from memfit.system.recorder import record

    with working() as work:
        find_device(device)
        work.stage("compiling")
        compile_ahead()
        with record(device):
            pass
        work.stage(f"measuring {device}")
        profile = measure_device(device, host_dir)
    keys: dict[str, Any] = msgspec.to_builtins(profile)
    rows = {name.replace("_", " "): str(value) for name, value in keys.items() if value not in (None, {}, "")}
    return Answer(target=device, device=profile.name, keys=keys, parts=(rows_table(rows),))
