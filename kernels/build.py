"""Compiles the kernels for the device: kernels/prebuilt/, byte for byte the same on every machine once they are unpacked.

    build.py            writes the artifacts and their manifest
    build.py --check    builds again, compares every byte, and looks at the machine code

Needs the packages of requirements.txt, on Linux; no GPU, no driver and no CUDA toolkit.
"""
import argparse
import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
PREBUILT = HERE / "prebuilt"
MAIN = "kernels.cu"
SOURCES = [
    MAIN, "dequant.cu", "dequant.cuh", "convert.cuh", "grids.cuh", "encode.cu", "encode.cuh", "divide.cuh", "machine.cuh"
]
# Machine code for these chips, and text that a driver compiles for later ones.
CUBINS = ["sm_80", "sm_90", "sm_100", "sm_120"]
PTX = "compute_80"
# One rounding per operation, subnormals kept: bits must be those of the CPU.
OPTIONS = ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]

# What must not be in the machine code: fused operations, flushing of subnormals, memory for what registers cannot hold.
BANNED_CODE = re.compile(r"\b[FD]FMA\w*|\.FTZ\b|\b(?:LDL|STL)\b")
BANNED_PTX = re.compile(r"\bfma\.|\.ftz\b|\b(?:ld|st)\.local\b")


class Nvrtc:
    """NVRTC of the Python package."""

    def __init__(self):
        package = find_spec("nvidia.cuda_nvrtc")
        if package is None:
            sys.exit("the package nvidia-cuda-nvrtc-cu12 is not installed; `make kernels` installs it")
        folder = Path(next(iter(package.submodule_search_locations)))
        self.library = ctypes.CDLL(str(folder / "lib" / "libnvrtc.so.12"))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def text(self, what, program):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        failed = self.call(f"nvrtcGet{what}", program, buffer)
        if failed:
            sys.exit(f"NVRTC: {self.library.nvrtcGetErrorString(failed).decode()}")
        return buffer.raw

    def compile(self, source, headers, options, want):
        """The code, and what the compiler said."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*[name.encode() for name in headers])
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, MAIN.encode(), len(headers), texts, names)
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = self.call("nvrtcCompileProgram", program, len(options), given)
        log = self.text("ProgramLog", program).rstrip(b"\0").decode()
        if failed:
            sys.exit(f"NVRTC with {' '.join(options)}: {self.library.nvrtcGetErrorString(failed).decode()}\n{log}")
        code = self.text(want, program)
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return code, log


def resources(log):
    """Registers, stack and spills per kernel, from the assembler's report."""
    pattern = re.compile(
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
    )
    return {
        m[1]: {"registers": int(m[5]), "stack_bytes": int(m[2]), "spill_bytes": int(m[3]) + int(m[4])} for m in pattern.finditer(log)
    }


def plain(ptx):
    """PTX without comments, indentation and empty lines: a seventh less."""
    lines = (line.split("//")[0].strip() for line in ptx.rstrip(b"\0").decode().splitlines())
    return ("\n".join(line for line in lines if line) + "\n").encode()


