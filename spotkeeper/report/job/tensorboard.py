"""Encodes curves as an event file that TensorBoard reads, without TensorBoard or protobuf. Pure.

A file is a sequence of records (TFRecord): length, masked CRC-32C of the length, data, masked CRC-32C of the data. Each
data is an ``Event`` message: ``wall_time`` (field 1, double), ``step`` (2, int64), then ``file_version`` (3, string) in
the first record and ``summary`` (5) in all others. A summary has one ``value`` (1) with ``tag`` (1) and
``simple_value`` (2, float).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from spotkeeper.report.job.metrics import MetricColumns

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK = 0xA282EAD8


def event_file(curves: Mapping[str, MetricColumns]) -> bytes:
    """Return the content of a file that TensorBoard recognises by ``tfevents`` in its name."""
    begin = min((curve.times[0] for curve in curves.values()), default=0.0)
    records = [_event(begin, 0, b"\x1a" + _sized(b"brain.Event:2"))]
    for name, curve in curves.items():
        tag = b"\x0a" + _sized(name.encode())
        for step, at, value in zip(curve.steps, curve.times, curve.values, strict=True):
            scalar = tag + b"\x15" + _float(value)
            records.append(_event(at, step, b"\x2a" + _sized(b"\x0a" + _sized(scalar))))
    return b"".join(map(_record, records))


def _event(at: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + what


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def _masked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _table()
