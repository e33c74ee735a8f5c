"""One set of pins: requirements.lock, environment.yml, Makefile and what is installed agree."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines) -> dict[str, str]:
    "{name: version} of lines like `name==version`; anything else is an error."
    found = {}
    for line in lines:
        name, sign, version = line.strip().partition("==")
        assert sign and version, f"not an exact pin: {line!r}"
        assert normal(name) not in found, f"pinned twice: {name}"
        found[normal(name)] = version
    return found


LOCK = pins(line for line in (ROOT/"requirements.lock").read_text().splitlines() if line and line[0] != "#")
ENVIRONMENT = yaml.safe_load((ROOT/"environment.yml").read_text())
INSTALLED = {normal(distribution.metadata["Name"]): distribution.version.partition("+")[0]
             for distribution in distributions()}


def imported_modules() -> dict[str, set[str]]:
    "{top-level module: files that import it} over modules, notebooks and tests."
    sources = {path: path.read_text() for folder in ("memloc", "tests") for path in (ROOT/folder).glob("*.py")}
    for path in (ROOT/"nbs").rglob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        sources[path] = "\n".join("".join(cell["source"]) for cell in cells)
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    own = {"memloc", *(path.stem for path in (ROOT/"tests").glob("*.py"))}
    return {name: where for name, where in found.items()
            if name not in sys.stdlib_module_names and name not in own}


def test_environment_yml_says_what_the_lock_says():
    python, pip, section = ENVIRONMENT["dependencies"]
    assert (python, pip) == ("python=3.11", "pip")
    assert section["pip"][0] == "-c requirements.lock"
    chosen = pins(section["pip"][1:])
    assert {name: LOCK.get(name) for name in chosen} == chosen


def test_the_makefile_installs_the_lock_with_the_same_python():
    makefile = (ROOT/"Makefile").read_text()
    assert re.search(r"^PYTHON\s+\?= python3\.11$", makefile, re.MULTILINE)
    assert "--no-deps -r requirements.lock" in makefile
    assert not re.findall(r"==\d", makefile), "versions belong into the lock"
    torch = subprocess.run(["make", "-s", "-C", str(ROOT), "--eval", "show: ; @echo $(TORCH)", "show"],
                           capture_output=True, text=True, check=True).stdout.strip()
    assert torch == f"torch=={LOCK['torch']}"


def test_the_lock_is_what_is_installed():
    assert {name: INSTALLED.get(name) for name in LOCK} == LOCK


def test_everything_imported_is_pinned():
    owners = packages_distributions()
    unpinned = {name: where for name, where in imported_modules().items()
                if not any(normal(owner) in LOCK for owner in owners.get(name, []))}
    assert unpinned == {}


def test_everything_the_package_imports_is_listed_in_environment_yml():
    chosen, owners = pins(ENVIRONMENT["dependencies"][2]["pip"][1:]), packages_distributions()
    unlisted = {name: where for name, where in imported_modules().items()
                if any(file.startswith("memloc/") for file in where) and not any(
                    normal(owner) in chosen for owner in owners.get(name, []))}
    assert unlisted == {}


def test_bare_make_lists_every_target():
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    listed = subprocess.run(["make", "-s", "--no-print-directory", "-C", str(ROOT)], capture_output=True, text=True, check=True,
                            env=outside).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT/"Makefile").read_text(), re.MULTILINE)
    assert sorted(line.split()[1] for line in listed.splitlines()) == sorted(phony.split())
    assert {"env", "run", "test", "sync", "outputs", "lab", "reproduce", "bench"} <= set(phony.split())
