"""Generated bodies over HTTP, from machines that may speak and from the schedule: 100,000 in ``make security``.

A seeded generator and no library: a body costs 0.2 ms with all the checks of :meth:`Site.fire`. What is sent is
good bodies with bytes changed, good trees with branches changed, trees of nothing known, noise, and, so that the
layers behind the parser get their share, true facts with odd values.
"""

from __future__ import annotations

import copy
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from spotkeeper.contract.facts import Kind
from tests.security import tally
from tests.security.cases_body import GOOD
from tests.security.cases_meaning import VM, push, resource
from tests.security.site import CANARY, JOB, OTHER, Shot, Site
from tests.security.tally import TALLY, Bodies
from tests.sizes import size

BODIES = int(os.environ.get("SECURITY_BODIES", size(tally.BODIES // 20, tally.BODIES)))
SEED = int(os.environ.get("SECURITY_SEED", "20261121"))
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 1.5, 1e308, -0.0, 1e-320),
    *("", "0", "-1", "x", "../x", "a.b", "a/b", "\0", "\n", "\u2028", "\ud800", "9" * 400, CANARY, "b" * 64, "b" * 65),
    *([], {}, [[]], [None] * 40, {"kind": "hello"}, {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}),
    *("http://169.254.169.254/", "10.0.0.1", JOB, OTHER, VM, "NaN", "hello", "exit", "__proto__"),
)
BYTES = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\0", b"\xff", b"\xc3", b"\n", b"1e999", b"NaN", b"\\u0000")


class Generator:
    """``next()`` is a body; the same seed gives the same bodies."""

    def __init__(self, site: Site, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - so that a failure can be sent again
        self.site = site
        self.speakers = [*site.members, *site.others, site.node]
        self.tokens = {machine.name: site.token(machine) for machine in self.speakers}
        self.clock = site.clock_token()
        self.good = json.dumps(GOOD).encode()
        self.event = push(resource(VM))
        self.kinds = [kind.value for kind in Kind]
        self.ways: tuple[Callable[[], bytes], ...] = (self.bytes_changed, self.tree_changed, self.tree, self.noise)

    def next(self) -> Shot:
        draw = self.random.random()
        if draw < 0.85:
            by = self.random.choice(self.speakers)
            body = self.facts(by.boot) if draw < 0.15 else self.random.choice(self.ways)()
            return Shot(body, self.tokens[by.name], want=(200, 400), by=by)
        path = self.random.choice(("/v1/tick", f"/v1/notify/{JOB}", "/v1/event"))
        body = self.random.choice(self.ways)() if path != "/v1/event" else self.changed(self.event)
        return Shot(body, self.clock, path, want=(200, 400), quarantine=True)

    def changed(self, body: bytes) -> bytes:
        data = bytearray(body)
        for _ in range(self.random.randint(1, 4)):
            at, width = self.random.randrange(len(data) + 1), self.random.randint(0, 6)
            piece = self.random.choice((self.random.choice(BYTES), bytes(data[at : at + 20]), self.random.randbytes(2)))
            data[at : at + width] = piece
        return bytes(data)

    def bytes_changed(self) -> bytes:
        return self.changed(self.good)

    def tree_changed(self) -> bytes:
        body: Any = copy.deepcopy(GOOD)
        for _ in range(self.random.randint(1, 3)):
            at: Any = self.random.choice([body, *(v for v in body.values() if isinstance(v, dict | list) and v)])
            key = self.random.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if isinstance(at, dict) and self.random.random() < 0.2:
                del at[key]
            elif isinstance(at, dict) and self.random.random() < 0.2:
                at[str(self.odd())] = self.odd()
            else:
                at[key] = self.odd()
        return json.dumps(body).encode()

    def odd(self) -> Any:
        return copy.deepcopy(self.random.choice(ODD))

    def tree(self, depth: int = 0) -> bytes:
        return json.dumps(self._value(depth)).encode()

    def _value(self, depth: int) -> Any:
        draw = self.random.random()
        if depth > 8 or draw < 0.5:
            return self.odd()
        if draw < 0.75:
            return [self._value(depth + 1) for _ in range(self.random.randrange(4))]
        names = ("boot", "ver", "facts", "kind", "gen", "value", "progress", "step", "message", "data", "x")
        return {self.random.choice(names): self._value(depth + 1) for _ in range(self.random.randrange(5))}

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 8, 64, 500)))

    def facts(self, boot: str) -> bytes:
        """Of the right shape, so that they are judged by what they mean."""
        draw = self.random
        values = ("0", "1", "4", "-1", "93", "1-10", "9" * 12, "a", str(int(self.site.now) + draw.randint(-600, 600)))
        # 93 and crash codes end or restart the speaker's own job, as they must; here nobody's processes end.
        kinds = [kind for kind in self.kinds if kind != Kind.EXIT.value]
        words = [
            {"kind": draw.choice(kinds), "gen": draw.choice((0, 1, 1, 1, 2, 7)), "value": draw.choice(values)}
            for _ in range(draw.randint(0, 4))
        ]
        said = draw.choice((boot, boot, boot, "another-boot"))
        body = {"boot": said, "ver": draw.randint(0, 9), "job": draw.choice((None, JOB, OTHER)), "facts": words}
        if draw.random() < 0.3:
            body["progress"] = GOOD["progress"] | {
                "step": draw.choice((0, 5, 2**53)),
                "save_s": draw.choice((1.0, 1e308)),
            }
        return json.dumps(body).encode()


def test_generated_bodies_are_refused_or_valid(site: Site) -> None:
    site.put_back()
    generator, bodies, spent = Generator(site, SEED), Bodies(), []
    handle = site.app.handle

    def timed(request: Any) -> Any:
        started = time.perf_counter()
        answered = handle(request)
        spent.append(time.perf_counter() - started)
        bodies.taken += answered[1] == 200
        bodies.refused += answered[1] != 200
        return answered

    site.app.handle = timed  # type: ignore[method-assign]
    try:
        for number in range(BODIES):
            shot = generator.next()
            try:
                site.fire(shot)
            except AssertionError as error:
                raise AssertionError(f"body {number} of seed {SEED}, {shot.path}: {shot.body!r}: {error}") from error
    finally:
        site.app.handle = handle  # type: ignore[method-assign]
    spent.sort()
    bodies.sent = len(spent)
    bodies.median_ms = statistics.median(spent) * 1000
    bodies.p99_ms, bodies.longest_ms = spent[len(spent) * 99 // 100] * 1000, spent[-1] * 1000
    TALLY.bodies = bodies
    assert bodies.taken and bodies.refused > bodies.taken // 10, "some bodies were taken and some refused"
