"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE, OURS = ROOT / "kvstore_xfer", ("kvstore_xfer", "kvxfer_")


def imports(file):
    """Top-level and nested imports of a module, apart from those for type checkers only."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def violations(folder, forbidden):
    return {
        f"{file.relative_to(ROOT)}: {name}"
        for file in folder.rglob("*.py")
        for name in imports(file)
        if any(name == word or name.startswith(f"{word}.") for word in forbidden)
    }


def test_the_core_imports_no_engine():
    assert violations(CORE, ("sglang", "lmcache", "kvxfer_sglang", "kvxfer_lmcache")) == set()


def test_only_the_command_line_imports_the_transformers_integration():
    found = violations(CORE, ("kvxfer_transformers",))
    assert {name for name in found if not name.startswith("kvstore_xfer/cli/")} == set()


@pytest.mark.parametrize("package", ["blocks", "fit", "gate", "mapper", "models", "rope", "store"])
def test_lower_layers_do_not_import_upper_ones(package):
    assert violations(CORE / package, ("kvstore_xfer.tier", "kvstore_xfer.cli")) == set()


def test_no_two_modules_import_each_other():
    """Nor for type checkers only: what needs each other is one thing."""
    modules = {_name(file): file for file in CORE.rglob("*.py")}
    needs = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                needs[name] |= (parts | {node.module}) & modules.keys()
    assert [(a, b) for a in needs for b in needs[a] if a < b and a in needs[b]] == []


def _name(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_kernels_import_nothing_of_ours():
    found = {
        f"{file.name}: {name}"
        for file in (ROOT / "kernels").rglob("*.py")
        for name in imports(file)
        if name.startswith(OURS) and not name.startswith("kvxfer_kernels")
    }
    assert found == set()


@pytest.mark.parametrize("folder", ["kernels", "integrations"])
def test_source_roots_are_no_packages(folder):
    """A package called `kernels` would hide Hugging Face's, which SGLang imports."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, kvstore_xfer; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "kvstore_xfer" in loaded
    assert not loaded & {"torch", "triton", "transformers", "numpy", "sglang", "lmcache", "lmdb"}
