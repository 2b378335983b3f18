"""Builds libtopoep_cuda.so with nvcc, once for each set of sources, compiler and headers, and keeps it in a cache.

The library stands apart from the extension `_xla_ffi`: it is built where it is used, since NCCL's device code must
match the installed NCCL. It needs neither libcuda nor NCCL to load: cudart is linked statically, NCCL is looked up when
a group is made. Only the standard library is used, so that this file also runs as a script where JAX is not installed:

    python topoep_jax/_cuda_build.py --xla-include DIR --out DIR

Environment: CUDA_HOME names a local toolkit, which then wins over the compiler of the Python packages;
TOPOEP_CUDA_CACHE is the cache's folder (default: topoep_jax in the user's cache folder).
"""

import argparse
import concurrent.futures
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "libtopoep_cuda.so"
DEFAULT_ARCHITECTURE = "sm_90"
OLDEST_NVCC = (12, 4)
OLDEST_NCCL = (2, 32, 3)

_SET_CACHE = "set TOPOEP_CUDA_CACHE to a folder on a local disk that can be written"

PACKAGES = "nvidia-cuda-nvcc, nvidia-cuda-cccl and nvidia-nccl-cu13 (`make setup EXTRA=cuda13` in a clone)"
_OF_ONE_RELEASE = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")

# The handlers and the functions that Python calls; everything else stays inside, apart from `_xla_ffi` and the plugin.
_EXPORTS = "{ global: Topoep*; topoep_*; local: *; };\n"
_OWN_INCLUDE = re.compile(r'^\s*#\s*include\s+"(xla_ffi/[^"]+)"', re.MULTILINE)
# NCCL's initializer macros leave fields out.
_HOST_FLAGS = "-Xcompiler=-fPIC,-Wall,-Wextra,-Wno-missing-field-initializers"
_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xptxas=-v", _HOST_FLAGS)
_WARNING = re.compile(r"^.*\bwarning\b.*$", re.MULTILINE)
_LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--no-undefined", "-Xlinker=--gc-sections")

_log = logging.getLogger("topoep_jax")


class BuildError(RuntimeError):
    """The CUDA library cannot be built; the message says what to install or what the compiler said."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What the sources are compiled with and against."""

    nvcc: Path
    nccl_include: Path
    xla_include: Path
    architectures: tuple[str, ...]
    strict: bool
    """Warnings are errors."""

    def versions(self) -> dict[str, str]:
        """Versions of the compiler, the NCCL headers and the XLA FFI headers."""
        xla = _macros(self.xla_include / "xla/ffi/api/c_api.h", "XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR")
        versions = {"nvcc": nvcc_version(self.nvcc), "nccl": nccl_version(self.nccl_include), "xla_ffi": xla}
        return {name: _dotted(version) for name, version in versions.items()}


def find(
    architectures: Sequence[str] = (),
    *,
    nccl_include: Path | None = None,
    xla_include: Path | None = None,
    strict: bool = False,
) -> Toolchain:
    """Finds the compiler and the headers; `architectures` (as "sm_90") default to those of this machine's GPUs.

    Raises:
      BuildError: if something is missing or too old; the message names the packages.
    """
    nvcc = find_nvcc()
    if nvcc_version(nvcc) < OLDEST_NVCC:
        raise BuildError(
            f"{nvcc} is of CUDA {_dotted(nvcc_version(nvcc))}, and {_dotted(OLDEST_NVCC)} or newer is needed: install"
            f" {PACKAGES}, or point CUDA_HOME to a newer toolkit"
        )
    _check_headers(nvcc)
    nccl = nccl_include or _find_nccl()
    if not (nccl / "nccl_device.h").is_file():
        raise BuildError(
            f"no nccl_device.h in {nccl}: install nvidia-nccl-cu13 or nvidia-nccl-cu12, or pass its folder"
        )
    if nccl_version(nccl) < OLDEST_NCCL:
        raise BuildError(
            f"the headers in {nccl} are of NCCL {_dotted(nccl_version(nccl))}, and {_dotted(OLDEST_NCCL)} or newer is"
            " needed: upgrade nvidia-nccl-cu13 or nvidia-nccl-cu12"
        )
    xla = xla_include or _find_xla()
    if not (xla / "xla/ffi/api/ffi.h").is_file():
        raise BuildError(f"no xla/ffi/api/ffi.h in {xla}: pass the folder that jax.ffi.include_dir() names")
    return Toolchain(nvcc, nccl, xla, tuple(architectures) or _architectures_of_gpus(), strict)


