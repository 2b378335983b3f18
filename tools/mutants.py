"""Leaves out one barrier, or breaks one rule of the transfer protocol, and shows that a test notices: make mutants.

    python tools/mutants.py                    every mutant; writes results/full/mutants.json
    python tools/mutants.py --sample 5         a few of them, and whether the JSON has a row for each there is

The sites are the calls of Sync() in the sources of the planner, of the transfers and of the team of threads. The same
bodies run on a team whose lanes pass the chosen site without waiting (tests/cc/mutant_team.h), under ThreadSanitizer.
tests/cc/mutant_transfer.cc says what its faults are. Exits with an error where a mutant survives or is never reached.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results/full/mutants.json"
SOURCES = ("xla_ffi/plan/**/*.h", "xla_ffi/plan/*.cc", "xla_ffi/transfer/*.h", "xla_ffi/team/thread_team.h")
PLAN, TRANSFER = "mutant_plan", "mutant_transfer"

RACE_STATUS = 66
NEVER_REACHED_STATUS = 3
TIMEOUT_S = 300
KILLERS = {RACE_STATUS: "ThreadSanitizer", 1: "wrong result"}
SURVIVED, NEVER_REACHED = "survived", "never reached"

_SYNC = re.compile(r"(?:\.|->)\s*Sync\(\)")
_FUNCTION = re.compile(r"^(?:  )?(?:TOPOEP_BODY )?[\w:<>*&]+(?: [\w:<>*&]+)* (\w+)\(.*[^;]$")


@dataclasses.dataclass(frozen=True)
class Site:
    """One call of Sync(): the nth of its file, which survives changes elsewhere, and where it stands now."""

    file: str
    nth: int
    line: int
    function: str

    @property
    def name(self) -> str:
        """The name as the programs know it."""
        return f"{self.file}:{self.line}"

    @property
    def key(self) -> tuple[str, int]:
        """The key as the JSON knows it."""
        return self.file, self.nth

    @property
    def program(self) -> str:
        """Whose workload comes to it."""
        return TRANSFER if self.file.startswith("xla_ffi/transfer/") else PLAN


def sites_of(file: str, text: str) -> list[Site]:
    """The barriers of one source, which may hold comments but no Sync() in a string."""
    sites = []
    function = ""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0]
        if match := _FUNCTION.match(code):
            function = match[1]
        for _ in _SYNC.finditer(code):
            sites.append(Site(file, len(sites) + 1, number, function))
    lines = [site.line for site in sites]
    if len(set(lines)) < len(lines):
        raise SystemExit(f"{file}: two Sync() in one line cannot be told apart")
    return sites


def find_sites() -> list[Site]:
    """Every barrier of the sources, in order."""
    paths = sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)})
    return [site for path in paths for site in sites_of(path.relative_to(ROOT).as_posix(), path.read_text())]


def build(folder: Path) -> None:
    """Builds the mutant programs with ThreadSanitizer."""
    bin_of_python = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=str(bin_of_python)) or "cmake"
    configure = [cmake, "-S", str(ROOT / "xla_ffi"), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DTOPOEP_MUTANTS=ON", "-DTOPOEP_SANITIZE=thread", f"-DPython_EXECUTABLE={sys.executable}"]
    if ninja := shutil.which("ninja", path=str(bin_of_python)):
        configure.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
    for command in (configure, [cmake, "--build", str(folder), "--target", PLAN, TRANSFER]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")


def run(program: Path, mutant: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, or to ThreadSanitizer's first report; times out after TIMEOUT_S."""
    environment = {"TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE_STATUS}"}
    return subprocess.run([program, mutant], capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)


def list_places(program: Path) -> set[str]:
    """What the workload of a program, without a mutant, comes to; nothing may go wrong then."""
    done = run(program, "--list")
    if done.returncode != 0:
        raise SystemExit(f"{program.name} fails without a mutant:\n{done.stdout[-4000:]}{done.stderr[-8000:]}")
    return {line.split()[0] for line in done.stdout.splitlines()}


def kill(folder: Path, program: str, mutant: str) -> dict[str, object]:
    """What gives the mutant away, and after how many seconds."""
    start = time.monotonic()
    try:
        status = run(folder / program, mutant).returncode
    except subprocess.TimeoutExpired:
        verdict = "hang"
    else:
        names = {**KILLERS, 0: SURVIVED, NEVER_REACHED_STATUS: NEVER_REACHED}
        verdict = "crash" if status < 0 else names.get(status, "")
        if not verdict:
            raise SystemExit(f"{program} {mutant} ended with status {status}")
    return {"killed_by": verdict, "seconds": round(time.monotonic() - start, 1)}


def describe(folder: Path, mutant: Site | str) -> dict[str, object]:
    """Runs one mutant; the row of the JSON."""
    if isinstance(mutant, str):
        return {"fault": mutant, **kill(folder, TRANSFER, mutant)}
    return {**dataclasses.asdict(mutant), **kill(folder, mutant.program, mutant.name)}


def check_results(sites: Sequence[Site], faults: Sequence[str]) -> list[str]:
    """What the committed JSON lacks, or has too much."""
    committed = json.loads(RESULTS.read_text())
    rows = {(row["file"], row["nth"]) for row in committed["syncs"]}
    wrong = [f"{key} is no Sync() any more" for key in sorted(rows - {site.key for site in sites})]
    wrong += [f"{site.name} has no row" for site in sites if site.key not in rows]
    if len(committed["syncs"]) != len(sites) or len(committed["faults"]) != len(faults):
        wrong.append(
            f"{len(committed['syncs'])} barriers and {len(committed['faults'])} faults have rows, "
            f"but there are {len(sites)} and {len(faults)}"
        )
    wrong += [f"{row} survived" for row in committed["syncs"] + committed["faults"] if not is_killed(row)]
    return [f"{RESULTS.relative_to(ROOT)}: {text}; run make mutants" for text in wrong]


def is_killed(row: dict[str, object]) -> bool:
    """Whether something gave the mutant of a row away."""
    return row["killed_by"] not in (SURVIVED, NEVER_REACHED)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/mutants", help="where the programs are built")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--sample", type=int, help="only so many, evenly spread, and no JSON is written")
    args = parser.parse_args()
    sites = find_sites()
    build(args.build)
    reached = {program: list_places(args.build / program) for program in (PLAN, TRANSFER)}
    faults = sorted(place for place in reached[TRANSFER] if not place.startswith("xla_ffi/"))
    known = {site.name for site in sites}
    unknown = sorted(p for places in reached.values() for p in places if p.startswith("xla_ffi/") and p not in known)
    if unknown:
        raise SystemExit(f"barriers that the sources do not seem to have: {unknown}")

    mutants: list[Site | str] = [*sites, *faults]
    if args.sample:
        mutants = [mutants[i * len(mutants) // args.sample] for i in range(args.sample)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda mutant: describe(args.build, mutant), mutants))
    for mutant, row in zip(mutants, rows, strict=True):
        name = mutant if isinstance(mutant, str) else f"{mutant.name} {mutant.function}()"
        print(f"{name:75} {row['killed_by']:16} {row['seconds']:6} s")
    alive = [row for row in rows if not is_killed(row)]
    print(f"{len(rows)} mutants, of {len(sites)} barriers and {len(faults)} faults; {len(alive)} alive")
    wrong = []
    if args.sample:
        wrong = check_results(sites, faults)
    else:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        table = {"syncs": [row for row in rows if "file" in row], "faults": [row for row in rows if "fault" in row]}
        RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if alive or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
