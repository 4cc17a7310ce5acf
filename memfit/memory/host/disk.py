"""Host copies of a CPU's storages, in a file. They are made by two threads, one for each direction."""

from __future__ import annotations

from pathlib import Path

import torch

from memfit.errors import HostMemoryError
from memfit.memory.host.form import Form
from memfit.system.budget import format_bytes
from memfit.system.spill_file import Span, SpillFile
from memfit.system.worker import Call


class DiskSlab:
    """A slab in a file."""

    def __init__(self, size_bytes: int, directory: Path | None) -> None:
        self._file = SpillFile(size_bytes, directory)
        self.size_bytes = self._file.size_bytes
        self.settle, self.close = self._file.settle, self._file.close

    def copy(self, source: torch.Tensor, offset: int) -> DiskCopy:
        """Start the copy of a tensor's storage to an offset, and return that copy."""
        return DiskCopy(self._file, source, offset)


class DiskCopy:
    """A host copy in a file."""

    __slots__ = ("_file", "_form", "_offset", "_returned", "_source", "_written")

    def __init__(self, file: SpillFile, source: torch.Tensor, offset: int) -> None:
        self._file, self._offset = file, offset
        self._form = Form.of(source)
        self._source: torch.Tensor | None = source
        self._returned: Call[Span] | None = None
        self._written = file.write(source.untyped_storage().data_ptr(), self._form.storage_bytes, offset, source)

    def wait(self) -> None:
        """Wait for the copy to the file, and release the tensor."""
        _finish(self._written, self._form, "to")
        self._source = None

    def prefetch(self) -> torch.Tensor:
        """Allocate memory, start the copy back, and return the tensor, to be read after `arrived` only."""
        tensor = self._form.allocate()
        address = tensor.untyped_storage().data_ptr()
        self._returned = self._file.read(address, self._form.storage_bytes, self._offset, tensor)
        return tensor

    def arrived(self) -> None:
        """Wait for the copy back."""
        if self._returned is not None:
            _finish(self._returned, self._form, "from")

    def spans(self) -> tuple[Span | None, Span | None]:
        """Return when the copies to the file and back started and ended; None if one was not made."""
        copies = (self._written, self._returned)
        to_host, to_device = (copy.result() if copy is not None and copy.succeeded else None for copy in copies)
        return to_host, to_device


def _finish(copy: Call[Span], form: Form, direction: str) -> None:
    try:
        copy.result()
    except OSError as error:
        raise HostMemoryError(
            f"{format_bytes(form.storage_bytes)} could not be copied {direction} the file of offloaded storages: "
            f"{error.strerror or error}; name another directory as host_dir"
        ) from error.with_traceback(None)  # its frames hold what autograd holds, and the call holds the error
