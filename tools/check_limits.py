"""Checks the limits of the design that no linter knows; one line per finding, exit status 1 where there is one.

usage: python tools/check_limits.py [ROOT]

- a file of the package has at most 400 lines;
- a module of the package begins with `from __future__ import annotations`, unless it holds only a docstring, imports
  and `__all__`;
- each name in a module's `__all__` is bound at its top level (one with its own `__getattr__` is left to the tests);
- no tracked file, binary ones included, names a folder of one machine: a home, a temporary folder or the checkout.
  Exporters write such paths into a model's stack traces. Test code may name a made-up home as bad input.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MAX_LINES", "check", "check_module", "check_paths", "main"]

MAX_LINES = 400
PACKAGE = "graphsurgery"
# A path that goes on from something else (a URL, a variable, another folder) is no path of one machine.
_MACHINE_PATH = rb"(?<![\w.:/~)}\]-])/(?:home|root|tmp|Users)/[\w.-]+"


def tracked_files(root: Path) -> list[Path]:
    """The files in git's index that exist in the work tree, sorted."""
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    paths = (root / name.decode() for name in listing.split(b"\0") if name)
    return sorted(path for path in paths if path.is_file())


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, those under `if` and `try` included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _top_level(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from _top_level(statement.body + handlers + statement.orelse + statement.finalbody)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    """What an assignment binds; tuples are taken apart."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    else:
        return []
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _bound_names(statement: ast.stmt) -> list[str]:
    """The names that one statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    return [target.id for target in _targets(statement) if isinstance(target, ast.Name)]


def _exported(statements: list[ast.stmt]) -> list[str]:
    """The string entries of `__all__`."""
    return [
        element.value
        for statement in statements
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and "__all__" in _bound_names(statement)
        for element in getattr(statement.value, "elts", [])
        if isinstance(element, ast.Constant) and isinstance(element.value, str)
    ]


def _needs_future_import(tree: ast.Module) -> bool:
    """Whether the module holds more than a docstring, imports and `__all__`, and lacks the import."""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    if all(isinstance(entry, ast.Import | ast.ImportFrom) or _bound_names(entry) == ["__all__"] for entry in body):
        return False
    return not any(
        isinstance(entry, ast.ImportFrom)
        and entry.module == "__future__"
        and any(alias.name == "annotations" for alias in entry.names)
        for entry in body
    )


def check_module(name: str, source: str) -> list[str]:
    """The findings of one module of the package."""
    findings: list[str] = []
    lines = len(source.splitlines())
    if lines > MAX_LINES:
        findings.append(f"{name}: {lines} lines, at most {MAX_LINES}: split it by subject")
    tree = ast.parse(source, filename=name)
    if _needs_future_import(tree):
        findings.append(f"{name}: add from __future__ import annotations")
    statements = list(_top_level(tree.body))
    bound = {bound for statement in statements for bound in _bound_names(statement)}
    if "__getattr__" not in bound:
        unbound = [entry for entry in _exported(statements) if entry not in bound]
        findings.extend(f"{name}: __all__ names {entry}, which the module does not bind" for entry in unbound)
    return findings


def check_paths(name: str, content: bytes, checkout: Path) -> list[str]:
    """The findings of one tracked file: paths that exist on one machine only.

    A checkout directly under the file system's root is not looked for: its name may be an ordinary word.
    """
    patterns = [re.escape(str(checkout).encode()) + rb"\b"] if len(checkout.parts) > 2 else []
    if not re.fullmatch(r"tests/.*\.py", name):
        patterns.append(_MACHINE_PATH)
    if not patterns:
        return []
    found = sorted({match.group().decode() for match in re.finditer(b"|".join(patterns), content)})
    return [f"{name}: names {path}, a path of one machine" for path in found]


def check(root: Path) -> list[str]:
    """All findings of the checkout at root, in the order of the files."""
    findings: list[str] = []
    for path in tracked_files(root):
        name = path.relative_to(root).as_posix()
        content = path.read_bytes()
        findings.extend(check_paths(name, content, root))
        if path.suffix == ".py" and name.startswith(f"{PACKAGE}/"):
            findings.extend(check_module(name, content.decode()))
    return findings


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; 1 where there is one."""
    parser = argparse.ArgumentParser(description="Check the limits of the design that no linter knows.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    findings = check(parser.parse_args(arguments).root.resolve())
    print("\n".join(findings) if findings else "limits: no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
