"""Table of what each CUDA kernel takes of a multiprocessor: docs/kernels.md, written or checked.

    python topoep_jax/_cuda_build.py --arch sm_90 --out build/cuda/sm_90
    python tools/kernel_table.py build/cuda/*            # writes the table
    python tools/kernel_table.py build/cuda/* --check    # fails where a kernel spills more, or is new

Registers, stack, spills and static shared memory are what ptxas reports (-Xptxas -v), threads per block the launch
bound in the PTX beside. How much dynamic shared memory a launch asks for stands in no output of the compiler; the PTX
tells which kernels take it, and tests/cuda/build_test.py that the number here is the source's. Registers may move with
the compiler; a kernel that starts to spill is a fault.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "docs/kernels.md"

HEADER = """\
# Registers, stack and shared memory of each kernel

Written by `make kernel-table`, from what the compiler reports. CI fails when a kernel spills more than here, when a new
one is not here, or when one that is here is no longer built. Compiled with nvcc {nvcc}; CI builds with no other
version. Nothing here was run.

- Registers, stack and spills are per thread, shared memory is per block; all but registers are bytes. To a kernel's own
  spills those of the functions that it calls are added.
- Threads are the launch bound, which every launch uses in full. It caps the registers: 65536 of a multiprocessor, over
  512 threads, are 128 for each; over 256 threads 255 are allowed.
- Dynamic shared memory is the ring of bulk copies: `sizeof(BulkRing::Memory)` of `xla_ffi/transfer/bulk_ring.cuh`.
  A multiprocessor of these GPUs has 228 KiB, so at most two such blocks share one.
- **Why the planner's kernels spill**: a block of 512 threads makes a whole candidate plan. Its stages are functions
  that are called, not inlined (`TOPOEP_STAGE`), and share 128 registers a thread with what their callers keep over
  the call; the larger stages need more. Fewer threads would have more registers each, and share every step among
  fewer. What the spills cost has not been measured.

"""
COLUMNS = (
    "kernel",
    "arch",
    "threads",
    "registers",
    "stack",
    "spill stores",
    "spill loads",
    "static shared",
    "dynamic shared",
)

DYNAMIC_SHARED = 98432
"""Bytes of `BulkRing::Memory`, which every launch of a kernel with dynamic shared memory asks for."""

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'\n")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(\d+) bytes smem")
_PTX_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+(\w+)\(", re.MULTILINE)
_PTX_THREADS = re.compile(r"^\s*\.maxntid\s+(\d+)", re.MULTILINE)
_PTX_DYNAMIC = re.compile(r"^\s*\.extern\s+\.shared\b.*\s(\w+)\[\];", re.MULTILINE)


@dataclasses.dataclass(frozen=True, order=True)
class Kernel:
    """One kernel for one architecture; sizes in bytes."""

    name: str
    arch: str
    threads: int
    """Per block; 0 where the source has no launch bound."""
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int


def kernels(folders: list[Path]) -> list[Kernel]:
    """The kernels of the .log and .ptx files in `folders`, sorted by name."""
    found = []
    for folder in folders:
        launches = {symbol: launch for ptx in sorted(folder.glob("*.ptx")) for symbol, launch in _launches(ptx).items()}
        for log in sorted(folder.glob("*.log")):
            # [text before, symbol, architecture, text up to the next, ..]
            parts = _ENTRY.split(log.read_text())[1:]
            for symbol, arch, report in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                found.append((symbol, arch, report, launches.get(symbol, (0, 0))))
    names = demangled([symbol for symbol, *_ in found])
    return sorted(kernel(name, *rest) for name, (_, *rest) in zip(names, found, strict=True))


def _launches(ptx: Path) -> dict[str, tuple[int, int]]:
    """The launches of each kernel in a file of PTX: threads per block, and bytes of dynamic shared memory."""
    text = ptx.read_text()
    dynamic = _PTX_DYNAMIC.findall(text)
    # [text before, symbol, text up to the next, ..]
    parts = _PTX_ENTRY.split(text)[1:]
    launches = {}
    for symbol, body in zip(parts[::2], parts[1::2], strict=True):
        threads = _PTX_THREADS.search(body)
        takes = any(re.search(rf"\b{name}\b", body) for name in dynamic)
        launches[symbol] = (int(threads[1]) if threads else 0, DYNAMIC_SHARED if takes else 0)
    return launches


def kernel(name: str, arch: str, report: str, launch: tuple[int, int]) -> Kernel:
    """Reads a kernel from ptxas' lines about it and the functions that it calls; their spills are added up."""
    spills = [tuple(map(int, pair)) for pair in _SPILLS.findall(report)]
    stores, loads = map(sum, zip(*spills, strict=True))
    registers, stack, shared = (
        int(match[1]) if match else 0
        for match in (_REGISTERS.search(report), _STACK.search(report), _SHARED.search(report))
    )
    return Kernel(name, arch, launch[0], registers, stack, stores, loads, shared, launch[1])


def demangled(symbols: list[str]) -> list[str]:
    """The name as `topoep::Pull<4>`: without return type, parameters and anonymous namespaces."""
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    names = []
    for line in text.splitlines():
        name = line.replace("(anonymous namespace)::", "").partition("(")[0]
        names.append(re.sub(r"^void ", "", name))
    return names


def render(rows: list[Kernel], nvcc: str) -> str:
    """The table as Markdown; `nvcc` is the compiler's version."""
    lines = [COLUMNS, ("---", "---", *["---:"] * (len(COLUMNS) - 2))]
    lines += [(f"`{row.name}`", *map(str, dataclasses.astuple(row)[1:])) for row in rows]
    return HEADER.format(nvcc=nvcc) + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(text: str) -> list[Kernel]:
    """What `render` wrote."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [Kernel(name.strip("`"), arch, *map(int, sizes)) for name, arch, *sizes in cells]


def faults(rows: list[Kernel], table: list[Kernel]) -> list[str]:
    """What makes the check fail, in words."""
    known = {(row.name, row.arch): row for row in table}
    architectures = {row.arch for row in rows}
    found = [] if rows else ["ptxas reported no kernel: the build was not made with -Xptxas -v"]
    for row in rows:
        old = known.pop((row.name, row.arch), None)
        if old is None:
            found.append(f"{row.name} for {row.arch} is not in the table")
        elif row.spill_stores > old.spill_stores or row.spill_loads > old.spill_loads:
            found.append(
                f"{row.name} for {row.arch} spills {row.spill_stores} + {row.spill_loads} bytes (stores + loads), and"
                f" {old.spill_stores} + {old.spill_loads} in the table"
            )
    found += [f"{name} for {arch} is in the table, but not built" for name, arch in known if arch in architectures]
    return found


def compiler_of(folder: Path) -> str:
    """Version of the compiler, which names itself in PTX."""
    ptx = next(iter(sorted(folder.glob("*.ptx"))), None)
    version = re.search(r"release [\d.]+, V([\d.]+)", ptx.read_text()) if ptx else None
    return version[1] if version else "of unknown version"


def main() -> None:
    """Writes or checks the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="what _cuda_build.py --out wrote, of one compiler")
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    args = parser.parse_args()
    rows = kernels(args.folders)
    if not args.check:
        TABLE.write_text(render(rows, compiler_of(args.folders[0])))
        return
    found = faults(rows, read(TABLE.read_text()))
    if found:
        sys.exit("\n".join([*found, f"if that is meant, write {TABLE.name} again: make kernel-table"]))
    print(f"{len(rows)} kernels, none spills more than in {TABLE.name}")


if __name__ == "__main__":
    main()
