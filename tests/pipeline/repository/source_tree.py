"""The repository's own files, for the tests that read them."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def files(*suffixes: str) -> list[Path]:
    """Files that are committed or would be, with one of the suffixes (all without any)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
        capture_output=True, text=True).stdout
    paths = [ROOT / name for name in sorted(filter(None, listed.split("\0")))]
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def python_files(folder: str) -> list[Path]:
    """Python files below a folder of the repository."""
    return [path for path in files(".py") if path.is_relative_to(ROOT / folder)]


def imports(path: Path) -> set[str]:
    """Dotted names a file imports, also inside functions; `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or inside it."""
    return name == package or name.startswith(package + ".")
