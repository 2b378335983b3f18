"""The CUDA library's build, with a compiler that only keeps a journal: what is found, compiled, kept and said."""

import concurrent.futures
import errno
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import kernel_table
from topoep_jax import _cuda, _cuda_build

FAKE_NVCC = """#!{python}
import pathlib, sys, time
args = sys.argv[1:]
if "--version" in args:
    sys.exit(print("Cuda compilation tools, release 13.0, V{version}"))
out = pathlib.Path(args[args.index("-o") + 1])
with open({journal!r}, "a") as journal:
    journal.write(chr(9).join(args) + chr(10))
if "-c" in args:
    source = pathlib.Path(args[args.index("-c") + 1])
    if "broken" in source.read_text():
        sys.exit("a.cu(1): error: broken is undefined")
    if "lost" in source.read_text():
        sys.exit(0)
    if "doubtful" in source.read_text():
        print("a.cu(1): warning #177-D: doubtful was never referenced")
    pathlib.Path(args[args.index("--keep-dir") + 1], "a.ptx").write_text(".version 9.0\\n.target sm_90\\n")
    time.sleep(0.2)
else:
    [script] = [word.split("=")[2] for word in args if word.startswith("-Xlinker=--version-script=")]
    for piece in script.replace(",", " ").split():
        if "Topoep" not in pathlib.Path(piece).read_text():
            sys.exit("ld: a script without our names")
out.write_text("built")
"""

SOURCES = {
    "xla_ffi/plan/solver.cc": '#include "xla_ffi/plan/solver.h"\n',
    "xla_ffi/plan/solver.h": "",
    "xla_ffi/plan/plan.cu": '#include "xla/ffi/api/ffi.h"\n',
    "xla_ffi/transfer/transfer.cu": '#include <nccl_device.h>\n#include "xla_ffi/transfer/pull.h"\n',
    "xla_ffi/transfer/pull.h": '#include "xla_ffi/plan/solver.h"\n',
}


class Workshop:
    """A folder with a small source tree, headers, a cache and the compiler."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.write(SOURCES)
        self.write({"xla/xla/ffi/api/ffi.h": "", "nccl/nccl_device.h": ""})
        self.set_versions("13.0.88", "2.32.3", "0.3")
        lists = {
            "PROBLEM_SRCS": [],
            "SHARED_SRCS": ["xla_ffi/plan/solver.cc"],
            "CUDA_SRCS": ["xla_ffi/plan/plan.cu", "xla_ffi/transfer/transfer.cu"],
        }
        monkeypatch.setattr(_cuda_build, "_sources", lambda: (lists, folder))
        monkeypatch.setenv("TOPOEP_CUDA_CACHE", str(folder / "cache"))
        monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
        monkeypatch.setattr(_cuda_build.shutil, "which", lambda name: None)

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def set_versions(self, nvcc: str, nccl: str, xla: str) -> None:
        script = FAKE_NVCC.format(python=sys.executable, version=nvcc, journal=str(self.journal))
        self.write({"cuda/bin/nvcc": script})
        (self.folder / "cuda/bin/nvcc").chmod(0o755)
        major, minor, patch = nccl.split(".")
        self.write(
            {
                "nccl/nccl.h": f"#define NCCL_MAJOR {major}\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH {patch}\n",
                "xla/xla/ffi/api/c_api.h": "#define XLA_FFI_API_MAJOR {}\n#define XLA_FFI_API_MINOR {}\n".format(
                    *xla.split(".")
                ),
            }
        )
        _cuda_build.nvcc_version.cache_clear()

    def find(self, *architectures: str, strict: bool = False) -> _cuda_build.Toolchain:
        return _cuda_build.find(
            architectures, nccl_include=self.folder / "nccl", xla_include=self.folder / "xla", strict=strict
        )

    def build(self, *architectures: str, strict: bool = False) -> tuple[Path, set[str]]:
        """Folder of the library, and the sources that were compiled for it."""
        self.journal.write_text("")
        folder = _cuda_build.build(self.find(*architectures, strict=strict))
        return folder, {Path(source).name for source in self.compiled()}

    def compiled(self) -> list[str]:
        """The sources in the compiler's journal."""
        lines = [line.split("\t") for line in self.journal.read_text().splitlines()]
        return [words[words.index("-c") + 1] for words in lines if "-c" in words]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    folder = tmp_path / "a b"  # the linker sees paths in pieces
    folder.mkdir()
    return Workshop(folder, monkeypatch)


