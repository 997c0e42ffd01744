"""The mutants of a file: mutmut's operators, applied to the source one at a time.

mutmut itself mutates only undecorated functions, since it keeps all mutants of a file in one module and selects one by
name. Here a mutant is a changed file, so properties, context managers and cached functions are mutated too, and other
processes run the mutant as well.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from functools import cached_property

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import NEVER_MUTATE_FUNCTION_CALLS
from mutmut.mutation.mutators import mutation_operators

# Evaluated nowhere, or only by a type checker.
IGNORED_CALLS = NEVER_MUTATE_FUNCTION_CALLS | {"cast", "TypeVar"}


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    first: int  # lines of the statement; of a default value: of the whole function, whose tests can notice it
    last: int
    signature: bool  # a default value, which is evaluated when the function is defined
    source: str
    module: cst.Module
    original: cst.CSTNode
    changed: cst.CSTNode

    @cached_property
    def mutated(self) -> str:
        """The whole file."""
        tree = self.module.deep_replace(self.original, self.changed)
        assert isinstance(tree, cst.Module)
        return tree.code

    @cached_property
    def diff(self) -> str:
        """The lines that differ, without their numbers, so that it stays the same when lines move."""
        lines = difflib.unified_diff(self.source.splitlines(), self.mutated.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join((self.file, self.function, self.diff)).encode()).hexdigest()[:16]


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of the file's functions, in a fixed order."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(file, source, wrapper.module)
    wrapper.visit(visitor)
    return visitor.found


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str, source: str, module: cst.Module) -> None:
        super().__init__()
        self.found: list[Mutant] = []
        self._file, self._source, self._module = file, source, module
        self._names: list[str] = []  # classes and functions around the node
        self._functions: list[cst.FunctionDef] = []
        self._span: cst.CSTNode | None = None  # the statement around it, or a compound statement's expression
        self._parameters = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator) or _ignored(node):
            return False
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            self._names.append(node.name.value)
        if isinstance(node, cst.FunctionDef):
            self._functions.append(node)
        self._parameters += isinstance(node, cst.Parameters)
        if self._span is None and isinstance(node, cst.BaseSmallStatement | cst.BaseExpression):
            self._span = node
        if self._functions:
            self._mutate(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.ClassDef | cst.FunctionDef) and not _ignored(original_node):
            self._names.pop()
        if isinstance(original_node, cst.FunctionDef):
            self._functions.pop()
        self._parameters -= isinstance(original_node, cst.Parameters)
        if self._span is original_node:
            self._span = None

    def _mutate(self, node: cst.CSTNode) -> None:
        position = None
        for kind, operator in mutation_operators:
            if not isinstance(node, kind):
                continue
            for changed in operator(node):
                signature = self._parameters > 0
                span = self._functions[-1] if signature else self._span or node
                position = position or self.get_metadata(PositionProvider, span)
                first, last = position.start.line, position.end.line
                function = ".".join(self._names)
                self.found.append(
                    Mutant(self._file, function, first, last, signature, self._source, self._module, node, changed)
                )


def _ignored(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in IGNORED_CALLS
