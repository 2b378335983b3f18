"""What keeps the walls standing: one-way imports, complete build lists, one place for the environment, small files."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = ROOT / "topoep_jax"
PYTHON_FOLDERS = ("topoep_jax", "models", "train", "tests", "examples", "tools", ".ci")
TEXT_SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh", ".bzl", ".toml", ".txt", ".md", ".sh", ".cmake", ".bazel", ""}
MAX_LINES = 400
MAX_FUNCTION_LINES = 60

# A part of the library may import the rows above its own, never its own row or one below. Parts in one string are one
# room, and free to import each other.
ORDER = [
    ["_compat", "_needs", "_integers"],
    ["topology"],
    ["_pallas", "launch"],
    ["_arrays"],
    ["routing forced_routing", "shapes", "rates"],
    ["balance", "demand", "synthetic"],
    ["_cuda_build"],
    ["plan _native _native_ids _cuda"],
    ["knobs"],
    ["config", "measure", "metrics"],
    ["transport", "traces"],
    ["transfer", "dispatch"],
    ["experts"],
    ["combine"],
    ["pipeline", "simulate"],
    ["moe"],
    ["on_mesh"],
    ["module", "linen"],
    ["__init__"],
    ["cli"],
    ["aot"],
]
ROW_AND_ROOM = {part: (row, room) for row, rooms in enumerate(ORDER) for room in rooms for part in room.split()}
READERS_OF_ENVIRONMENT = {
    "topoep_jax/_cuda_build.py",
    "topoep_jax/launch.py",
    "train/config.py",
    "train/supervise.py",
    "conftest.py",
    "tests/support/leaks.py",
    "tests/house/leaks_test.py",
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def native_files(*folders: str) -> list[Path]:
    suffixes = {".cc", ".cu", ".h", ".cuh"}
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of what `path` imports; `from a import b` yields a.b, for b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def is_part(name: str) -> bool:
    return (LIBRARY / name).is_dir() or (LIBRARY / f"{name}.py").is_file()


def test_every_part_of_the_library_has_its_place() -> None:
    parts = {part_of(path) for path in python_files("topoep_jax")}
    assert parts <= set(ROW_AND_ROOM), f"add to ORDER: {parts - set(ROW_AND_ROOM)}"


@pytest.mark.parametrize("path", python_files("topoep_jax"), ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    row, room = ROW_AND_ROOM[part_of(path)]
    for module in imported_modules(path):
        package, _, rest = module.partition(".")
        assert package not in ("models", "train", "tests", "examples"), f"the library imports {module}"
        if package != "topoep_jax" or rest == "_xla_ffi":
            continue
        target = rest.split(".")[0]
        # A name that is no module comes out of the package itself, which imports everything.
        target_row, target_room = ROW_AND_ROOM[target if is_part(target) else "__init__"]
        assert target_row < row or target_room == room, f"{name_of(path)} imports {module}, which comes later"


def test_models_do_not_import_the_trainer() -> None:
    for path in python_files("models"):
        assert not [module for module in imported_modules(path) if module.split(".")[0] == "train"], name_of(path)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, by whatever way: what remains when those that import none of the rest go."""
    rest = dict(imports)
    while rest:
        free = {name for name, others in rest.items() if not others & rest.keys()}
        if not free:
            break
        rest = {name: others for name, others in rest.items() if name not in free}
    # What only leads into a circle goes too.
    while rest:
        wanted = set().union(*rest.values())
        if rest.keys() <= wanted:
            break
        rest = {name: others for name, others in rest.items() if name in wanted}
    return sorted([name, *sorted(others & rest.keys())] for name, others in rest.items())


def test_circles_are_found() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a", "c"}}
    assert circles(chain) == []
    assert circles({**chain, "b": {"c", "a"}}) == [["a", "b"], ["b", "a"]]


def test_no_modules_import_each_other() -> None:
    """Wherever an import stands: within a function or under TYPE_CHECKING, it is one."""
    modules = {
        name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
        for path in python_files("topoep_jax", "models", "train")
    }
    imports = {}
    for name, path in modules.items():
        # `from a import b`: the module a.b, or else what a module a makes. The extension is no module of these.
        found = (module for module in imported_modules(path) if not module.endswith("._xla_ffi"))
        imports[name] = {m if m in modules else m.rpartition(".")[0] for m in found} & modules.keys() - {name}
    assert circles(imports) == []


def source_lists() -> dict[str, list[str]]:
    lists = runpy.run_path(str(ROOT / "xla_ffi" / "build" / "sources.bzl"))
    return {name: value for name, value in lists.items() if name.isupper()}


def test_every_native_source_is_listed_once() -> None:
    lists = source_lists()
    listed = [path for name, paths in lists.items() if not name.startswith("CC_") for path in paths]
    compiled = [path for path in native_files("xla_ffi", "tests/native") if path.suffix in (".cc", ".cu")]
    assert sorted(listed) == sorted(map(name_of, compiled))
    tests = [path.stem for path in (ROOT / "tests" / "cc").glob("*.cc")]
    assert sorted(lists["CC_TESTS"] + lists["CC_CUDA_TESTS"] + lists["CC_MUTANTS"]) == sorted(tests)


