"""Headers of the installed Python packages, found at load time: nothing is downloaded."""

_PROBE = """
import sysconfig, jax.ffi, pybind11
print(jax.ffi.include_dir())
print(pybind11.get_include())
print(sysconfig.get_paths()["include"])
"""

_HEADERS = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

[
    cc_library(name = name, hdrs = glob([name + "/**/*.h"]), includes = [name])
    for name in ["xla_ffi", "pybind11", "python"]
]
"""

def _python_headers_impl(ctx):
    python = ctx.os.environ.get("PYTHON") or str(ctx.which("python3"))
    probe = ctx.execute([python, "-c", _PROBE])
    if probe.return_code:
        fail("%s must import jax and pybind11; set PYTHON to one that does: %s" % (python, probe.stderr))
    for name, path in zip(["xla_ffi", "pybind11", "python"], probe.stdout.splitlines()):
        ctx.symlink(path, name)
    ctx.file("BUILD.bazel", _HEADERS)

python_headers = repository_rule(
    implementation = _python_headers_impl,
    environ = ["PYTHON"],
    local = True,
)
