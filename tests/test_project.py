"""The project around the code: versions, documents, wheel, tools and make targets."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import graphsurgery

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FUTURE = "from __future__ import annotations\n"


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "tools" / name, *arguments)


def test_installed_version_is_the_one_of_pyproject() -> None:
    assert importlib.metadata.version("graphsurgery") == PYPROJECT["project"]["version"]


def newest_release(changelog: str) -> str | None:
    """The first heading that carries a version; "Unreleased" above it is passed over."""
    found = re.search(r"^## \[?v?(\d+\.\d+\.\d+\S*?)\]?(?:\s|$)", changelog, re.MULTILINE)
    return found and found[1]


def test_newest_release_passes_over_unreleased() -> None:
    assert newest_release("# Changes\n\n## Unreleased\n\n## 1.2.0 (2030-01-02)\n\n## 1.1.0\n") == "1.2.0"
    assert newest_release("# Changes\n\n## [2.0.0rc1] - 2030-01-02\n") == "2.0.0rc1"
    assert newest_release("# Changes\n") is None


def test_changelog_begins_with_the_version() -> None:
    assert newest_release(CHANGELOG.read_text(encoding="utf-8")) == PYPROJECT["project"]["version"]


def test_public_names_import() -> None:
    names = graphsurgery.__all__
    assert sorted(set(names)) == sorted(names)
    missing = [name for name in names if not hasattr(graphsurgery, name)]
    assert not missing


def broken_links(document: Path) -> list[str]:
    """The relative links of a Markdown file whose target does not exist."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [link.split("#")[0] for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    return [target for target in targets if target and not (document.parent / target).exists()]


def test_broken_links_are_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("[one](a.md#top) [two](gone.md) [three](https://example.org/gone.md)\n```\n[x](no.md)\n```\n")
    assert broken_links(document) == ["gone.md"]


@pytest.mark.parametrize(
    "document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda path: path.name
)
def test_relative_links_resolve(document: Path) -> None:
    assert broken_links(document) == []