def find_nvcc() -> Path:
    """nvcc of CUDA_HOME if that is set, else of the Python packages, else on PATH.

    Raises:
      BuildError: if there is none.
    """
    home = os.environ.get("CUDA_HOME")
    if home:
        if not (Path(home) / "bin/nvcc").is_file():
            raise BuildError(f"no bin/nvcc in CUDA_HOME={home}: unset it, or point it to a CUDA toolkit")
        return Path(home).absolute() / "bin/nvcc"
    for folder in _nvidia_folders():
        for nvcc in sorted(folder.glob("cu[0-9]*/bin/nvcc"), reverse=True):
            return nvcc
    on_path = shutil.which("nvcc")
    if on_path is None:
        raise BuildError(f"no nvcc: install {PACKAGES}, or point CUDA_HOME to a toolkit of CUDA 12.4 or newer")
    return Path(on_path).absolute()


@functools.cache
def nvcc_version(nvcc: Path) -> tuple[int, ...]:
    """Release of a compiler, as (13, 0, 88)."""
    text = _run([nvcc, "--version"]).stdout
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"{nvcc} --version does not name a version: {text!r}")
    return tuple(map(int, match.groups()))


def runtime_version(nvcc: Path) -> tuple[int, ...] | None:
    """Release of the runtime headers that a compiler takes, as (13, 0); None if they are not where they should be."""
    header = nvcc.resolve().parent.parent / "include/cuda_runtime_api.h"
    (version,) = _macros(header, "CUDART_VERSION") if header.is_file() else (0,)
    return (version // 1000, version % 1000 // 10) if version else None


def link_flags(nvcc: Path) -> list[str]:
    """What a compiler must be told to find its own libraries: nvcc.profile of packages 13.0 and 13.1 says lib64."""
    folder = nvcc.resolve().parent.parent / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").is_file() else []


def nccl_version(include: Path) -> tuple[int, ...]:
    """Version of the NCCL headers in `include`, as (2, 32, 3)."""
    return _macros(include / "nccl.h", "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH")


def _check_headers(nvcc: Path) -> None:
    """Packages may be of different releases, which CUDA's own headers refuse in the middle of a long output."""
    runtime, release = runtime_version(nvcc), nvcc_version(nvcc)[:2]
    if runtime in (None, release):
        return
    if any(nvcc.resolve().is_relative_to(folder.resolve()) for folder in _nvidia_folders()):
        way = "pip install " + " ".join(f"'{package}=={_dotted(runtime)}.*'" for package in _OF_ONE_RELEASE)
        way = f"install one release of all, as by {way}, or point CUDA_HOME to a whole toolkit"
    else:
        way = "point CUDA_HOME to a toolkit whose parts belong together"
    raise BuildError(
        f"{nvcc} is of CUDA {_dotted(release)}, but the runtime headers beside it are of {_dotted(runtime)}: {way}"
    )


def cache_folder() -> Path:
    """Where libraries, objects, PTX and the assembler's reports are kept.

    Raises:
      BuildError: if nothing names a folder, and this user has no home.
    """
    named = os.environ.get("TOPOEP_CUDA_CACHE")
    if named:
        return Path(named).absolute()
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(f"no place for the CUDA library ({error}): {_SET_CACHE}") from error
    return user.absolute() / "topoep_jax"


def build(toolchain: Toolchain) -> Path:
    """Returns the folder that holds the library, and for each source the compiler's .log and a .ptx per architecture.

    What is already in the cache is not built again. Processes take turns.

    Raises:
      BuildError: if a source does not compile or the library does not link (the message holds the compiler's output),
        or if the cache cannot be used.
    """
    lists, root = _sources()
    sources = lists["PROBLEM_SRCS"] + lists["SHARED_SRCS"] + lists["CUDA_SRCS"]
    keys = {source: _key(source, root, toolchain) for source in sources}
    cache = cache_folder()
    try:
        folder = _build(keys, root, toolchain, cache)
        warnings = [line for log in folder.glob("*.log") for line in _WARNING.findall(log.read_text())]
    except OSError as error:  # a compiler that does not start is a BuildError of its own
        raise BuildError(f"the CUDA library's cache {cache} cannot be used ({error}): {_SET_CACHE}") from error
    if toolchain.strict and warnings:
        raise BuildError("\n".join(["the compiler warns:", *warnings]))
    return folder


def _build(keys: dict[str, str], root: Path, toolchain: Toolchain, cache: Path) -> Path:
    """`build` of the sources in `keys`, with what each object depends on as a digest."""
    folder = cache / "cuda" / _digest(LIBRARY, *_LINK_FLAGS, _EXPORTS, *keys.values())
    if (folder / LIBRARY).is_file():
        return folder
    objects = cache / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as turn, tempfile.TemporaryDirectory(dir=cache) as scratch:
        fcntl.flock(turn, fcntl.LOCK_EX)  # One build at a time on this machine.
        if (folder / LIBRARY).is_file():
            return folder
        missing = [source for source, key in keys.items() if not (objects / f"{key}.o").is_file()]
        if missing:
            _log.info("building the CUDA library with %s: %s", toolchain.nvcc, ", ".join(missing))

        def compile_one(source: str) -> None:
            _compile(source, root, toolchain, objects / keys[source], Path(scratch) / _flat(source))
            if _key(source, root, toolchain) != keys[source]:
                (objects / f"{keys[source]}.o").unlink()
                raise BuildError(f"{source} or a header of it changed while it was compiled: build again")

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, missing))
        _link(toolchain, [objects / f"{key}.o" for key in keys.values()], Path(scratch))
        for source, key in keys.items():
            for path in [*objects.glob(f"{key}.*ptx"), objects / f"{key}.log"]:
                shutil.copy(path, Path(scratch) / (_flat(source) + path.name.removeprefix(key)))
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(scratch).iterdir():
            if path.is_file() and path.name != LIBRARY:
                os.replace(path, folder / path.name)
        os.replace(Path(scratch) / LIBRARY, folder / LIBRARY)  # last: its presence says that the rest is there
    return folder


