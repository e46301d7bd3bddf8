"""Other programs read what was written: the `safetensors` package, `b3sum`, and whoever maps the files into memory."""
import json
import shutil
import struct
import subprocess

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from conftest import MODELS, files_of, ok
from safetensors import safe_open
from safetensors.numpy import load_file

NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def header(path):
    """The tensors of a safetensors file in the order of its JSON, as (name, entry), and where the data begins."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        pairs = json.loads(file.read(length), object_pairs_hook=list)
        return [(name, dict(entry)) for name, entry in pairs if name != "__metadata__"], 8 + length


@pytest.fixture(params=[(m, tp, dtype) for m in MODELS for tp in (1, 2) for dtype in ("bf16", "f16", "f32")], ids=lambda p: "-".join(map(str, p)))
def folder(request, converted):
    model, tp, dtype = request.param
    return converted(MODELS[model], "--tp", tp, "--dtype", dtype, "--part-size", "700k")


def test_the_safetensors_package_reads_every_file(folder):
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name.startswith(("model-00001-of-", "model-rank-0-part-0."))
    read = 0
    for path in files:
        entries, data_start = header(path)
        raw = path.read_bytes()[data_start:]
        names = [name for name, _ in entries]
        assert len(names) == len(set(names)) > 0
        arrays = load_file(path)
        with safe_open(path, framework="numpy") as opened:
            assert sorted(opened.keys()) == sorted(names) == sorted(arrays)
            for name, entry in entries:
                begin, end = entry["data_offsets"]
                piece = opened.get_slice(name)
                assert (piece.get_shape(), piece.get_dtype()) == (entry["shape"], entry["dtype"])
                for array in (opened.get_tensor(name), arrays[name]):
                    assert array.dtype == NUMPY[entry["dtype"]]
                    assert list(array.shape) == entry["shape"]
                    assert array.tobytes() == raw[begin:end]
                    assert np.isfinite(array.astype(np.float32)).all()
                read += 1
    assert read == sum(len(f["tensors"]) for f in json.loads((folder / "ggshard.json").read_text())["files"]) >= 91


def test_data_is_aligned_and_without_gaps(folder):
    for path in folder.glob("*.safetensors"):
        entries, data_start = header(path)
        assert data_start % 4096 == 0
        at = 0
        for name, entry in entries:
            begin, end = entry["data_offsets"]
            size = np.dtype(NUMPY[entry["dtype"]]).itemsize
            assert begin == at, f"{path.name}: {name} begins at {begin} instead of {at}"
            assert (data_start + begin) % size == 0
            assert end - begin == size * int(np.prod(entry["shape"]))
            at = end
        assert path.stat().st_size == data_start + at


@pytest.mark.parametrize("model", MODELS)
def test_the_index_points_to_the_right_file(converted, model):
    folder = converted(MODELS[model], "--tp", 1, "--part-size", "700k")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for path in folder.glob("*.safetensors"):
        entries, data_start = header(path)
        found |= {name: path.name for name, _ in entries}
        size += path.stat().st_size - data_start
    assert len(set(found.values())) > 2
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == size


def test_b3sums_lists_every_file_with_its_digest(folder):
    files = files_of(folder)
    sums = files.pop("B3SUMS").decode()
    assert sums == "".join(f"{blake3(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))


@pytest.mark.skipif(shutil.which("b3sum") is None, reason="no program b3sum")
def test_b3sum_accepts_the_folder(folder):
    subprocess.run(["b3sum", "--check", "B3SUMS"], cwd=folder, check=True)


def test_the_manifest_has_the_digest_of_every_tensor_and_of_itself(folder):
    text = (folder / "ggshard.json").read_text()
    manifest = json.loads(text)
    assert blake3(text.replace(manifest["digest"], "0" * 64).encode()).hexdigest() == manifest["digest"]
    checked = 0
    for file in manifest["files"]:
        entries, data_start = header(folder / file["name"])
        raw = (folder / file["name"]).read_bytes()
        assert (file["bytes"], file["header_bytes"], file["blake3"]) == (len(raw), data_start, blake3(raw).hexdigest())
        assert [t["name"] for t in file["tensors"]] == [name for name, _ in entries]
        for listed, (_, entry) in zip(file["tensors"], entries):
            begin, end = entry["data_offsets"]
            assert (listed["dtype"], listed["shape"], listed["offsets"]) == (entry["dtype"], entry["shape"], [begin, end])
            assert listed["blake3"] == blake3(raw[data_start + begin : data_start + end]).hexdigest()
            checked += 1
    assert checked >= 91


@pytest.mark.parametrize("model", MODELS)
def test_the_same_input_gives_the_same_bytes(converted, tmp_path, model):
    first = files_of(converted(MODELS[model], "--tp", 4, "--part-size", "300k"))
    for number, flags in enumerate((["--threads", 1], ["--threads", 7], ["--threads", 2, "--tile-size", "4k"], ["--tile-size", "3000"])):
        ok("convert", MODELS[model], tmp_path / str(number), "--tp", 4, "--part-size", "300k", *flags)
        again = files_of(tmp_path / str(number))
        assert again.keys() == first.keys()
        assert [name for name in first if first[name] != again[name]] == [], flags