def test_the_extension_holds_the_planner_and_nothing_for_tests() -> None:
    from topoep_jax import _xla_ffi

    assert set(_xla_ffi.registrations()) == {"topoep_plan"}
    names = {name for name in vars(_xla_ffi) if not name.startswith("__")}
    assert names == {"registrations", "plan_workspace", "group_sizes"}


def test_the_product_includes_nothing_of_the_tests() -> None:
    assert not [name_of(path) for path in native_files("xla_ffi") if '#include "tests/' in path.read_text()]


def test_the_environment_is_read_in_few_places() -> None:
    pattern = re.compile(r"\b(environ|getenv|putenv)\b")
    readers = {
        name_of(path)
        for path in [ROOT / "conftest.py", *python_files(*PYTHON_FOLDERS), *native_files("xla_ffi")]
        if path.name != "structure_test.py" and pattern.search(path.read_text())
    }
    assert readers <= READERS_OF_ENVIRONMENT


def test_make_quick_compiles_no_layer() -> None:
    quick = re.search(r"^QUICK := \$\(patsubst .*?,.*?,((?:.|\\\n)*?)\)", (ROOT / "Makefile").read_text(), re.M)
    files = [ROOT / "tests" / f"{name}_test.py" for name in quick[1].replace("\\", "").split()]
    assert ROOT / "tests/plan/laws_test.py" in files
    layers = re.compile(r"(models|train|topoep_jax\.(moe|moe_layer|MoE|module|linen|pipeline))(\.|$)")
    assert not [(path.name, name) for path in files for name in imported_modules(path) if layers.match(name)]


def project_texts() -> Iterator[Path]:
    """Files of the project that people write: nothing built, installed or downloaded."""
    top = (path for path in sorted(ROOT.iterdir()) if path.name != ".git")  # of a worktree, which is a file
    yield from (path for path in top if path.is_file() and path.suffix in TEXT_SUFFIXES)
    for folder in (*PYTHON_FOLDERS, "xla_ffi", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in TEXT_SUFFIXES:
                yield path


def test_files_are_short_enough_to_read() -> None:
    lengths = {
        name_of(path): len(path.read_text().splitlines())
        for path in project_texts()
        if path.suffix in {".py", ".cc", ".cu", ".h", ".cuh", ".bzl"}
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def long_functions(path: Path) -> Iterator[str]:
    """Functions of a Python file whose body, without the docstring, is longer than a screen."""
    # Not into functions: what is in one is no longer than it.
    inside = list(ast.parse(path.read_text()).body)
    for node in inside:
        if isinstance(node, ast.ClassDef):
            inside += node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None and node.body[1:] else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name_of(path)}: {node.name} has {lines} lines"


def long_native_functions(path: Path) -> Iterator[str]:
    """The same of a C++ file: what braces hold, in no other braces but those of namespaces and types."""
    no_code = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    text = re.sub(no_code, lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.S)
    open_braces: list[tuple[int, bool]] = []
    for brace in re.finditer(r"[{}]", text):
        at = brace.start()
        if brace[0] == "{":
            before = re.sub(r"<[^<>]*>", "", text[max(text.rfind(mark, 0, at) for mark in "{};") + 1 : at])
            # A table of values is no function.
            scope = re.search(r"\b(namespace|struct|class|enum|union)\b|\bextern\s*$|=\s*$", before)
            open_braces.append((at, scope is not None))
            continue
        start, is_scope = open_braces.pop()
        lines = text.count("\n", start, at) - 1
        if lines > MAX_FUNCTION_LINES and not is_scope and all(outer for _, outer in open_braces):
            yield f"{name_of(path)}:{text.count(chr(10), 0, start) + 1}: a function of {lines} lines"


def test_functions_fit_on_a_screen() -> None:
    assert not [text for path in python_files(*PYTHON_FOLDERS) for text in long_functions(path)]
    native = native_files("xla_ffi", "tests/cc", "tests/native", "tools")
    assert not [text for path in native for text in long_native_functions(path)]


def test_long_functions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    python, native = tmp_path / "long.py", tmp_path / "long.h"
    for lines in (MAX_FUNCTION_LINES, MAX_FUNCTION_LINES + 1):
        python.write_text('def f():\n    """Says what."""\n' + "    pass\n" * lines)
        native.write_text("namespace n {\ntemplate <class T>\nvoid F() {  // {\n" + "  g();\n" * lines + "}\n}\n")
        found = [*long_functions(python), *long_native_functions(native)]
        assert len(found) == (2 if lines > MAX_FUNCTION_LINES else 0)


def test_no_file_names_a_machine() -> None:
    """Registry hosts and absolute home paths hold on one machine only."""
    registries = ["pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".org", "deb" + ".debian.org", "index" + "-url"]
    pattern = re.compile("|".join([*map(re.escape, registries), r"(?<![\w.$}])/(root|home|Users|work)/\w"]))
    for path in project_texts():
        match = pattern.search(path.read_text(errors="replace"))
        assert match is None, f"{name_of(path)}: {match}"
