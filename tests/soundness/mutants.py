"""Mistakes made by rule: an operator, a sign, a constant, a pair of names or a dropped statement, one at a time in named functions.

Which statements can be got wrong is read off the source, so nobody chooses the mistakes that happen to be caught, and a function that is
rewritten gets new ones. Messages and clocks are left alone: no verdict depends on them.
"""

import ast
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.Pow: "*",
}  # fmt: skip
PAIRS = [
    ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"), ("min", "max"), ("any", "all"), ("clamp_min", "clamp_max"),
    ("zeros_like", "ones_like"),
]  # fmt: skip
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
QUIET = ("perf_counter", "seconds", "message", "progress", "console", "print(", "nodes +=")  # about clocks, words and counts


class Hang(BaseException):
    """No Exception: the code under test must not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Hang after so much CPU time: a loop that a mistake made endless. Other load on the machine does not count."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` at this place of the file becomes `new`."""

    file: str
    function: str
    old: str
    new: str
    start: int  # offsets into the file's text
    end: int
    statement: str = ""  # the innermost statement it is in, for lists of what changes nothing
    turn: int = 0  # which of several with the same words in one function

    @property
    def change(self) -> str:
        return f"{' '.join(self.old.split())} => {' '.join(self.new.split())}"

    @property
    def name(self) -> str:
        return f"{self.file}: {self.function}: {self.change}" + (f" ({self.turn})" * bool(self.turn))

    def apply(self, source: str) -> str:
        assert source[self.start : self.end] == self.old
        return source[: self.start] + self.new + source[self.end :]


def mutants(root: Path, file: str, functions: Sequence[str]) -> list[Mutant]:
    """All mistakes in these functions (`name`, or `Class.name`) of a file."""
    source = (root / file).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = source.encode()

    def place(node: ast.AST) -> tuple[int, int]:
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return len(raw[:first].decode()), len(raw[:last].decode())

    found, known = list[Mutant](), _functions(ast.parse(source))
    missing = set(functions) - set(known)
    assert not missing, f"{file} has no {', '.join(sorted(missing))}"
    for name in functions:
        for node, new, within in _mistakes(known[name], source):
            start, end = place(node)
            old = source[start:end]
            turn = sum((m.function, m.old, m.new) == (name, old, new) for m in found)
            found.append(Mutant(file, name, old, new, start, end, within, turn))
    return [m for m in found if _compiles(m.apply(source))]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _functions(tree: ast.Module) -> dict[str, ast.AST]:
    found = dict[str, ast.AST]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def _mistakes(function: ast.AST, source: str) -> Iterator[tuple[ast.AST, str, str]]:
    assert isinstance(function, ast.FunctionDef)
    for statement in function.body:
        yield from _in_statement(statement, source)


def _in_statement(statement: ast.stmt, source: str) -> Iterator[tuple[ast.AST, str, str]]:
    """Mistakes of a statement and of those inside it."""
    text = " ".join((ast.get_source_segment(source, statement) or "").split())
    simple = not any(isinstance(part, ast.stmt) for part in ast.walk(statement) if part is not statement)
    if isinstance(statement, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom) or (simple and any(word in text for word in QUIET)):
        return
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # a docstring
    dropped = isinstance(statement, ast.AugAssign | ast.Continue | ast.Break) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )
    refusal = (
        isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
    )
    if dropped or refusal:
        yield statement, "pass", text
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt):
            yield from _in_statement(part, source)
        elif not isinstance(part, ast.arguments):
            yield from ((node, new, text) for node, new in _in_expression(part, source))


def _in_expression(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.JoinedStr | ast.arguments):
        return
    yield from ((node, new) for new in _written_wrong(node, source))
    for part in ast.iter_child_nodes(node):
        if not isinstance(node, ast.Call) or not isinstance(part, ast.keyword) or part.arg != "strict":
            yield from _in_expression(part, source)


def _written_wrong(node: ast.AST, source: str) -> Iterator[str]:
    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield f"({text(node.left)}) {COMPARISONS[type(node.ops[0])]} ({text(node.comparators[0])})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant | ast.JoinedStr):
        yield f"({text(node.left)}) {ARITHMETIC[type(node.op)]} ({text(node.right)})"
    elif isinstance(node, ast.BoolOp):
        yield f" {'or' if isinstance(node.op, ast.And) else 'and'} ".join(f"({text(value)})" for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield f"({text(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"({node.value!r} + 1)" if isinstance(node.value, int) else f"({2 * node.value or 1.0!r})"
    elif isinstance(node, ast.Attribute) and node.attr in OTHER:
        yield text(node).removesuffix(node.attr) + OTHER[node.attr]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OTHER:
        yield OTHER[node.func.id] + text(node)[len(node.func.id) :]