ALL = {"solver.cc", "plan.cu", "transfer.cu"}


def link_line(workshop: Workshop) -> list[str]:
    [line] = [line.split("\t") for line in workshop.journal.read_text().splitlines() if "-shared" in line]
    return line


def test_the_compiler_is_told_where_its_package_has_its_libraries(workshop: Workshop) -> None:
    """Its own profile says lib64, where packages 13.0 and 13.1 have lib. A local toolkit with lib64 needs no help."""
    workshop.build()
    assert not [word for word in link_line(workshop) if word.startswith("-L")]
    workshop.write({"cuda/lib/libcudart_static.a": "", "xla_ffi/plan/plan.cu": "// again"})
    workshop.build()
    assert f"-L{workshop.folder / 'cuda/lib'}" in link_line(workshop)


@pytest.mark.parametrize("installed", [False, True])
def test_headers_of_another_release_than_the_compiler_are_refused_before(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    workshop.set_versions("13.5.37", "2.32.3", "0.3")
    header = "cuda/include/cuda_runtime_api.h"
    workshop.write({header: "#define CUDART_VERSION  13050\n"})
    workshop.find()
    workshop.write({header: "#define CUDART_VERSION  13000\n"})
    way = "point CUDA_HOME to a toolkit whose parts belong together"
    if installed:
        monkeypatch.setattr(_cuda_build, "_nvidia_folders", lambda: [workshop.folder])
        names = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
        way = f"pip install {' '.join(f'.{name}==13[.]0[.][*].' for name in names)}, or point CUDA_HOME"
    with pytest.raises(_cuda_build.BuildError, match=rf"nvcc is of CUDA 13.5, but the runtime .* of 13.0: .*{way}"):
        workshop.find()


def test_only_what_changed_is_compiled_again(workshop: Workshop) -> None:
    first, compiled = workshop.build()
    assert compiled == ALL
    assert {path.name for path in first.iterdir()} == {
        _cuda_build.LIBRARY,
        *(f"{name}.{suffix}" for name in ("plan.solver.cc", "plan.plan.cu", "transfer.transfer.cu") for suffix in
          ("log", "sm_90.ptx")),
    }  # fmt: skip
    assert workshop.build() == (first, set())
    workshop.write({"xla_ffi/plan/solver.h": "// a header of two sources, of one through another header"})
    second, compiled = workshop.build()
    assert second != first and compiled == {"solver.cc", "transfer.cu"}
    workshop.set_versions("13.0.88", "2.33.0", "0.3")
    assert workshop.build()[1] == {"transfer.cu"}
    workshop.set_versions("13.0.88", "2.33.0", "0.5")
    assert workshop.build()[1] == {"plan.cu"}
    workshop.set_versions("13.1.0", "2.33.0", "0.5")
    assert workshop.build()[1] == ALL
    assert workshop.build("sm_100")[1] == {"plan.cu", "transfer.cu"}


def test_the_compilers_words_are_in_the_error(workshop: Workshop) -> None:
    workshop.write({"xla_ffi/plan/plan.cu": "broken"})
    with pytest.raises(_cuda_build.BuildError, match=r"a\.cu\(1\): error: broken is undefined"):
        workshop.build()
    workshop.write({"xla_ffi/plan/plan.cu": ""})
    assert workshop.build()[1] == {"plan.cu"}, "what compiled beside it is kept"


def test_strict_builds_refuse_warnings_also_of_earlier_builds(workshop: Workshop) -> None:
    workshop.write({"xla_ffi/plan/plan.cu": "doubtful"})
    workshop.build()
    assert "-Werror=all-warnings" not in workshop.journal.read_text()
    with pytest.raises(_cuda_build.BuildError, match="doubtful was never referenced"):
        workshop.build(strict=True)
    workshop.write({"xla_ffi/plan/plan.cu": ""})
    assert workshop.build(strict=True)[1] == {"plan.cu"}
    assert "-Werror=all-warnings" in workshop.journal.read_text()


def test_a_source_that_changes_under_the_compiler_is_not_kept(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one = _cuda_build._compile

    def meddle(source: str, *args: object) -> None:
        compile_one(source, *args)
        if source.endswith("plan.cu"):
            workshop.write({source: "// edited"})

    with monkeypatch.context() as patch:
        patch.setattr(_cuda_build, "_compile", meddle)
        with pytest.raises(_cuda_build.BuildError, match=r"plan\.cu or a header of it changed"):
            workshop.build()
    assert workshop.build()[1] == {"plan.cu"}


def test_builds_take_turns(workshop: Workshop) -> None:
    toolchain = workshop.find()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: _cuda_build.build(toolchain), range(4)))
    assert len(folders) == 1
    assert len(workshop.compiled()) == len(ALL)


