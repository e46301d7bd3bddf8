"""Files made to break the program, each within 1 GiB of address space and a few seconds: a result, or an error in words.

The files are made here, by code that shares nothing with ggshard; none is in the repository.
"""
import json
import os
import resource
import struct
import subprocess
import time

import pytest
from blake3 import blake3
from conftest import BIN, FIXTURES, files_of, ok

SPACE = 1 << 30
# For a program built without optimisation, and a machine that does other things as well.
SECONDS = 5 if "release" in str(BIN) else 20

TOML_HEAD = "name = 'x'\nclass = 'C'\n"
SMALL = FIXTURES / "families" / "qwen3.gguf"


def within(*args, status=(0, 1)):
    """Runs ggshard in 1 GiB; a crash, a panic or a long wait fails the test. Gives what it said."""
    start = time.monotonic()
    done = subprocess.run(
        [BIN, *map(str, args)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE)),
    )
    took = time.monotonic() - start
    assert done.returncode in status, f"exit {done.returncode}: {done.stderr[-2000:]}"
    assert "panicked" not in done.stderr and "RUST_BACKTRACE" not in done.stderr, done.stderr
    assert took < SECONDS, f"{took:.1f} s"
    assert len(done.stderr) < 60_000 and not any(c in done.stderr for c in "\0\x1b"), "a message for people"
    if done.returncode == 1 and args[0] != "verify":
        assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr, done.stderr
    return done


# GGUF, byte by byte.


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def u32(key, value):
    return entry(key, 4, struct.pack("<I", value))


def u64(key, value):
    return entry(key, 10, struct.pack("<Q", value))


