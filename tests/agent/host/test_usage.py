"""What a machine's figures are, with a made-up ``/proc`` and an NVML of a few lines of C."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spotkeeper.contract import codec
from spotkeeper.contract.usage import DeviceUsage
from spotkeeper_agent.host import nvml, usage
from spotkeeper_agent.job import usage as job_usage
from spotkeeper_agent.job.usage import nvidia_devices

NVML = """
#include <string.h>
typedef struct { unsigned gpu, memory; } util; typedef struct { unsigned long long total, free, used; } mem;
static int one, two;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = i ? &two : &one; return 0; }
int nvmlDeviceGetUtilizationRates(void *h, util *u) { u->gpu = h == &one ? 93 : 0; u->memory = 7; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, mem *m) { m->total = 80ULL << 30; m->used = 3ULL << 30; return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned s, unsigned *t) { *t = s == 0 ? 61 : 999; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *p) { *p = 412500; return 0; }
int nvmlDeviceGetTotalEccErrors(void *h, unsigned kind, unsigned count, unsigned long long *n) {
  *n = 10 * kind + count; return h == &one ? 0 : 3; }
"""


def library(folder: Path, init: int = 0) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source, made = folder / "nvml.c", folder / "nvml.so"
    source.write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DINIT={init}", "-o", made, source], check=True)
    return str(made)


def test_devices_as_the_driver_reports_them(tmp_path: Path) -> None:
    first, second = nvml.devices(library(tmp_path))
    assert first == {
        **{"index": 0, "busy": 0.93, "memory_bytes": 80 << 30, "memory_used_bytes": 3 << 30},
        **{"temperature_c": 61, "power_w": 412.5, "ecc_errors": 10},
    }
    assert (second["index"], second["busy"], second["ecc_errors"]) == (1, 0.0, None), "a device without ECC"


def test_no_driver_is_no_device(tmp_path: Path) -> None:
    assert nvml.devices(str(tmp_path / "absent.so")) == []
    assert nvml.devices(library(tmp_path, init=9)) == [], "a library whose driver is not loaded"


def test_the_hosts_figures(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  400 kB\nOdd\n")
    (tmp_path / "stat").write_text("cpu  150 0 120 710 120 0 0 0 9 9\ncpu0 1\n")
    found = usage.host_usage(tmp_path, (800, 1000), usage.cpu_ticks(tmp_path), tmp_path)
    assert found.cpu == pytest.approx(0.7), "70 of 100 ticks were neither idle nor waiting for a disk"
    assert (found.memory_bytes, found.memory_used_bytes) == (1024_000, 614_400)
    assert found.disk_bytes is None, "nothing is mounted there"
    assert usage.host_usage(tmp_path, (830, 1100), (830, 1100), tmp_path).cpu is None, "no time has passed"
    assert usage.host_usage(tmp_path, None, (830, 1100), tmp_path).cpu is None


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    found = usage.host_usage(tmp_path, (0, 0), usage.cpu_ticks(tmp_path / "absent"), tmp_path / "absent")
    assert (found.cpu, found.memory_bytes, found.memory_used_bytes) == (None, None, None)
    assert (usage.host_usage(Path("/"), None, None, tmp_path).disk_bytes or 0) > 0


def test_the_process_prints_what_the_agent_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(nvml.__file__).read_text().replace(nvml.LIBRARY, library(tmp_path))
    (tmp_path / "nvml.py").write_text(source)
    monkeypatch.setattr(job_usage, "NVML", tmp_path / "nvml.py")
    monkeypatch.setattr(job_usage, "DRIVER", tmp_path)
    assert [one.index for one in codec.decode(nvidia_devices(), tuple[DeviceUsage, ...])] == [0, 1]
    monkeypatch.setattr(job_usage, "DRIVER", tmp_path / "absent")
    monkeypatch.setattr(job_usage, "NVML", tmp_path / "absent.py")
    assert nvidia_devices() == b"[]", "no process is started without a driver"


def test_the_process_imports_only_the_standard_library() -> None:
    code = f"import sys; exec(open({nvml.__file__!r}).read().replace('sys.exit(main', '(main'))"
    after = "; import json; print(json.dumps([n for n in sys.modules if n.split('.')[0] in ('spotkeeper', 'msgspec')]))"
    done = subprocess.run([sys.executable, "-I", "-c", code + after], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