def _compile(source: str, root: Path, toolchain: Toolchain, stem: Path, scratch: Path) -> None:
    """Writes `stem`.log, where the source has kernels `stem`.sm_90.ptx and the like, and last `stem`.o."""
    scratch.mkdir()
    built = scratch / "built.o"
    includes: list[str | Path] = [f"-I{root}", "-isystem", toolchain.xla_include, "-isystem", toolchain.nccl_include]
    command = [toolchain.nvcc, *_flags(source, toolchain), "-c", root / source, "-o", built, *includes]
    if toolchain.strict:
        command.append("-Werror=all-warnings")
    # The PTX is what the assembler saw, so it is kept rather than made again.
    result = _run([*command, "--keep", "--keep-dir", scratch], makes=built)
    stem.with_suffix(".log").write_text(result.stdout + result.stderr)
    for ptx in scratch.glob("*.ptx"):
        target = re.search(r"^\.target\s+(\w+)", ptx.read_text(), re.MULTILINE)
        shutil.copy(ptx, stem.with_suffix(f".{target[1] if target else 'unknown'}.ptx"))
    shutil.copy(built, stem.with_suffix(".tmp"))
    os.replace(stem.with_suffix(".tmp"), stem.with_suffix(".o"))


def _link(toolchain: Toolchain, objects: Sequence[Path], folder: Path) -> None:
    exports = folder / "exports"
    exports.write_text(_EXPORTS)
    # In the folder, since nvcc hands the linker a path with a space in pieces.
    words = [*_LINK_FLAGS, *link_flags(toolchain.nvcc), f"-Xlinker=--version-script={exports.name}", "-o", LIBRARY]
    _run([toolchain.nvcc, *words, *objects], makes=folder / LIBRARY, cwd=folder)
    exports.unlink()


def _flags(source: str, toolchain: Toolchain) -> list[str]:
    names = toolchain.architectures if source.endswith(".cu") else ()
    return [*_FLAGS, *(f"-gencode=arch={name.replace('sm_', 'compute_')},code={name}" for name in names)]