def build():
    """All artifacts by name, the manifest among them."""
    nvrtc = Nvrtc()
    texts = {name: (HERE / name).read_bytes() for name in SOURCES}
    headers = {name: text for name, text in texts.items() if name != MAIN}
    artifacts, entries = {}, []
    for architecture in CUBINS + [PTX]:
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        if architecture == PTX:
            name, (code, _) = f"{architecture}.ptx", nvrtc.compile(texts[MAIN], headers, options, "PTX")
            code, extra = plain(code), {}
        else:
            # The report does not change the code.
            name = f"{architecture}.cubin"
            code, log = nvrtc.compile(texts[MAIN], headers, options + ["--ptxas-options=-v"], "CUBIN")
            extra = {"kernels": dict(sorted(resources(log).items()))}
        artifacts[name] = code
        digest = hashlib.sha256(code).hexdigest()
        entries.append({"file": name, "architecture": architecture, "bytes": len(code), "sha256": digest, **extra})
    manifest = {
        "compiler": f"NVRTC of nvidia-cuda-nvrtc-cu12 {version('nvidia-cuda-nvrtc-cu12')}",
        "options": OPTIONS,
        "sources": {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
        "artifacts": entries,
    }
    artifacts["manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    return artifacts


def disassemble(code):
    package = find_spec("nvidia.cu13")
    if package is None:
        sys.exit("the package nvidia-cuda-nvdisasm is not installed; `make kernels` installs it")
    program = Path(next(iter(package.submodule_search_locations))) / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([program, "-c", file.name], check=True, capture_output=True, text=True).stdout


def banned(name, code):
    """What of the above is in an artifact."""
    if name.endswith(".ptx"):
        return sorted(set(BANNED_PTX.findall(code.decode())))
    return sorted(set(BANNED_CODE.findall(disassemble(code))))


def prove():
    """The search finds what it looks for."""
    source = b"""extern "C" __global__ void probe(float *x, float y) {
        float t[512];
        for (int i = 0; i < (int)x[0]; i++) t[i * i & 511] = x[i] * y + 1.0f;
        x[threadIdx.x] = t[(int)x[threadIdx.x] & 511];
    }"""
    options = ["--fmad=true", "--ftz=true"]
    cubin, _ = Nvrtc().compile(source, {}, ["--gpu-architecture=sm_90", *options], "CUBIN")
    ptx, _ = Nvrtc().compile(source, {}, ["--gpu-architecture=compute_80", *options], "PTX")
    assert {"FFMA", ".FTZ", "STL", "LDL"} <= set(banned("probe.cubin", cubin)), "the search in machine code finds nothing"
    assert {"fma.", ".ftz", "st.local", "ld.local"} <= set(banned("probe.ptx", plain(ptx))), "the search in PTX finds nothing"


def checked_in():
    """What is in prebuilt/, by name. Artifacts are packed; which bytes a packer makes of them depends on its version."""
    files = {path.name: path.read_bytes() for path in PREBUILT.glob("*")}
    return {name.removesuffix(".z"): zlib.decompress(data) if name.endswith(".z") else data for name, data in files.items()}


def listed(name, macro):
    """The names that a macro of a source lists."""
    return re.findall(r"DO\((\w+)\)", (HERE / name).read_text().split(f"#define {macro}(DO)")[1].split("\n\n")[0])


def check(artifacts):
    """Everything wrong with what is checked in."""
    faults = []
    here = checked_in()
    for name in sorted(here.keys() - artifacts.keys()):
        faults.append(f"{name}: nothing builds it")
    for name, code in artifacts.items():
        if name not in here:
            faults.append(f"{name}: missing")
        elif here[name] != code:
            faults.append(f"{name}: not what the sources give; `make kernels` builds it")
    manifest = json.loads(artifacts["manifest.json"])
    kernels = sorted([f"ggshard_{name}" for name in listed("dequant.cuh", "FOR_EACH_TYPE")] + listed("encode.cu", "FOR_EACH_ENCODER"))
    for entry in manifest["artifacts"]:
        name, code = entry["file"], artifacts[entry["file"]]
        faults.extend(f"{name}: has {word}" for word in banned(name, code))
        if "kernels" not in entry:
            if sorted(re.findall(r"\.entry (\w+)", code.decode())) != kernels:
                faults.append(f"{name}: not the kernels of all types and encoders")
            continue
        if sorted(entry["kernels"]) != kernels:
            faults.append(f"{name}: not the kernels of all types and encoders")
        for kernel, used in entry["kernels"].items():
            if used["stack_bytes"] or used["spill_bytes"]:
                faults.append(f"{name}: {kernel} keeps values in memory: {used}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is checked in, and write nothing")
    if parser.parse_args().check:
        prove()
        artifacts = build()
        faults = check(artifacts)
        if faults:
            sys.exit("kernels/prebuilt:\n" + "\n".join(faults))
        size = sum(len(code) for code in artifacts.values())
        print(f"kernels/prebuilt: {len(artifacts)} files, {size} bytes, as the sources give them; no FMA, no FTZ, no local memory")
        return
    artifacts = build()
    PREBUILT.mkdir(exist_ok=True)
    for path in PREBUILT.glob("*"):
        path.unlink()
    for name, code in artifacts.items():
        if name == "manifest.json":
            (PREBUILT / name).write_bytes(code)
        else:
            (PREBUILT / f"{name}.z").write_bytes(zlib.compress(code, 9))
        print(f"{name}: {len(code)} bytes")


if __name__ == "__main__":
    main()