def test_what_is_missing_or_too_old_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.set_versions("12.3.107", "2.32.3", "0.3")
    with pytest.raises(
        _cuda_build.BuildError, match=r"CUDA 12\.3\.107, and 12\.4 or newer is needed.*nvidia-cuda-nvcc"
    ):
        workshop.find()
    workshop.set_versions("13.0.88", "2.27.7", "0.3")
    with pytest.raises(_cuda_build.BuildError, match=r"NCCL 2\.27\.7, and 2\.32\.3 or newer is needed"):
        workshop.find()
    (workshop.folder / "nccl/nccl_device.h").unlink()
    with pytest.raises(_cuda_build.BuildError, match=r"no nccl_device\.h in .*nvidia-nccl-cu13"):
        workshop.find()
    monkeypatch.setenv("CUDA_HOME", str(workshop.folder))
    with pytest.raises(_cuda_build.BuildError, match="no bin/nvcc in CUDA_HOME="):
        workshop.find()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(_cuda_build, "_nvidia_folders", list)
    with pytest.raises(_cuda_build.BuildError, match=r"no nvcc: install nvidia-cuda-nvcc, nvidia-cuda-cccl"):
        workshop.find()
    with pytest.raises(_cuda_build.BuildError, match="no NCCL headers"):
        _cuda_build._find_nccl()


def test_a_compiler_that_does_not_start_or_makes_nothing(workshop: Workshop) -> None:
    workshop.write({"xla_ffi/plan/plan.cu": "lost"})
    with pytest.raises(_cuda_build.BuildError, match=r"(?s)nvcc .*plan\.cu.*says it did well, but made no .*built\.o"):
        workshop.build()
    toolchain = workshop.find()
    (workshop.folder / "cuda/bin/nvcc").chmod(0o644)
    with pytest.raises(
        _cuda_build.BuildError, match=r"bin/nvcc does not start \(.*Permission denied.*: install nvidia"
    ):
        _cuda_build.build(toolchain)


def no_locks(*args: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_cache_that_cannot_be_used_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "set TOPOEP_CUDA_CACHE to a folder on a local disk that can be written"
    with monkeypatch.context() as patch:
        patch.setattr(_cuda_build.fcntl, "flock", no_locks)
        with pytest.raises(_cuda_build.BuildError, match=rf"a b/cache cannot be used \(.*not implemented.*{advice}"):
            workshop.build()
    monkeypatch.setenv("TOPOEP_CUDA_CACHE", str(workshop.journal / "below a file"))
    with pytest.raises(_cuda_build.BuildError, match=rf"below a file cannot be used .*{advice}"):
        workshop.build()
    options = ["--xla-include", str(workshop.folder / "xla"), "--nccl-include", str(workshop.folder / "nccl")]
    monkeypatch.setattr(sys, "argv", ["_cuda_build", *options])
    with pytest.raises(SystemExit, match=f"^error: the CUDA library's cache .*{advice}"):
        _cuda_build.main()
    monkeypatch.setenv("TOPOEP_CUDA_CACHE", str(workshop.folder / "cache"))
    monkeypatch.setattr(sys, "argv", ["_cuda_build", *options, "--out", str(workshop.journal / "below a file")])
    with pytest.raises(SystemExit, match=r"^error: .*below a file"):
        _cuda_build.main()
    monkeypatch.delenv("TOPOEP_CUDA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_cuda_build.Path, "home", homeless)
    with pytest.raises(_cuda_build.BuildError, match=rf"Could not determine home directory.*{advice}"):
        workshop.build()


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_may_be_named_from_where_one_stands(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.folder)
    monkeypatch.setenv("TOPOEP_CUDA_CACHE", "near")
    monkeypatch.setenv("CUDA_HOME", "cuda")
    folder, compiled = workshop.build()
    assert compiled == ALL and (folder / _cuda_build.LIBRARY).is_file() and folder.is_relative_to(workshop.folder)


def test_a_build_that_failed_is_not_tried_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_load", functools.cache(_cuda._load.__wrapped__))  # the session's library stays
    tries = []

    def find() -> _cuda_build.Toolchain:
        tries.append("find")
        raise _cuda_build.BuildError("no nvcc: install something")

    monkeypatch.setattr(_cuda_build, "find", find)
    for _ in range(2):
        with pytest.raises(ImportError, match=r"(?s)CUDA library: no nvcc: install something.*start it anew"):
            _cuda.load()
    assert tries == ["find"]


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [("9.0\n9.0\n", ("sm_90",)), ("9.0\n10.0\n", ("sm_90", "sm_100")), ("8.0\n9.0\n", ("sm_90",)), ("", ("sm_90",))],
)
def test_architectures_are_those_of_the_gpus(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capabilities: str, architectures: tuple[str, ...]
) -> None:
    tool = workshop.folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(_cuda_build.shutil, "which", lambda name: str(tool))
    assert workshop.find().architectures == architectures
    tool.write_text("#!/bin/sh\necho 8.0\n")
    with pytest.raises(_cuda_build.BuildError, match=r"compute capability 9\.0 or newer, and this machine has 8\.0"):
        workshop.find()


def test_the_package_imports_with_no_cuda_library() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(["nvidia", "jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin"]))
import topoep_jax
from topoep_jax import _native
assert not {"topoep_jax._cuda", "topoep_jax._cuda_build"} & set(sys.modules), "imported"
loaded = [name for name in open("/proc/self/maps").read().split() if "libcud" in name or "libnccl" in name]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


