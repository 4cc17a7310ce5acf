"""Files: a write is whole or nothing, and what cannot be read is named."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from memfit.errors import InvalidFileError
from memfit.system.files import decode, read_bytes, read_chunks, write_atomically


def test_a_file_comes_back_plain_and_gzipped(tmp_path: Path) -> None:
    for name in ("plain.json", "packed.json.gz"):
        write_atomically(tmp_path / name, b"content" * 1000)
        assert read_bytes(tmp_path / name) == b"content" * 1000
    assert (tmp_path / "packed.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed.json.gz", "plain.json"]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_atomically(tmp_path / name, b"content")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_gzip_is_known_by_its_content_not_its_name(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(gzip.compress(b"content"))
    assert read_bytes(tmp_path / "odd.json") == b"content"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_others_may_read_what_the_umask_lets_them_read(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_pipe_is_written_to_and_stays() -> None:
    reader, writer = os.pipe()
    write_atomically(Path(f"/dev/fd/{writer}"), b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    os.close(writer)


def test_a_pipe_is_read_once() -> None:
    for content in (b"", b"x", b"content", gzip.compress(b"content")):
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        assert read_bytes(Path(f"/dev/fd/{reader}")) == (gzip.decompress(content) if len(content) > 7 else content)
        os.close(reader)


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_no_space_leaves_the_old_file_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, b"the old one")

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullDisk:
        def __init__(self, handle: int, _mode: str) -> None:
            self.handle = handle

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        write = no_space

    if failing == "write":
        monkeypatch.setattr(os, "fdopen", FullDisk)
    elif failing == "fsync":
        monkeypatch.setattr(os, "fsync", no_space)
    else:
        monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(
        InvalidFileError, match=r"plan.json: cannot be written: No space left on device; choose another"
    ):
        write_atomically(path, b"the new one")
    assert path.read_bytes() == b"the old one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "plan.json", b"the new one")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_or_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in ("missing/plan.json", "file/plan.json"):
        with pytest.raises(InvalidFileError, match=r"cannot be written: (No such file|Not a directory)"):
            write_atomically(tmp_path / place, b"")
    with pytest.raises(InvalidFileError, match="cannot be written: Is a directory"):
        (tmp_path / "folder").mkdir()
        write_atomically(tmp_path / "folder", b"")


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:  # a real folder without rights stops nobody who runs as root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(
        InvalidFileError, match=r"plan.json: cannot be written: Permission denied; choose another place"
    ):
        write_atomically(tmp_path / "plan.json", b"")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match=r"missing.json: cannot be read: No such file or directory"):
        read_bytes(tmp_path / "missing.json")
    with pytest.raises(InvalidFileError, match=r"cannot be read: Is a directory"):
        read_bytes(tmp_path)


@pytest.mark.parametrize("kept", [3, 9, 40, -9, -1])
def test_truncated_gzip_is_named(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    path.write_bytes(gzip.compress(os.urandom(200))[:kept])
    with pytest.raises(InvalidFileError, match=r"graph.json.gz: cannot be read: "):
        read_bytes(path)


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    packed = bytearray(gzip.compress(b"content" * 100))
    packed[12:20] = b"\xff" * 8
    path.write_bytes(packed)
    with pytest.raises(InvalidFileError, match=r"graph.json.gz: cannot be read: "):
        read_bytes(path)


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(InvalidFileError, match=r"bomb.gz: more than 1048576 bytes once unpacked; not a memfit file"):
        list(read_chunks(tmp_path / "bomb.gz", chunk_bytes=1 << 16, most_bytes=1 << 20))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "f.json: Input data was truncated; expected a whole JSON document, got 0 bytes"),
        (b"[1, 2", "f.json: Input data was truncated; expected a whole JSON document, got 5 bytes"),
        (b"[1, x]", "f.json: JSON is malformed: invalid character"),
        (b'["a"]', r"f.json: Expected `int`, got `str` - at `\$\[0\]`"),
        (b"\xff\xfe", "f.json: JSON is malformed"),
        (b'{"a": 1}', "f.json: Expected `array`, got `object`"),
        (b"[" * 100_000, "f.json: "),
        (b"[1e999]", "f.json: "),
    ],
)
def test_what_does_not_decode_is_named(content: bytes, message: str) -> None:
    with pytest.raises(InvalidFileError, match=f"^{message}"):
        decode(content, list[int], "f.json")


def test_hostile_nesting_is_one_error() -> None:
    with pytest.raises(InvalidFileError, match=r"f.json: "):
        decode(b'{"a":' * 100_000, dict[str, object], "f.json")
