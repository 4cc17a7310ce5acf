"""Device profiles: the built-in ones, those in files, and the measured one of this machine."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import msgspec
import pytest
import torch
from measuring import QUICK

from memfit.cost.calibration import calibrate, linked_device, local_device
from memfit.cost.device_profiles import DEVICES, load_device
from memfit.cost.environment import find_device
from memfit.device import Device
from memfit.errors import HostMemoryError, InvalidDeviceError, InvalidFileError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_known_devices() -> None:
    assert list(DEVICES) == ["t4", "a10", "a100-40", "a100-80", "h100", "h200", "rtx4090", "gtx1080ti", "titan-xp"]
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.source
        assert device.alignment_bytes == 512
        assert device.memory_bytes is not None
        assert device.memory_bytes > 10 << 30
        assert device.memory_bytes_per_second is not None
        assert device.to_host_bytes_per_second is not None
        assert device.to_host_bytes_per_second < device.memory_bytes_per_second
        rates = device.flops_per_second
        assert rates["float64"] <= rates["float32"] <= rates.get("float16", rates["float32"])
        assert ("float16" in rates) == (name not in ("gtx1080ti", "titan-xp"))
        assert ("bfloat16" in rates) == ("tfloat32" in rates) == (name not in ("gtx1080ti", "titan-xp", "t4"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("a100", "a100-80"),
        ("A100_40GB", "a100-40"),
        ("a100-80gb", "a100-80"),
    ],
)
def test_names_are_forgiving(text: str, name: str) -> None:
    assert load_device(text) is DEVICES[name]


@pytest.mark.parametrize(("text", "hint"), [("h10O", "; did you mean 'h100'"), ("abacus", ""), ("", "")])
def test_an_unknown_name_lists_those_that_there_are(text: str, hint: str) -> None:
    with pytest.raises(
        InvalidDeviceError, match=f"no device profile is called '{text}'; there are t4, .*rtx4090.*{hint}"
    ):
        load_device(text)


def test_a_profile_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "memory_bytes_per_second": 1e9, "flops_per_second": {"float32": 2e9}}')
    device = load_device(path)
    assert (device.name, device.memory_bytes_per_second, device.flops_per_second) == ("mine", 1e9, {"float32": 2e9})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"name": "x", "memory_rate": 1}', r"mine.json: Object contains unknown field `memory_rate`"),
        ('{"name": "x", "flops_per_second": {"float32": -1}}', r"mine.json: .* at `\$.flops_per_second"),
        ('{"name": "x"', "mine.json: "),
        ('{"name": "x", "alignment_bytes": 0}', r"mine.json: .* at `\$.alignment_bytes`"),
    ],
)
def test_a_bad_profile_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(InvalidFileError, match=message):
        load_device(str(path))


def test_a_profile_file_that_is_not_there() -> None:
    with pytest.raises(InvalidFileError, match=r"nowhere/mine.json: cannot be read: No such file"):
        load_device("nowhere/mine.json")


def test_without_calibration_sizes_are_known_and_rates_are_not() -> None:
    device = local_device("cpu")
    assert device.alignment_bytes == 64
    assert device.memory_bytes is not None
    assert device.memory_bytes > 1 << 30
    assert device.memory_bytes_per_second is None
    assert device.to_host_bytes_per_second is None
    assert device.flops_per_second == {}


def test_a_calibrated_device_is_kept(empty_cache: Path) -> None:
    measured = calibrate("cpu", amounts=QUICK)
    assert set(measured.flops_per_second) == {"float32", "bfloat16", "float16", "float64"}
    assert all(rate > 0 for rate in measured.flops_per_second.values())
    assert measured.memory_bytes_per_second is not None
    assert measured.memory_bytes_per_second > 0
    assert measured.launch_seconds > 0
    assert measured.has_link, "a CPU's link is the one to its disk"
    assert measured.to_host_shared_bytes_per_second <= measured.to_host_bytes_per_second
    assert measured.to_device_shared_bytes_per_second <= measured.to_device_bytes_per_second
    assert measured.copy_latency_seconds > 0
    assert local_device(torch.device("cpu")) == measured
    (path,) = (empty_cache / "devices").iterdir()
    assert load_device(path) == measured
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert local_device("cpu").memory_bytes_per_second is None, "other threads have other rates"
    finally:
        torch.set_num_threads(threads)


def test_the_link_is_that_to_the_disk_of_a_directory(tmp_path: Path) -> None:
    device = calibrate("cpu", tmp_path, amounts=QUICK)
    assert device.has_link
    assert str(tmp_path) in device.source
    assert linked_device("cpu", 1, tmp_path) == device, "what was measured of a disk is kept"
    with pytest.raises(HostMemoryError, match=r"host_dir '.*/missing' cannot be used: No such file"):
        calibrate("cpu", tmp_path / "missing")


def test_rates_come_from_the_clock() -> None:
    amounts = dataclasses.replace(QUICK, smallest_product=100, copy_bytes=1000, launches=4)
    now = iter(range(10_000))
    device = calibrate("cpu", clock=lambda: float(next(now)), amounts=amounts)  # each run takes a second
    assert device.flops_per_second["float32"] == 2 * 100**3, "a long product is run twice, and no longer one"
    assert device.memory_bytes_per_second == 2 * 1000
    assert device.launch_seconds == 1 / 4


def test_a_damaged_calibration_is_said(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibrate("cpu", amounts=QUICK)
    (path,) = (empty_cache / "devices").iterdir()
    path.write_text("{")
    with caplog.at_level(logging.WARNING, "memfit"):
        assert local_device("cpu").memory_bytes_per_second is None
    assert "the calibrated rates are not used: " in caplog.text
    assert "run `memfit calibrate` again" in caplog.text


def test_a_calibration_that_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "memfit"):
        assert calibrate("cpu", amounts=QUICK).memory_bytes_per_second is not None
    assert len(caplog.records) == 2
    assert "rates of the link are not kept: " in caplog.text
    assert "calibrated rates are not kept: " in caplog.text


@pytest.mark.parametrize("name", ["gpu", "cuda:77", "meta", ""])
def test_devices_that_are_not_here(name: str) -> None:
    for function in (calibrate, local_device, find_device):
        with pytest.raises(InvalidDeviceError, match=f"'{name}' is not"):
            function(name)


def test_sizes_round_up_to_the_alignment() -> None:
    device = Device(name="x", alignment_bytes=512)
    assert [device.aligned(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "x", "alignment_bytes": 0}, Device)


@pytest.mark.gpu
@pytest.mark.arithmetic
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_calibrating_cuda() -> None:
    device = calibrate("cuda")
    assert device.alignment_bytes == 512
    assert device.flops_per_second["tfloat32"] >= device.flops_per_second["float32"]
    assert device.to_host_bytes_per_second is not None
    assert device.to_device_bytes_per_second is not None
