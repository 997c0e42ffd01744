"""Bytes into structs from several threads at once: every type's first time is safe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract import codec

ROOT = Path(__file__).resolve().parents[2]

# Nested types, because working them out runs Python, and only there do threads change places.
RACE = """
import sys, threading
from msgspec import Struct, defstruct
{decode}
sys.setswitchinterval(1e-6)
for round in range(60):
    leaves = [defstruct(f"Leaf{{i}}", [("a", list[int])]) for i in range(10)]
    kind = defstruct("Root", [(f"f{{i}}", leaf) for i, leaf in enumerate(leaves)])
    text = b"{{" + b",".join(b'"f%d": {{"a": [1]}}' % i for i in range(10)) + b"}}"
    start = threading.Barrier(6)
    def work(late):
        start.wait()
        for _ in range(late * 40):
            pass
        decode(text, kind)
    threads = [threading.Thread(target=work, args=(late,)) for late in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


ASKING = """
from spotkeeper.contract import codec
def decode(text, kind):
    codec.type_info(kind)
    codec.decode(text, kind)
"""


@pytest.mark.parametrize("decode", ["from spotkeeper.contract.codec import decode", ASKING], ids=["decoding", "asking"])
def test_simultaneous_first_decodes_do_not_crash(decode: str) -> None:
    """With msgspec's own functions in their place this program dies of SIGSEGV within its first rounds."""
    program = RACE.format(decode=decode)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_only_codec_passes_types_to_msgspec() -> None:
    typed = re.compile(
        r"msgspec\.convert\(|inspect\.type_info\(|\bDecoder\("
        r"|msgspec\.\w+\.decode\([^\n]*\btype=|from msgspec import [^\n]*convert"
    )
    files = [path for part in ("spotkeeper", "agent", "infra") for path in (ROOT / part).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if typed.search(path.read_text())]
    assert found == ["spotkeeper/contract/codec.py"]


@pytest.mark.parametrize("text", [b'"\xff"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'"\\ud800"', b"1e999"])
def test_any_invalid_json_raises_the_same_error(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        codec.decode(text, object)


def test_lax_decoding_accepts_numbers_as_texts() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.decode(b'"7"', int)
    assert codec.decode(b'"7"', int, strict=False) == 7
    with pytest.raises(msgspec.ValidationError):
        codec.convert("7", int)
    assert codec.convert("7", int, strict=False) == 7
