"""The build of memfit: that of setuptools, with numba beside it where a wheel's searches can be compiled."""

import os
import shutil

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import get_requires_for_build_wheel as _required

_FOR_SEARCHES = ["numba>=0.60", "numpy>=1.26", "msgspec>=0.19", "ortools>=9.10"]


def get_requires_for_build_wheel(config_settings=None):
    """Return what the build of a wheel needs; without a C compiler the searches are not compiled."""
    has_compiler = shutil.which(os.environ.get("CC", "cc")) is not None
    return [*_required(config_settings), *(_FOR_SEARCHES if has_compiler else [])]