def _key(source: str, root: Path, toolchain: Toolchain) -> str:
    """Digest of all that the object of `source` depends on: its own text, our headers, flags and versions."""
    texts = {source: (root / source).read_text()}
    todo = [source]
    while todo:
        for name in _OWN_INCLUDE.findall(texts[todo.pop()]):
            if name not in texts:
                texts[name] = (root / name).read_text()
                todo.append(name)
    parts = [part for name in sorted(texts) for part in (name, texts[name])]
    versions = toolchain.versions()
    parts.append(versions["nvcc"])
    # A source that sees neither NCCL nor XLA is not compiled again for another version of them.
    if any("nccl" in text for text in texts.values()):
        parts.append(versions["nccl"])
    if any("xla/ffi/" in text for text in texts.values()):
        parts.append(versions["xla_ffi"])
    return _digest(*_flags(source, toolchain), *parts)


def _sources() -> tuple[dict[str, list[str]], Path]:
    """The lists of build/sources.bzl, and the folder that their paths start from: in a wheel the package itself."""
    package = Path(__file__).resolve().parent
    for root in (package, package.parent):
        listing = root / "xla_ffi/build/sources.bzl"
        if listing.is_file():
            return {name: value for name, value in runpy.run_path(str(listing)).items() if name.isupper()}, root
    raise BuildError(f"no xla_ffi/build/sources.bzl in {package} or above it: install topoep_jax again")


def _nvidia_folders() -> list[Path]:
    """Folders of the namespace package that NVIDIA's Python packages install into."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _find_nccl() -> Path:
    for folder in _nvidia_folders():
        if (folder / "nccl/include/nccl.h").is_file():
            return folder / "nccl/include"
    raise BuildError("no NCCL headers: install nvidia-nccl-cu13 (with CUDA 12: nvidia-nccl-cu12)")


def _find_xla() -> Path:
    if importlib.util.find_spec("jaxlib") is None:
        raise BuildError("no XLA FFI headers: install jax, or pass --xla-include with the folder of its headers")
    import jax.ffi

    return Path(jax.ffi.include_dir())


def _architectures_of_gpus() -> tuple[str, ...]:
    """The architectures of the GPUs that the driver shows; without a driver the default."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (DEFAULT_ARCHITECTURE,)
    query = subprocess.run(
        [tool, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    found = {(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)$", query.stdout, re.MULTILINE)}
    usable = sorted(capability for capability in found if capability >= (9, 0))
    if found and not usable:
        have = ", ".join(_dotted(capability) for capability in sorted(found))
        raise BuildError(f"the kernels need a GPU of compute capability 9.0 or newer, and this machine has {have}")
    return tuple(f"sm_{major}{minor}" for major, minor in usable) or (DEFAULT_ARCHITECTURE,)


def _macros(header: Path, *names: str) -> tuple[int, ...]:
    text = header.read_text()
    values = [re.search(rf"^#define\s+{name}\s+(\d+)", text, re.MULTILINE) for name in names]
    return tuple(int(value[1]) if value else 0 for value in values)


def _run(
    command: Sequence[str | Path], *, makes: Path | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    try:
        result = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, cwd=cwd)
    except OSError as error:
        raise BuildError(f"{words[0]} does not start ({error}): install {PACKAGES}, or set CUDA_HOME") from error
    if result.returncode or (makes is not None and not makes.is_file()):
        failed = f"failed ({result.returncode})" if result.returncode else f"says it did well, but made no {makes}"
        raise BuildError(f"{' '.join(words)}\n{failed}:\n{result.stdout}{result.stderr}")
    return result


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _flat(source: str) -> str:
    return source.removeprefix("xla_ffi/").replace("/", ".")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main() -> None:
    """Builds the library, names its folder and what it was built with; --out copies the folder."""
    parser = argparse.ArgumentParser(description="Builds topoep_jax's CUDA library.")
    parser.add_argument("--arch", nargs="+", default=(), help="as sm_90 (default: this machine's GPUs, else sm_90)")
    parser.add_argument("--nccl-include", type=Path, help="folder of nccl.h (default: of the installed package)")
    parser.add_argument("--xla-include", type=Path, help="folder of xla/ffi (default: jax.ffi.include_dir())")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--out", type=Path, help="copies library, PTX and reports to this folder")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        toolchain = find(args.arch, nccl_include=args.nccl_include, xla_include=args.xla_include, strict=args.strict)
        folder = build(toolchain)
        if args.out:
            folder = Path(shutil.copytree(folder, args.out, dirs_exist_ok=True))
    except (BuildError, OSError) as error:
        sys.exit(f"error: {error}")
    _log.info("%s: %s, %s", folder / LIBRARY, " ".join(toolchain.architectures), toolchain.versions())


if __name__ == "__main__":
    main()
