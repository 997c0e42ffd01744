"""EC2's query protocol, read and written by botocore's own service model: nothing else passes.

A request whose parameter the model does not know, or of another type, or without a required one, is refused as EC2
refuses it. An answer is held against the model before it is written, then read back by botocore's own parser and
compared: what the stand-in says is what EC2 could say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from botocore import parsers
from botocore.model import ListShape, OperationModel, ServiceModel, Shape, StructureShape
from botocore.session import get_session
from botocore.validate import ParamValidator

Params = dict[str, Any]
VERSION = "2016-11-15"
NAMESPACE = f"http://ec2.amazonaws.com/doc/{VERSION}/"
REQUEST = "11111111-2222-3333-4444-555555555555"


class Ec2Error(Exception):
    """An answer of EC2's that is no success."""

    def __init__(self, code: str, message: str = "", status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message or code, status

    def body(self) -> bytes:
        told = f"<Code>{escape(self.code)}</Code><Message>{escape(self.message)}</Message>"
        return (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error>{told}</Error></Errors>'
            f"<RequestID>{REQUEST}</RequestID></Response>"
        ).encode()


@lru_cache(maxsize=1)
def model() -> ServiceModel:
    return get_session().get_service_model("ec2")


@lru_cache(maxsize=64)
def operation(name: str) -> OperationModel:
    return model().operation_model(name)


@lru_cache(maxsize=4096)  # listings ask the same again and again
def read(body: bytes) -> tuple[str, Params]:
    """Operation and parameters of a request. Nobody changes them.

    Raises:
        Ec2Error: it is none that EC2 takes.
    """
    sent = dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True))
    name, version = sent.pop("Action", ""), sent.pop("Version", "")
    if version != VERSION:
        raise Ec2Error("InvalidParameterValue", f"Version {version!r}")
    if name not in model().operation_names:
        raise Ec2Error("InvalidAction", f"The action {name} is not valid for this web service.")
    shape = operation(name).input_shape
    params: Params = _structure(shape, "", sent) if shape is not None else {}
    if sent:
        raise Ec2Error("UnknownParameter", f"The parameter {sorted(sent)[0]} is not recognized")
    if shape is not None:
        _judge(params, shape)
    return name, params


_written: dict[tuple[str, str], bytes] = {}


def write(name: str, answer: Params) -> bytes:
    """The answer as XML. Raises AssertionError where EC2 could not say this. What was judged once is not again."""
    key = name, repr(answer)
    if key not in _written:
        if len(_written) > 4096:
            _written.clear()
        _written[key] = _write(name, answer)
    return _written[key]


def _write(name: str, answer: Params) -> bytes:
    shape = operation(name).output_shape
    inner = ""
    if shape is not None:
        report = ParamValidator().validate(answer, shape)
        assert not report.has_errors(), f"{name}: {report.generate_report()}"
        _check_enums(answer, shape, name)
        inner = _element_of(shape, answer)
    else:
        assert answer == {}, f"{name} answers nothing"
        inner = "<return>true</return>"
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}Response xmlns="{NAMESPACE}">'
        f"<requestId>{REQUEST}</requestId>{inner}</{name}Response>"
    ).encode()
    if shape is not None:
        back = _parser().parse({"body": body, "headers": {}, "status_code": 200}, shape)
        back.pop("ResponseMetadata")
        assert back == answer, f"{name}: {answer} was read back as {back}"
    return body


@lru_cache(maxsize=1)
def _parser() -> Any:
    return parsers.create_parser("ec2")


# -- requests


def _name(shape: Shape, default: str) -> str:
    """botocore's ``EC2Serializer._get_serialized_name``."""
    if "queryName" in shape.serialization:
        return str(shape.serialization["queryName"])
    name = str(shape.serialization.get("name", default))
    return name[0].upper() + name[1:]


def _structure(shape: StructureShape, prefix: str, sent: dict[str, str]) -> Params:
    found: Params = {}
    for member, inner in shape.members.items():
        key = f"{prefix}{_name(inner, member)}"
        if not any(at == key or at.startswith(f"{key}.") for at in sent):
            continue
        found[member] = _value(inner, key, sent)
    return found


def _value(shape: Shape, key: str, sent: dict[str, str]) -> Any:
    if isinstance(shape, StructureShape):
        return _structure(shape, f"{key}.", sent)
    if isinstance(shape, ListShape):
        items = []
        while any(at == f"{key}.{len(items) + 1}" or at.startswith(f"{key}.{len(items) + 1}.") for at in sent):
            items.append(_value(shape.member, f"{key}.{len(items) + 1}", sent))
        return items
    return _scalar(shape, key, sent.pop(key, None))


def _scalar(shape: Shape, key: str, text: str | None) -> Any:
    if text is None:
        raise Ec2Error("InvalidParameterValue", f"{key} is no structure")
    try:
        if shape.type_name in ("integer", "long"):
            return int(text)
        if shape.type_name in ("float", "double"):
            return float(text)
        if shape.type_name == "boolean":
            return {"true": True, "false": False}[text]
        if shape.type_name == "timestamp":
            return datetime.fromisoformat(text)
    except (ValueError, KeyError):
        raise Ec2Error("InvalidParameterValue", f"Value ({text}) for parameter {key} is invalid.") from None
    if (known := shape.metadata.get("enum")) and text not in known:
        raise Ec2Error("InvalidParameterValue", f"Value ({text}) for parameter {key} is invalid.")
    return text


def _judge(params: Params, shape: StructureShape) -> None:
    report = ParamValidator().validate(params, shape)
    if not report.has_errors():
        return
    text = report.generate_report()
    missing = re.search(r'Missing required parameter in (\S+): "(\w+)"', text)
    if missing:
        raise Ec2Error("MissingParameter", f"The request must contain the parameter {missing[2]}")
    raise Ec2Error("InvalidParameterValue", text)


# -- answers


def _element_of(shape: StructureShape, values: Mapping[str, Any]) -> str:
    """Members under EC2's own names, which are not the API's (``reservationSet``)."""
    parts = []
    for member, value in values.items():
        inner = shape.members[member]
        tag = str(inner.serialization.get("name", member))
        parts.append(f"<{tag}>{_text(inner, value)}</{tag}>" if value != "" else f"<{tag}/>")
    return "".join(parts)


def _text(shape: Shape, value: Any) -> str:
    if isinstance(shape, StructureShape):
        return _element_of(shape, value)
    if isinstance(shape, ListShape):
        tag = str(shape.member.serialization.get("name", "item"))
        return "".join(f"<{tag}>{_text(shape.member, item)}</{tag}>" for item in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return escape(str(value))


def _check_enums(value: Any, shape: Shape, at: str) -> None:
    if isinstance(shape, StructureShape):
        for member, inner in value.items():
            _check_enums(inner, shape.members[member], f"{at}.{member}")
    elif isinstance(shape, ListShape):
        for item in value:
            _check_enums(item, shape.member, at)
    elif known := shape.metadata.get("enum"):
        assert value in known, f"{at}: {value!r} is none of {known}"
