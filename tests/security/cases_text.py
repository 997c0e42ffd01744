"""Text that would like to be something else: in job files and templates, as an address, in the log."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from infra import boot
from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.check_run import ENV_NAME
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.reconcile.clouds.base import Addresses
from spotkeeper.reconcile.clouds.gce.api import Api
from spotkeeper.reconcile.clouds.gce.cloud import Gce
from spotkeeper.reconcile.clouds.http_client import Answer, Wire
from spotkeeper.reconcile.service.auth import KeySet
from spotkeeper.reconcile.service.logging_json import FIELDS, JsonLines
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import templates_path
from spotkeeper_agent.job.launch_spec import render
from tests import web
from tests.contract.samples import check_job
from tests.reconcile.clouds.gce.compute import STACK, A, instance, scopes
from tests.security.cases_body import sent
from tests.security.cases_identity import Cases
from tests.security.cases_meaning import push, quiet, resource
from tests.security.site import CANARY, JOB, Shot, Site, sync

# -- config and templates


def argv(text: str) -> None:
    """A word of the command arrives as that word, or the job file is refused."""
    command = ("train.py", text)
    try:
        check_job(JobSpec("job", command))
    except SpecError:
        return
    values = {
        "doc": SimpleNamespace(members=[1], run_id="u-1", master="10.0.0.1", port=20001),
        "spec": SimpleNamespace(index=0, address="10.0.0.1"),
        "run": SimpleNamespace(nproc=1, grace_s=25.0),
        "rendezvous_s": 5,
        "folder": "/run/x",
        "command": command,
    }
    lines = render(templates_path() / "torchrun.args.j2", values).splitlines()
    assert [json.loads(line) for line in lines if line.strip()][-2:] == list(command)


def variable(text: str) -> None:
    """A variable's value survives the bucket as it is, or is refused; no message repeats it."""
    try:
        spec = check_job(JobSpec("job", ("train.py",), env={"A": text}))
    except SpecError as error:
        assert text[:200] not in str(error) or len(text) < 3
        return
    assert len(text.encode()) <= 4096 and "\0" not in text
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec).env["A"] == text


def names(text: str) -> None:
    """No name of ours can hold it."""
    assert not ENV_NAME.match(text)
    for spec in (
        JobSpec(text, ("train.py",)),
        JobSpec("job", ("train.py",), env={text: "x"}),
        JobSpec("job", ("train.py",), secrets={"A": text}),
    ):
        with pytest.raises(SpecError):
            check_job(spec)


def shell_word(text: str) -> None:
    """As the interpreter of the startup script: a real shell reads the very text, or it is refused."""
    try:
        values = {
            "cloud": "gcp",
            "stack": "t",
            "interpreter": text,
            "files": {"/etc/x": "x"},
            "watchdog_s": "9",
            "shell_user": text,
        }
        script = boot._render("startup.sh.j2", values, boot.METADATA_BYTES)
    except ValueError:
        return
    (line,) = [line for line in script.split("\n") if line.startswith("PYTHON=")]
    found = subprocess.run(["bash", "-c", f'{line}\nprintf %s "$PYTHON"'], capture_output=True, check=False)
    assert found.stdout.decode() == text and not found.stderr


def unit_line(text: str) -> None:
    """As a word of a systemd unit: one line, quoted, its specifiers literal; or refused."""
    try:
        constants = {"stack": "t", "interpreter": text}
        unit = boot._render("spotkeeper.service.j2", constants, boot.METADATA_BYTES)
    except ValueError:
        return
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    word = line.removeprefix("ExecStart=/usr/bin/env ").removesuffix(" -m spotkeeper_agent")
    assert word.startswith('"') and word.endswith('"')
    plain = word[1:-1].replace("%%", "\1").replace("$$", "\2")
    assert "%" not in plain and "$" not in plain
    inner = plain.replace("\\\\", "\3").replace('\\"', "\4")
    assert '"' not in inner and "\\" not in inner
    assert inner.translate({1: "%", 2: "$", 3: "\\", 4: '"'}) == text


PLACES: tuple[Callable[[str], None], ...] = (argv, variable, names, shell_word, unit_line)


def texts(*wrong: str) -> Callable[[Site], Cases]:
    def cases(_: Site) -> Cases:
        for text, place in itertools.product(wrong, PLACES):
            yield f"{place.__name__} {text[:30]!r}", lambda text=text, place=place: place(text)

    return cases


