"""Old jobs' folders on a data disk: asked about in turn, and deleted only if the answer names them."""

from __future__ import annotations

from spotkeeper_agent.host.mounting import EVERY_S, OldJobs


def test_old_jobs_are_asked_about_in_rotation() -> None:
    kept = OldJobs()
    jobs = [f"job{number:05d}" for number in range(70)]
    assert kept.question(0.0, None) == ()
    kept.found(jobs)
    first = kept.question(10.0, jobs[3])
    assert first == tuple(job for job in jobs if job != jobs[3])[:32]
    assert kept.question(10.0 + EVERY_S - 1, None) == ()
    later = [kept.question(10.0 + EVERY_S * hour, None) for hour in (1, 2)]
    assert set().union(first, *later) == set(jobs), "each of them in its turn"
    kept.found(jobs)
    assert kept.question(10.0 + EVERY_S * 2 + 1, None), "a disk that is looked at anew is asked about at once"


def test_only_ended_jobs_that_were_asked_about_are_deleted() -> None:
    kept = OldJobs()
    kept.found(["a0000000", "b0000000"])
    kept.left("c0000000")
    asked = ("a0000000", "b0000000")
    assert kept.over(asked, ("a0000000", "c0000000", "..", "", "d0000000"), None) == ("a0000000",)
    assert kept.over(asked, asked, "a0000000") == ("b0000000",)
    kept.gone(("b0000000",))
    assert kept.over(asked, asked, None) == ("a0000000",)