def tensor(name, ne, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def gguf(entries=(), tensors=(), data=b"", arch="llama", counts=None):
    entries = [entry("general.architecture", 8, text(arch)), *entries] if arch else list(entries)
    head = struct.pack("<4sIQQ", b"GGUF", 3, *(counts or (len(tensors), len(entries))))
    body = head + b"".join(entries) + b"".join(tensors)
    return body + b"\0" * (-len(body) % 32) + data


def many_tensors(count, ne=(0,)):
    return gguf(tensors=[tensor(f"t{i}", ne) for i in range(count)])


def stacked(count, ne):
    """The metadata of a small mixture of experts whose experts are one tensor without data."""
    keys = {"block_count": 1, "embedding_length": 1, "feed_forward_length": 1, "attention.head_count": 1, "expert_count": count}
    names = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
    return gguf([u64(f"qwen3moe.{k}", v) for k, v in keys.items()], [tensor(f"blk.0.{n}.weight", ne) for n in names], arch="qwen3moe")


def patched(source, key, value):
    """A model with another number under one key of its metadata."""
    raw = bytearray(source.read_bytes())
    at = raw.index(text(key) + struct.pack("<I", 4)) + 8 + len(key) + 4
    raw[at : at + 4] = struct.pack("<I", value)
    return bytes(raw)


GGUFS = {
    "nothing": lambda: b"",
    "the-magic-alone": lambda: b"GGUF",
    "zeros": lambda: b"\0" * 100_000,
    "counts-of-2-to-the-62": lambda: gguf(counts=(1 << 62, 1 << 62)),
    "counts-of-as-many-as-could-be": lambda: gguf(counts=(100_000, 70_000), data=b"\1" * 2_400_000),
    "a-string-of-2-to-the-62": lambda: gguf([text("k") + struct.pack("<IQ", 8, 1 << 62)]),
    "an-array-of-2-to-the-30-bytes": lambda: gguf([entry("k", 9, struct.pack("<IQ", 0, 1 << 30))], data=b"\0" * 100),
    "arrays-in-arrays": lambda: gguf([entry("k", 9, struct.pack("<IQ", 9, 1) * 5000)]),
    "a-million-empty-strings": lambda: gguf([entry("k", 9, struct.pack("<IQ", 8, 1_000_000) + b"\0" * 8_000_000)], [tensor("x", [1])], b"\0" * 4),
    "three-hundred-thousand-keys": lambda: gguf([entry(f"k{i:06}", 0, b"\1") for i in range(300_000)], [tensor("x", [1])], b"\0" * 4),
    "a-hundred-thousand-tensors": lambda: many_tensors(100_000),
    "tensors-of-four-empty-axes": lambda: many_tensors(20_000, (0, 1 << 20, 1 << 20, 1 << 20)),
    "dimensions-that-wrap": lambda: gguf(tensors=[tensor("x", [1 << 32, 1 << 32])]),
    "an-axis-of-2-to-the-62": lambda: gguf(tensors=[tensor("x", [1 << 62])]),
    "an-extent-beyond-the-end": lambda: gguf(tensors=[tensor("x", [1 << 40])], data=b"\0" * 64),
    "an-offset-near-the-top": lambda: gguf(tensors=[tensor("x", [8], offset=(1 << 64) - 32)], data=b"\0" * 64),
    "names-that-drive-a-terminal": lambda: gguf([entry("\x1b[2J\x07", 8, text("\x1b]0;x\x07"))], [tensor("\x1b[31m\r\n", [1])], b"\0" * 4, arch="\x1b[2Jllama"),
    "a-name-of-a-megabyte": lambda: gguf(tensors=[tensor("n" * 1_000_000, [1])], data=b"\0" * 4),
    "an-architecture-of-a-megabyte": lambda: gguf(tensors=[tensor("x", [1])], data=b"\0" * 4, arch="a" * 1_000_000),
    "experts-without-data": lambda: stacked(1 << 20, [0, 0, 1 << 20]),
    "experts-by-the-billion": lambda: stacked(1 << 31, [1, 1, 1 << 31]),
    "a-set-of-99999-parts": lambda: gguf([entry("split.count", 2, struct.pack("<H", 65535)), entry("split.no", 2, b"\0\0")], [tensor("x", [1])], b"\0" * 4),
}
for _key in ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length", "attention.key_length"):
    for _value in (0, 1, 1 << 16, (1 << 32) - 1):
        GGUFS[f"qwen3.{_key}-{_value}"] = lambda key=_key, value=_value: patched(SMALL, f"qwen3.{key}", value)


@pytest.mark.parametrize("name", GGUFS)
def test_a_hostile_gguf(tmp_path, name):
    path = tmp_path / "x.gguf"
    raw = GGUFS[name]()
    path.write_bytes(raw)
    within("inspect", path)
    within("inspect", "--json", path)
    within("plan", "--tp", "1024", path)
    within("plan", "--tp", "8", "--header-only", "--profile", "vllm-0.32", path)
    within("plan", "--tp", "2", "--mapping", "raw", path)
    within("convert", path, tmp_path / "out", "--tp", "2")
    assert path.read_bytes() == raw
    assert not (tmp_path / "out").exists() or "_1" in name or name == "zeros" or name.endswith("-1")


def test_a_file_of_a_terabyte_that_holds_nothing(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf(tensors=[tensor("x", [1 << 38])]))
    os.truncate(path, (1 << 40) + (1 << 20))
    for args in (["inspect", path], ["plan", "--tp", "1", "--mapping", "raw", path], ["convert", path, tmp_path / "out", "--tp", "1", "--mapping", "raw"]):
        within(*args)
    assert not (tmp_path / "out").exists()


def test_choices_that_ask_for_too_much(tmp_path):
    for flags in (
        ["--tp", "4294967295"],
        ["--tp", "1024", "--mapping", "raw", "--part-size", "1"],
        ["--tp", "1", "--pp-layers", "18446744073709551615,3"],
        ["--tp", "1", "--pp", "1024", "--profile", "vllm-0.32"],
        ["--tp", "2", "--moe-pad", "4096", "--profile", "vllm-0.32"],
        ["--tp", "2", "--ep"],
        ["--tp", "2", "--part-size", "18446744073709551615"],
    ):
        within("plan", *flags, FIXTURES / "families" / "qwen3_moe.gguf")
    done = within("plan", "--tp", "1024", "--mapping", "raw", "--part-size", "1", SMALL)
    assert done.returncode == 0 or "--part-size" in done.stderr


# Rules.


def weight(name, shape, more):
    return f"[[weight]]\nname = '{name}'\nshape = {shape}\ncut = 'replicated'\n{more}\n"


def layers(count, width):
    lines = ["[dims]"] + [f"a{i} = 1" for i in range(width)]
    for level in range(1, count):
        lines += [f"{chr(97 + level)}{i} = '" + " - ".join(f"{chr(96 + level)}{j}" for j in range(0, width, 2)) + "'" for i in range(width)]
    return "\n".join(lines) + "\n"


MAPPINGS = {
    "deep-brackets": "x = " + "[" * 200_000,
    "deep-tables": "x = " + "{a = " * 100_000,
    "deep-dots": "a" + ".a" * 300_000 + " = 1",
    "deep-headers": "[a" + ".a" * 300_000 + "]",
    "deep-expressions": weight("w", "['" + "(" * 1900 + "']", "from = { gguf = 'output.weight' }"),
    "long-expressions": weight("w", "['" + "1 + " * 600 + "1']", "from = { gguf = 'output.weight' }"),
    "powers": weight("w", "['9223372036854775807 * 9223372036854775807']", "from = { gguf = 'output.weight' }"),
    "dimensions-of-dimensions": layers(14, 60) + weight("w", "['n0']", "from = { gguf = 'output.weight' }"),
    "loops-in-loops": "[loops]\nlayer = 1048576\nm = 1048576\n" + weight("w.{layer}.{m}", "[1]", "when = 'layer < 0 && m < 0'\nfrom = { gguf = 'x' }"),
    "rules-by-the-thousand": "".join(f"[[ignore]]\ngguf = '{{a}}.{'x' * 60}{i}.{'x' * 60}.{{b}}'\nreason = 'y'\n" for i in range(4000)),
    "more-than-a-megabyte": "# " + "x" * 2_000_000,
    "a-device": "extends = '/dev/zero'",
    "itself": "extends = 'x.toml'",
    "not-text": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_hostile_mapping(tmp_path, name):
    path = tmp_path / "x.toml"
    path.write_bytes((TOML_HEAD + MAPPINGS[name]).encode(errors="surrogateescape"))
    assert within("plan", "--tp", "2", "--mapping", path, SMALL).returncode == 1
    assert within("plan", "--tp", "2", "--profile", path, SMALL).returncode == 1
    within("mappings", path)
    within("profiles", path)


# Folders.


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "out"
    ok("convert", SMALL, out, "--tp", "1")
    return out


def deep(close):
    return '{"a":' * 100_000 + ("}" * 100_000 if close else "")


FILES = {
    "nothing": b"",
    "zeros": b"\0" * 100_000,
    "a-length-beyond-the-end": struct.pack("<Q", 1 << 63) + b"{}",
    "a-length-of-a-gigabyte": struct.pack("<Q", 1 << 30) + b" " * 100,
    "deep-brackets": struct.pack("<Q", 200_001) + b"{" + b'"a":{' * 40_000,
    "json-that-is-deep": deep(False).encode(),
    "json-that-is-deep-and-closed": deep(True).encode(),
    "a-million-numbers": b"[" + b"0," * 1_000_000 + b"0]",
    "bytes-that-are-no-text": bytes(range(256)) * 100,
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_in_a_folder(folder, tmp_path, name):
    before = files_of(folder)
    for file in before:
        (folder / file).write_bytes(FILES[name])
        assert within("verify", folder).returncode == 1, file
        assert within("verify", folder, "--source", SMALL).returncode == 1, file
        within("verify", folder, "--reference", folder)
        (folder / file).write_bytes(before[file])
    config = tmp_path / "config.json"
    config.write_bytes(FILES[name])
    assert within("plan", "--tp", "1", SMALL).returncode == 0
    assert within("convert", SMALL, tmp_path / "other", "--tp", "1", "--config", config).returncode == 1
    assert within("verify", folder).returncode == 0


def test_files_that_are_longer_than_memory(folder):
    for file, kept in files_of(folder).items():
        os.truncate(folder / file, (1 << 30) - 4096)
        assert within("verify", folder).returncode == 1, file
        (folder / file).write_bytes(kept)


def test_pipes_and_devices_and_links(folder, tmp_path):
    for file, kept in files_of(folder).items():
        for target in (None, "/dev/zero", "/dev", "/nowhere", folder / file):
            (folder / file).unlink()
            os.mkfifo(folder / file) if target is None else (folder / file).symlink_to(target)
            assert within("verify", folder).returncode == 1, (file, target)
        (folder / file).unlink()
        (folder / file).write_bytes(kept)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for source in (pipe, "/dev/zero", "/dev/null", "/proc/self/mem"):
        assert within("inspect", source).returncode == 1
        assert within("convert", source, tmp_path / "x", "--tp", "1").returncode == 1
        assert within("verify", folder, "--source", source).returncode == 1


def sealed(manifest):
    """The bytes of a manifest with the right digest at its end."""
    body = json.dumps(manifest, separators=(",", ":"))[:-1] + ',\n"digest":"'
    return (body + blake3((body + "0" * 64 + '"\n}\n').encode()).hexdigest() + '"\n}\n').encode()


def test_a_manifest_that_asks_for_much(folder):
    path = folder / "ggshard.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    path.write_bytes(sealed(manifest))
    assert "B3SUMS" in within("verify", folder).stdout
    changes = [
        lambda m: m["topology"].update(tp=(1 << 32) - 1, ranks=[0]),
        lambda m: m["topology"].update(pp=(1 << 32) - 1),
        lambda m: m["policy"].update(moe_pad=0),
        lambda m: m["policy"].update(part_size=0),
        lambda m: m["mapping"].update(texts=["a" + ".a" * 100_000 + " = 1"]),
        lambda m: m["parameters"].extend([m["parameters"][0] | {"name": f"p{i}"} for i in range(100_000)]),
        lambda m: m["warnings"].extend([""] * 1_000_000),
        lambda m: m["others"].append({"name": "../../etc/passwd", "bytes": 1, "blake3": "0" * 64}),
    ]
    for change in changes:
        changed = json.loads(json.dumps(manifest))
        change(changed)
        path.write_bytes(sealed(changed))
        assert within("verify", folder).returncode == 1
        assert within("verify", folder, "--source", SMALL).returncode == 1