substitution = texts("$(touch x)", "a$(id)b", "${IFS}", "$HOME", "$((1+1))", "$'\\n'", "${x:-$(id)}")
backticks = texts("`id`", "a`touch x`b", "``", "`", "\\`id\\`", "`echo \\`id\\``")
semicolon = texts(";id", "a;b", "; rm -rf /", ";;", "&& id", "|id", "a&b", "a>b")
newline = texts("a\nb", "\n", "a\r\nb", "\nExecStart=/bin/sh", "x\nPY\n", "\nUNIT\n", "a\rb")
quotes = texts("'", '"', "'\"'", "a'b", '" -c "id', "\\", "\\'", "'; id; '", '\\"')
braces = texts("{{7*7}}", "{{ config }}", "{{''.__class__.__mro__}}", "{{ cycler.__init__ }}", "{# x #}", "${{7*7}}")
blocks = texts("{% raw %}", "{%for x in y%}", "{% include '/etc/passwd' %}", "{%", "%}", "{% import os %}")
percent = texts("%n", "%i", "%h/x", "%%", "%", "%{x}", "100%", "%H%t")
parents = texts("../", "../../etc/passwd", "a/../b", "..", "/etc/passwd", "..\\..\\x", "%2e%2e/")
dash = texts("-", "--", "-c", "--help", "-rf", "-x=$(id)")
nul = texts("\0", "a\0b", "\0id", "a\0", "\x01", "\x7f\0")
long_env = texts("x" * 65_536, "\u00e9" * 40_000, "a b" * 30_000, "$(id)" * 13_200, "'" * 65_536, "\n" * 65_536)

# -- network


class Scripted(Api):
    """Compute Engine as a function from path to answer; no socket."""

    def __init__(self, answer: Callable[[str, str], Answer]) -> None:
        self._answer = answer

    def version(self, name: str) -> Scripted:
        return self

    def call(self, method: str, path: str, *_: Any) -> Answer:
        return self._answer(method, path)


def listed_at(address: str) -> None:
    """A machine listed there is no machine to send anybody to."""
    nic = [{"networkIP": address, "name": "nic0"}]

    def answer(_: str, path: str) -> Answer:
        body = scopes("instances", us_x1_a=[instance(networkInterfaces=nic)], us_x1_b=[])
        return Answer(200, json.dumps(body if path.endswith("aggregated/instances") else {}).encode())

    (vm,) = Gce(STACK, Scripted(answer), Clock()).list("demo").vms
    assert vm.address == "" and vm.status is VmStatus.PENDING
    assert vm.zone == A


def not_held(address: str) -> None:
    assert not Addresses().holds(address)


def dialled(*wrong: str) -> Callable[[Site], Cases]:
    """Listed as a machine's address; in a body; in an event."""

    def cases(site: Site) -> Cases:
        for text in wrong:
            yield f"listed {text}", lambda text=text: listed_at(text)
            yield f"held {text}", lambda text=text: not_held(text)
            for field in ("master", "address"):
                body = json.dumps({"boot": "b", field: text}).encode()
                yield sent(site, f"{field} {text}", body)
            yield quiet(site, f"event {text}", push(resource(f"sk-t-{JOB}-n0000-a1@{text}")))

    return cases


link_local = dialled("169.254.169.254", "169.254.0.1", "fe80::1", "fd00::1%eth0", "metadata.google.internal")
loopback = dialled("127.0.0.1", "127.255.255.254", "::1", "0.0.0.0", "localhost")  # noqa: S104
mapped = dialled("fd00:0::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::10.0.0.1", "64:ff9b::a00:1")
decimal = dialled("167772161", "0x0a000001", "012.0.0.1", "10.1", "10.0.0.1.", "10.0.0.01")
rebinding = dialled("10.0.0.1.nip.io", "evil.example", "sk-master", "10-0-0-1.example.com", "\uff11\uff10.0.0.1")