LOG = """ptxas info    : 775 bytes gmem
ptxas info    : Compiling entry function '_ZN6topoep12_GLOBAL__N_14PullILi4EEEvPi' for 'sm_90'
ptxas info    : Function properties for _ZN6topoep12_GLOBAL__N_14PullILi4EEEvPi
    136 bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 152 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for _ZN6topoep3gin3GetEv
    0 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Compiling entry function '_ZN6topoep4PushEPi' for 'sm_90'
ptxas info    : Function properties for _ZN6topoep4PushEPi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers
"""

PTX = """
.extern .shared .align 128 .b8 _ZN6topoep6sharedE[];
.visible .entry _ZN6topoep12_GLOBAL__N_14PullILi4EEEvPi(
.param .u64 a
)
.maxntid 256, 1, 1
{
mov.u32 %r1, _ZN6topoep6sharedE;
}
.entry _ZN6topoep4PushEPi(
.param .u64 a
)
{
ret;
}
"""


def test_the_kernel_table_tells_what_spills(tmp_path: Path) -> None:
    log = tmp_path / "transfer.log"
    log.write_text(LOG.format(stores=4))
    (tmp_path / "transfer.sm_90.ptx").write_text(PTX)
    rows = kernel_table.kernels([tmp_path])
    assert rows == [
        kernel_table.Kernel("topoep::Pull<4>", "sm_90", 256, 80, 152, 20, 32, 128, kernel_table.DYNAMIC_SHARED),
        kernel_table.Kernel("topoep::Push", "sm_90", 0, 26, 0, 0, 0, 0, 0),
    ]
    text = kernel_table.render(rows, "13.0.88")
    assert kernel_table.read(text) == rows and not kernel_table.faults(rows, kernel_table.read(text))
    assert kernel_table.faults(rows, rows[1:]) == ["topoep::Pull<4> for sm_90 is not in the table"]
    assert kernel_table.faults(rows[1:], rows) == ["topoep::Pull<4> for sm_90 is in the table, but not built"]
    assert kernel_table.faults([], rows) == ["ptxas reported no kernel: the build was not made with -Xptxas -v"]
    log.write_text(LOG.format(stores=12))
    [fault] = kernel_table.faults(kernel_table.kernels([tmp_path]), rows)
    assert "spills 28 + 32 bytes (stores + loads), and 20 + 32 in the table" in fault


def test_the_kernel_table_knows_the_ring_of_bulk_copies() -> None:
    """On the host, where only the layout of its memory means something."""
    source = f"""
#include <cstddef>
#define __device__
static struct {{ int x; }} threadIdx;
size_t __cvta_generic_to_shared(const void*);
size_t __cvta_generic_to_global(const void*);
#include "xla_ffi/transfer/bulk_ring.cuh"
static_assert(sizeof(topoep::BulkRing::Memory) == {kernel_table.DYNAMIC_SHARED}, "");
"""
    command = ["c++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-I", str(Path(__file__).parent.parent.parent), "-"]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
