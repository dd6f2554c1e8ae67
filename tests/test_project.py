"""What the project says of itself: the structure page, links between documents, what CI runs, the preflight."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import wavefill

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MODULES = sorted(path.relative_to(ROOT / "src/wavefill") for path in (ROOT / "src/wavefill").rglob("*.py"))


def test_every_module_has_its_line_in_the_structure_page() -> None:
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    named = {word for code in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"\w+", code)}
    missing = [str(path) for path in MODULES if path.name != "__init__.py" and path.stem not in named]
    assert not missing, "no line in docs/structure.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^":]+)"', text)
    assert not [target for target in targets if not (document.parent / target).exists()]


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == wavefill.__version__
    assert f"## [{wavefill.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("wheel", "built"), [
    ("cp311-manylinux_x86_64", True), ("cp312-manylinux_x86_64", True), ("cp311-macosx_arm64", True),
    ("cp312-win_amd64", False), ("cp311-win32", False), ("cp312-musllinux_x86_64", False),
    ("cp313-manylinux_x86_64", False),
])
def test_wheels_are_built_where_the_sources_compile(wheel: str, built: bool) -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    chosen, left_out = (any(fnmatch(wheel, pattern) for pattern in config[key]) for key in ("build", "skip"))
    assert (chosen and not left_out) == built


def preflight() -> Any:
    spec = importlib.util.spec_from_file_location("preflight", ROOT / "tools/preflight.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("arguments", "words"), [
    ({"version": (3, 9, 2)}, "needs Python 3.11 or newer; this is 3.9. Name one: make PYTHON="),
    ({"which": lambda name: None, "environ": {}}, "C++ compiler is needed and none of c++, g++, clang++"),
    ({"which": lambda name: None, "environ": {"CXX": "nvc++ -O1"}}, "CXX names nvc++ -O1, which is not on the path"),
])
def test_preflight_says_what_is_missing(arguments: dict[str, Any], words: str) -> None:
    assert any(words in sentence for sentence in preflight().missing(**arguments))


def test_preflight_is_content_with_a_compiler() -> None:
    found = preflight().missing(which=lambda name: "/usr/bin/c++", environ={})
    assert not [sentence for sentence in found if "compiler" in sentence or "newer" in sentence]
