"""The lease an agent trains under without the function, and the watch over a machine's boot."""

from __future__ import annotations

from pathlib import Path

from spotkeeper_agent.agent.assignment import BootWatch, Lease


def test_lease() -> None:
    lease = Lease(1000.0)
    assert not lease.over(1000.0 + 120 * 60 - 1)
    assert lease.over(1000.0 + 120 * 60)
    lease.renew(5000.0, 1)
    assert lease.over(5060.0) and not lease.over(5059.0)


def test_boot_watchdog(tmp_path: Path) -> None:
    watch = BootWatch(1000.0, 1.0, tmp_path / "known")
    assert watch.over(1000.0 + 900) and not watch.over(1000.0 + 899)
    assert not BootWatch(1000.0, 60.0, tmp_path / "known").over(1000.0 + 900), "a fast clock, a slow boot"
    watch.disarm()
    assert not watch.over(1e12)
    assert (tmp_path / "known").exists(), "the startup script's timer sees it too"
