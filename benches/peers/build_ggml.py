"""Compiles ggml's C row functions for this machine, from the source package of llama-cpp-python on PyPI.

    build_ggml.py LIBRARY.so

Only ggml-quants.c, with `cc -O3 -march=native`, and of it only what the dequantize_row_* functions need. CC chooses another
compiler, CFLAGS other flags.
"""
import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"  # ggml 0.25.3

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("library", type=Path)
a = parser.parse_args()
a.library.parent.mkdir(parents=True, exist_ok=True)
# What a package needs in order to say what it is would be built as well, were --no-binary not for this one alone.
with tempfile.TemporaryDirectory(dir=a.library.parent) as folder:
    folder = Path(folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--no-binary", "llama-cpp-python", "--dest", folder, PACKAGE],
        check=True,
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        wanted = [member for member in archive if "/vendor/llama.cpp/ggml/" in member.name and member.name.endswith((".c", ".h"))]
        archive.extractall(folder, members=wanted, filter="data")
    ggml = next(folder.glob("*/vendor/llama.cpp/ggml"))
    exported = folder / "exported"
    exported.write_text("{ global: dequantize_row_*; local: *; };\n")
    unfinished = folder / "ggml.so"
    subprocess.run(
        [*shlex.split(os.environ.get("CC", "cc")), "-std=gnu11", *shlex.split(os.environ.get("CFLAGS", "-O3 -march=native")),
         "-fPIC", "-shared", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-Wl,-z,defs",
         f"-Wl,--version-script={exported}", "-D_GNU_SOURCE", f"-I{ggml / 'include'}", f"-I{ggml / 'src'}",
         ggml / "src/ggml-quants.c", "-lm", "-o", unfinished],
        check=True,
    )
    unfinished.replace(a.library)
