"""Finds the small mistakes (mutants) that somebody could make in a Python file, as replacements of its text.

Most are the operators of mutation testing: another comparison or arithmetic operator, `and` for `or`, a dropped `not`,
a number changed by one, an inverted condition, a loop left early. Others are the mistakes of this program: a statement,
a keyword or `sorted` left out, swapped arguments, rank for local_rank, height for width, the raw weights for the EMA's.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {
    **{"<": "<= >", "<=": "< >=", ">": ">= <", ">=": "> <=", "==": "!=", "!=": "=="},
    **{"is not": "is", "is": "is_not", "not in": "in", "in": "not_in"},
}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|"}
ARITHMETIC |= {"<<": ">>", ">>": "<<", "@": "*"}
# Each word is mistaken for the other, alone or as a part of a name between underscores.
PAIRS = [("min", "max"), ("any", "all"), ("height", "width"), ("floor", "ceil"), ("first", "last"), ("rows", "columns")]
PAIRS += [("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"), ("left", "right"), ("top", "bottom")]
PAIRS += [("rank", "local_rank"), ("world_size", "local_size"), ("state_dict", "state_dict_ema"), ("raw", "ema")]
PAIRS += [("train", "val"), ("training", "validation"), ("start", "end"), ("mean", "std")]
SYMMETRIC = {"min", "max", "minimum", "maximum", "equal", "array_equal", "isclose", "samefile", "gcd"}
TWINS = dict(PAIRS) | {second: first for first, second in PAIRS}


class Mutant(NamedTuple):
    """A small mistake: the bytes from `start` to `end` of a file become `new`."""

    operator: str
    line: int  # where the change begins, counted from 1
    start: int
    end: int
    new: str
    lines: tuple[int, int]  # first and last line of the statement, or of the head of a compound statement
    function: (
        tuple[int, int] | None
    )  # first and last line of the function whose call executes it; None: the import does
    name: str  # variable or setting that a statement of a module or class defines, or ""


def find_mutants(text: str) -> list[Mutant]:
    """Return all mutants of a file. A few are no valid Python (is_python)."""
    found = {(each.start, each.end, each.new): each for each in Source(text).mutants()}
    return list(found.values())


def apply(text: str, mutant: Mutant) -> str:
    data = text.encode()
    return (data[: mutant.start] + mutant.new.encode() + data[mutant.end :]).decode()


def is_python(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Source:
    """A file whose syntax tree is searched for places of mistakes."""

    def __init__(self, text: str):
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.names = set(re.findall(r"\w+", text))
        ends = [len(line) for line in text.encode().splitlines(keepends=True)]
        self.begins = [sum(ends[:index]) for index in range(len(ends) + 1)]

    def place(self, node: ast.AST) -> tuple[int, int]:
        return self.begins[node.lineno - 1] + node.col_offset, self.begins[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.place(node)
        return self.data[start:end].decode()

    def mutants(self) -> Iterator[Mutant]:
        yield from self._of_block(self.tree.body, None)

    def _of_block(self, block: list[ast.stmt], function: tuple[int, int] | None) -> Iterator[Mutant]:
        for statement in block:
            if not is_left_out(statement):
                yield from self._of_statement(statement, function)

    def _of_statement(self, statement: ast.stmt, function: tuple[int, int] | None) -> Iterator[Mutant]:
        blocks = [value for _, value in ast.iter_fields(statement) if is_block(value)]
        parts = [each for block in blocks for each in block]
        inner = [each.pattern if isinstance(each, ast.match_case) else each for each in parts]  # a case has no position
        lines = (statement.lineno, max(statement.lineno, inner[0].lineno - 1) if inner else statement.end_lineno)
        name = "" if function else defined_name(statement)
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        # A function's defaults take effect when it is called.
        called = (inner[0].lineno, statement.end_lineno) if is_function else function
        for operator, start, end, new in (*self._removed(statement), *self._of_head(statement, parts)):
            line = self.data.count(b"\n", 0, start) + 1
            yield Mutant(operator, line, start, end, new, lines, called, name)
        for block in blocks:
            for each in block:
                body = each.body if isinstance(each, ast.ExceptHandler | ast.match_case) else [each]
                yield from self._of_block(body, called)

    def _removed(self, statement: ast.stmt) -> Iterator[tuple[str, int, int, str]]:
        """Yield the statement left out, if what follows would still find all its names."""
        start, end = self.place(statement)
        match statement:
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
                yield "statement left out", start, end, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "statement left out", start, end, "pass"
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names_in(value):
                yield "statement left out", start, end, "pass"
            case ast.Return(value=None):
                yield "statement left out", start, end, "pass"
            case ast.Return(value=ast.Call(args=[first])) if not isinstance(first, ast.Starred):
                yield "call left out", *self.place(statement.value), self.text(first)
            case ast.Break():
                yield "break", start, end, "continue"
            case ast.Continue():
                yield "break", start, end, "break"
            case ast.If() | ast.While():
                yield "condition inverted", *self.place(statement.test), f"not ({self.text(statement.test)})"

    def _of_head(self, statement: ast.stmt, inner: list[ast.stmt]) -> Iterator[tuple[str, int, int, str]]:
        """Yield the mistakes in the expressions of a statement, without its blocks, annotations and f-strings."""
        skipped = {*inner, *annotations_of(statement)}
        waiting = [each for each in ast.iter_child_nodes(statement) if each not in skipped]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.JoinedStr):  # its parts have no usable places
                continue
            yield from self._of_expression(node)
            is_check = isinstance(node, ast.keyword) and node.arg == "strict"  # zip(..., strict=True) finds bugs only
            waiting += [
                each for each in ast.iter_child_nodes(node) if not is_check and each not in annotations_of(node)
            ]

    # One case for each kind of expression reads better than a table of functions.
    def _of_expression(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:  # noqa: C901
        match node:
            case ast.Compare():
                for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                    yield from self._operator("comparison", left, right, COMPARISONS)
            case ast.BinOp():
                if not (isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)):
                    yield from self._operator("arithmetic", node.left, node.right, ARITHMETIC)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._operator("and, or", left, right, {"and": "or", "or": "and"})
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield "not, minus", *self.place(node), self.text(node.operand)
            case ast.Constant(value=bool(value)):
                yield "constant", *self.place(node), str(not value)
            case ast.Constant(value=0.0) if isinstance(node.value, float):
                yield "constant", *self.place(node), "1.0"
            case ast.Constant(value=int() | float()):
                for change in ("+ 1", "- 1") if isinstance(node.value, int) else ("* 2", "/ 2"):
                    yield "constant", *self.place(node), f"({self.text(node)} {change})"
            case ast.IfExp():
                yield "condition inverted", *self.place(node.test), f"(not ({self.text(node.test)}))"
            case ast.comprehension(ifs=[condition, *_]):
                yield "condition inverted", *self.place(condition), f"(not ({self.text(condition)}))"
            case ast.Call():
                yield from self._of_call(node)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                end = self.place(node)[1]
                for new in twins(name):
                    if new in self.names or hasattr(builtins, new):
                        yield "other name", end - len(name.encode()), end, new

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, others: dict[str, str]):
        """Yield the operator between two operands replaced by others; the text between has brackets and comments."""
        start, end = self.place(left)[1], self.place(right)[0]
        between = self.data[start:end].decode()
        for name in sorted(others, key=len, reverse=True):
            word = rf"\b{name}\b" if name[0].isalpha() else re.escape(name)
            if found := re.search(word, re.sub(r"#.*", lambda each: " " * len(each[0]), between)):
                for new in others[name].split():
                    yield kind, start + found.start(), start + found.end(), new.replace("_", " ")
                return

    def _of_call(self, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
        if isinstance(node.func, ast.Name) and node.func.id in ("sorted", "reversed") and node.args:
            yield "order left out", *self.place(node), f"list({self.text(node.args[0])})"
        is_symmetric = getattr(node.func, "id", getattr(node.func, "attr", "")) in SYMMETRIC
        for first, second in zip(node.args, node.args[1:], strict=False):
            is_same = self.text(first) == self.text(second)
            if not (is_symmetric or is_same) and not {ast.Starred, ast.GeneratorExp} & {type(first), type(second)}:
                swapped = f"{self.text(second)}, {self.text(first)}"
                yield "arguments swapped", self.place(first)[0], self.place(second)[1], swapped
        arguments = [*node.args, *node.keywords]
        for keyword in node.keywords:
            index = arguments.index(keyword)
            if keyword.arg and keyword.arg != "strict" and index:
                yield "keyword left out", self.place(arguments[index - 1])[1], self.place(keyword)[1], ""


def is_block(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt | ast.ExceptHandler | ast.match_case)
    )


def is_left_out(statement: ast.stmt) -> bool:
    """Whether mistakes in this statement are impossible or harmless: imports, texts, checks for bugs of the program."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Global() | ast.Nonlocal() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def annotations_of(node: ast.AST) -> set[ast.AST]:
    return {value for name, value in ast.iter_fields(node) if name in ("annotation", "returns") and value is not None}


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def defined_name(statement: ast.stmt) -> str:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.AugAssign(target=ast.Name(id=name)):
            return name
    return ""


def twins(name: str) -> list[str]:
    """Return the names for which this one can be mistaken: ["image_width"] for "image_height"."""
    if name in TWINS:
        return [TWINS[name]]
    parts = name.split("_")
    return [
        "_".join([*parts[:index], TWINS[part], *parts[index + 1 :]])
        for index, part in enumerate(parts)
        if part in TWINS and "_" not in TWINS[part]
    ]