def redirects(_: Site) -> Cases:
    """An answer that says "elsewhere" is an answer, and nobody goes there."""

    def check(status: int, target: str) -> None:
        asked: list[str] = []

        class Handler(web.Handler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.answer(status, Location=target)

        with web.serving(Handler) as server:
            answer = Wire(server.url).call("GET", "/a", {}, None, 5)
            assert answer.status == status and asked == ["/a"]

    for status, target in itertools.product(
        (301, 302, 303, 307, 308), ("/b", "http://169.254.169.254/", "file:///etc")
    ):
        yield f"{status} to {target}", lambda status=status, target=target: check(status, target)


def refused_address(make: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        make(text)


def userinfo(site: Site) -> Cases:
    for host in ("127.0.0.1@evil.example", "localhost:80@evil.example", "u:p@evil.example", "127.0.0.1%40evil.example"):
        yield f"keys {host}", lambda host=host: refused_address(KeySet, f"http://{host}/x")
        yield f"compute {host}", lambda host=host: refused_address(lambda u: Api(u, None), f"http://{host}/x")
        yield f"keys with a password {host}", lambda host=host: refused_address(KeySet, f"https://u:p@{host}/x")
        yield sent(site, f"body {host}", json.dumps({"boot": f"http://{host}/"}).encode())


def ports(site: Site) -> Cases:
    for port in ("0", "65536", "-1", "99999", "1e3", "x"):
        yield f"keys {port}", lambda port=port: refused_address(KeySet, f"https://keys.example:{port}/x")
        yield (
            f"compute {port}",
            lambda port=port: refused_address(lambda u: Api(u, None), f"https://c.example:{port}/x"),
        )
        yield f"listed {port}", lambda port=port: listed_at(f"10.0.0.1:{port}")


# -- logs


def lines_of(text: str) -> list[str]:
    """Everything that could write it: message, every field, an exception, and the agent's log."""
    record = logging.makeLogRecord({"msg": text, "levelname": "INFO", **dict.fromkeys(FIELDS, text), "other": text})
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        failed = logging.makeLogRecord(
            {"msg": "x", "levelname": "ERROR", "exc_info": (type(error), error, error.__traceback__)}
        )
    said: list[str] = []
    Log(write=said.append)("event", detail=text)
    return [JsonLines().format(record), JsonLines().format(failed), *said]


def written(text: str, secret: str = "") -> None:
    *function, agent = lines_of(text)
    for line in function:
        assert line.isascii() and line.isprintable() and "\n" not in line
        assert set(json.loads(line)) <= {"severity", "message", "error", *FIELDS}
        assert len(line) < 6 * 600 * (2 + len(FIELDS))  # 500 characters a field, six each where escaped
    assert "\n" not in agent and agent.isascii()
    for line in (*function, agent):
        assert not secret or secret not in line


def in_a_request(site: Site, text: str) -> None:
    """In path, header and body of one request: nothing of it is in the log."""
    token = "Bearer " + text
    site.fire(Shot(sync(text), token, want=(401, 413)))
    site.fire(Shot(b"", None, "/v1/" + text.replace("?", ""), want=(404, 405)))
    site.fire(Shot(json.dumps({text: text}).encode()[:16_000], site.token(), want=(400,)))
    assert text not in "".join(site.log.lines) or len(text) < 3


def logged(*wrong: tuple[str, str]) -> Callable[[Site], Cases]:
    def cases(site: Site) -> Cases:
        for number, (text, secret) in enumerate(wrong):
            yield f"written {number}", lambda text=text, secret=secret: written(text, secret)
            yield f"sent {number}", lambda text=text: in_a_request(site, text)

    return cases


def plain(*wrong: str) -> Callable[[Site], Cases]:
    return logged(*((text, "") for text in wrong))


crlf = plain(f"a\r\n{CANARY}", '\n{"severity":"INFO"}', "\r", "a\x0bb", "a\x0cb", "\x85x", "\n" * 50)
ansi = plain("\x1b[31mred", "\x1b]0;title\x07", "\x9b31m", "\x1b[2J", "a\x08b", "\x00")
separators = plain("a\u2028b", "a\u2029b", "\u202e", "\ufeffx", "\u200bx", "\U000e0001x")
_JWT = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJ4In0.c2lnbmF0dXJl"
jwts = logged(
    (_JWT, _JWT),
    (f"Bearer {_JWT}", _JWT),
    (f"x={_JWT}&y", _JWT),
    (_JWT[:30], _JWT[:30]),
    (f"Authorization: {_JWT}", _JWT),
    (f"a {_JWT} b {_JWT} c", _JWT),
)
keys = logged(
    *((f"key {key} end", key) for key in ("AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "hf_abcdefghijklmnop")),
    *((f"key={key}", key) for key in ("ghp_abcdefghijklmnopqrst", "sk-proj-abcdefghijklmnopqrstuvwx", "ya29.a0Af-x_y")),
)
_PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvgIBADANBg\nkqhkiG9w0BAQ\n-----END PRIVATE KEY-----"
pems = logged(
    (_PEM, "MIIEvg"),
    (_PEM[:60], "MIIEvg"),
    (_PEM.replace("\n", "\r\n"), "kqhkiG"),
    (_PEM.replace("PRIVATE", "RSA PRIVATE"), "MIIEvg"),
    (f"x{_PEM}y{_PEM}z", "kqhkiG"),
)
signed = logged(
    ("https://storage.googleapis.com/b/o?X-Goog-Signature=deadbeef01&x=1", "deadbeef01"),
    ("https://b.s3.amazonaws.com/o?X-Amz-Signature=deadbeef02", "deadbeef02"),
    ("https://b.s3.amazonaws.com/o?X-Amz-Security-Token=deadbeef03&y", "deadbeef03"),
    ("https://x.blob.example/o?sv=1&sig=deadbeef04", "deadbeef04"),
    ("http://bob:hunter2@host/x", "hunter2"),
    ("x-amz-security-token: deadbeef05", "deadbeef05"),
)
huge_field = plain("m" * 1_000_000, "\u00e9" * 500_000, '"' * 1_000_000, "\n" * 1_000_000, "eyJ" * 333_333)