def shell_commands(markdown: str) -> list[str]:
    """The lines of the shell blocks that call graphsurgery, continued lines joined, those of make left out."""
    blocks = "\n".join(FENCE.findall(markdown)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ").strip() for line in blocks.splitlines()]
    return [line for line in lines if re.search(r"(^|\| *)graphsurgery ", line) and not line.startswith("make ")]


def run_shell_commands(commands: list[str], folder: Path) -> list[str]:
    """Run the commands in order in folder; one entry for each that does not end 0."""
    bash = shutil.which("bash")
    assert bash
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    results = [(command, run(bash, "-o", "pipefail", "-c", command, cwd=folder, env=env)) for command in commands]
    return [f"{command}: {done.returncode}\n{done.stderr}" for command, done in results if done.returncode]


def test_shell_commands_are_found_and_their_failure_is_seen(tmp_path: Path) -> None:
    markdown = (
        "```bash\ngraphsurgery a \\\n  --b\ncat m | graphsurgery c\nmake d | graphsurgery d\nmake test\n```\n"
        "```python\ngraphsurgery e\n```\n```console\n$ graphsurgery f\n```\n"
    )
    assert [" ".join(command.split()) for command in shell_commands(markdown)] == [
        "graphsurgery a --b",
        "cat m | graphsurgery c",
        "graphsurgery f",
    ]
    assert run_shell_commands(["true", "false | true"], tmp_path) == ["false | true: 1\n"]


def test_readme_commands_run(tmp_path: Path) -> None:
    commands = shell_commands(README.read_text(encoding="utf-8"))
    assert commands
    shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")
    failures = run_shell_commands(commands, tmp_path)
    assert not failures, "\n".join(failures)


def test_readme_python_runs(tmp_path: Path) -> None:
    snippets = PYTHON_FENCE.findall(README.read_text(encoding="utf-8"))
    assert snippets
    shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")
    for snippet in snippets:
        done = run(sys.executable, "-W", "error", "-c", snippet, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "verified on" in done.stdout
    assert (tmp_path / "out.onnx").is_file()


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 75


def test_wheel_holds_the_data_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "graphsurgery", source / "graphsurgery", ignore=shutil.ignore_patterns("__pycache__"))
    built = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = [path for path in (source / "graphsurgery").rglob("*") if path.suffix in {".py", ".json", ".typed"}]
    assert {"py.typed", "schema.json"} <= {path.name for path in wanted}
    assert {path.relative_to(source).as_posix() for path in wanted} <= packed
    assert any(name.endswith("/licenses/LICENSE") for name in packed)
    assert not [name for name in packed if not name.startswith("graphsurgery")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git work tree with one module that keeps every limit."""
    assert run("git", "init", "-q", tmp_path).returncode == 0
    (tmp_path / "graphsurgery").mkdir()
    write(tmp_path, "graphsurgery/__init__.py", '"""A package."""\n\nimport os\n\n__all__ = ["os"]\n')
    return tmp_path


def write(checkout: Path, name: str, content: str | bytes) -> None:
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert run("git", "add", name, cwd=checkout).returncode == 0


def test_this_project_keeps_the_limits() -> None:
    done = tool("check_limits.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "limits: no findings\n", "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("graphsurgery/a.py", FUTURE + "x = 1\n" * 399),
        ("graphsurgery/a.py", FUTURE + '__all__ = ["a", "b"]\na, b = 1, 2\n'),
        ("graphsurgery/a.py", FUTURE + '__all__ = ["late"]\ndef __getattr__(name): ...\n'),
        ("graphsurgery/a.py", FUTURE + '__all__ = ["json"]\nif True:\n    import json\n'),
        ("tests/test_a.py", 'PATH = "/home/someone/notes"\n'),
        ("other.py", "x = 1\n" * 500),
        ("notes.md", "see https://example.org/home/page and ~/tmp/x and $dir/root/y\n"),
    ],
)
def test_limits_kept_give_no_finding(checkout: Path, name: str, content: str) -> None:
    write(checkout, name, content)
    assert tool("check_limits.py", checkout).stdout == "limits: no findings\n"


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("graphsurgery/a.py", FUTURE + "x = 1\n" * 400, "401 lines, at most 400"),
        ("graphsurgery/a.py", '"""Text."""\n\nx = 1\n', "add from __future__ import annotations"),
        ("graphsurgery/a.py", FUTURE + '__all__ = ["b"]\na = 1\n', "__all__ names b"),
        ("notes.md", "see /home/someone/notes\n", "names /home/someone"),
        ("model.onnx", b"\x08\x00 File: /root/export.py\xff", "names /root/export.py"),
    ],
)
def test_limits_broken_give_one_line(checkout: Path, name: str, content: str | bytes, finding: str) -> None:
    write(checkout, name, content)
    done = tool("check_limits.py", checkout)
    assert (done.returncode, done.stderr) == (1, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{name}: ")
    assert finding in line


def test_limits_find_the_checkout_itself(checkout: Path) -> None:
    inner = checkout / "inner"
    inner.mkdir()
    run("git", "init", "-q", inner)
    write(inner, "notes.md", f"see {inner}\n")
    done = tool("check_limits.py", inner)
    assert done.returncode == 1
    assert f"notes.md: names {inner}" in done.stdout


LOWEST = '[project]\nname = "p"\ndependencies = ["a>=1.2,<3", "b[x]~=2.0 ; python_version > \'3\'", "c==4"]\n'


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (LOWEST, [], "a==1.2\nb==2.0\nc==4\n"),
        (
            LOWEST + '[project.optional-dependencies]\nt = ["p[u]", "d>=5"]\n',
            ["--extra", "t"],
            "a==1.2\nb==2.0\nc==4\nd==5\n",
        ),
    ],
)
def test_lowest_pins_the_lower_bounds(tmp_path: Path, text: str, arguments: list[str], expected: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    done = tool("lowest.py", tmp_path / "pyproject.toml", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.parametrize(
    ("requirement", "arguments", "message"),
    [
        ("a<3", [], "a<3: give it exactly one lower bound, such as name>=1.2\n"),
        ("a", [], "a: give it exactly one lower bound, such as name>=1.2\n"),
        ("a>=1,>=2", [], "a>=1,>=2: give it exactly one lower bound, such as name>=1.2\n"),
        ("a>=1", ["--extra", "t"], "extra t: not in pyproject.toml, which has no extras\n"),
    ],
)
def test_lowest_refuses_what_has_no_lower_bound(
    tmp_path: Path, requirement: str, arguments: list[str], message: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "p"\ndependencies = ["{requirement}"]\n')
    done = tool("lowest.py", tmp_path / "pyproject.toml", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


STEP = """#!/bin/sh
echo "step $1"
[ "$1" = rewrite ] && printf '%s\\n' "a.onnx: 2 attentions" "written to out/a.onnx" >&2
[ "$1" != "$FAILING" ] || exit 4
"""


@pytest.mark.parametrize(
    ("failing", "status", "steps"),
    [("", 0, ["inspect", "rewrite", "verify"]), ("rewrite", 4, ["inspect", "rewrite"]), ("inspect", 4, ["inspect"])],
)
def test_demo_ends_with_the_status_of_a_failed_step(
    tmp_path: Path, failing: str, status: int, steps: list[str]
) -> None:
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "graphsurgery").write_text(STEP)
    (tmp_path / "graphsurgery").chmod(0o755)
    command = (tmp_path / "python", ROOT / "tools" / "demo.py", "--fixtures", ROOT / "fixtures", "--out", "out")
    done = run(*command, cwd=tmp_path, env=os.environ | {"FAILING": failing})
    assert done.returncode == status
    assert re.findall(r"^step (\w+)$", done.stdout, re.MULTILINE) == steps
    assert done.stderr.count("written to out/a.onnx") == ("rewrite" in steps)
    ends = "\n== summary\na.onnx: 2 attentions\nwritten to out/a.onnx\n"
    assert done.stdout.endswith(ends) == (status == 0)
    assert ("== summary" in done.stdout) == (status == 0)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\necho Python 3.10.1\nexit 1\n")
    old.chmod(0o755)
    done = run("make", "test", f"PYTHON={old}", cwd=tmp_path)
    assert done.returncode != 0
    assert f"graphsurgery needs Python 3.11 or newer, and {old} is: Python 3.10.1" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_script_is_executable_and_its_gates_exist() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert run("bash", "-n", script).returncode == 0
    gates = ROOT / ".ci" / "gates"
    listed = gates.read_text(encoding="utf-8").split() if gates.exists() else []
    assert set(listed) <= {"check_zoo", "check_cases"}
