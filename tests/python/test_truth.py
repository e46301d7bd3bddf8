"""Every weight has the bits that ggml's own dequantization gives, however the source is entered."""
import hashlib
import json
import os

import numpy as np
import pytest
from conftest import CORPUS, DEEPSEEK, FIXTURES, GLM, PINNED_F32, ROOT, ok, run
from gguf_files import rewrite
from join import read_file, read_whole

EXPECTED = json.loads((FIXTURES / "models" / "expected.json").read_text())
DTYPES = ["bf16", "f16", "f32"]


def check(folder, expected, dtype):
    """All weights of a tp 1 folder against shapes and digests; gives their number."""
    tensors = read_whole(folder)
    assert sorted(tensors) == sorted(expected)
    wrong = []
    for name, tensor in tensors.items():
        want = expected[name]
        allowed = {dtype.upper(), "F32"} if name.endswith(PINNED_F32) else {dtype.upper()}
        digest = hashlib.sha256(tensor.data).hexdigest()
        if list(tensor.shape) != want["shape"] or tensor.dtype not in allowed or digest != want[tensor.dtype.lower()]:
            wrong.append((name, tensor.dtype, tensor.shape))
    assert wrong == []
    return len(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source, weights", [(GLM, 110), (DEEPSEEK, 91)], ids=["glm_moe_dsa", "deepseek_v3"])
def test_fixture_models(converted, source, weights, dtype):
    assert check(converted(source, "--tp", 1, "--dtype", dtype), EXPECTED[source.name], dtype) == weights


@pytest.mark.parametrize("part", sorted(p.name for p in DEEPSEEK.glob("*.gguf")))
def test_a_split_set_is_entered_by_any_part(tmp_path, part):
    ok("convert", DEEPSEEK / part, tmp_path / "out", "--tp", 1)
    assert check(tmp_path / "out", EXPECTED[DEEPSEEK.name], "bf16") == 91


@pytest.mark.parametrize("tensors", [1, 5, 40])
def test_split_sets_written_by_another_program(tmp_path, tensors):
    (tmp_path / "set").mkdir()
    first = rewrite(GLM, tmp_path / "set" / "glm.gguf", split_max_tensors=tensors)
    parts = sorted(first.parent.iterdir())
    assert len(parts) == -(-71 // tensors)
    for number, source in enumerate((first, parts[-1], first.parent)):
        ok("convert", source, tmp_path / str(number), "--tp", 1)
        assert check(tmp_path / str(number), EXPECTED[GLM.name], "bf16") == 110


def test_a_file_written_by_another_program(tmp_path):
    source = rewrite(DEEPSEEK, tmp_path / "one.gguf")
    ok("convert", source, tmp_path / "out", "--tp", 1, "--dtype", "f32")
    assert check(tmp_path / "out", EXPECTED[DEEPSEEK.name], "f32") == 91


def test_the_check_itself_can_fail(converted):
    expected = json.loads(json.dumps(EXPECTED[GLM.name]))
    folder = converted(GLM, "--tp", 1)
    digest = expected["model.norm.weight"]["bf16"]
    expected["model.norm.weight"]["bf16"] = digest[::-1]
    with pytest.raises(AssertionError):
        check(folder, expected, "bf16")
    expected["model.norm.weight"]["bf16"] = digest
    check(folder, expected, "bf16")
    del expected["lm_head.weight"]
    with pytest.raises(AssertionError):
        check(folder, expected, "bf16")


# Each ggml type by itself, as F32.


def nan_as_one(tensor):
    """The bits of an array, every NaN as the same one: processors disagree about their payload."""
    size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1}[tensor.dtype]
    bits = np.frombuffer(tensor.data, f"<u{size}").copy()
    infinity = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}.get(tensor.dtype)
    if infinity:
        bits[(bits & ((1 << (8 * size - 1)) - 1)) > infinity] = infinity + 1
    return bits


BLOCKS = [FIXTURES / "blocks"] + ([CORPUS / "blocks"] if CORPUS else [])


@pytest.mark.parametrize("source", [p for d in BLOCKS for p in sorted(d.glob("*.gguf"))], ids=lambda p: os.path.relpath(p, ROOT))
def test_every_ggml_type(tmp_path, source):
    special = ".special." in source.name
    flags = ["--mapping", "raw", "--profile", "hf", "--tp", "1", "--dtype", "f32"]
    ok("convert", source, tmp_path / "out", *flags, *(["--allow-nonfinite"] if special else []))
    got, want = read_whole(tmp_path / "out"), read_file(source.with_name(source.name.replace(".gguf", ".expected.safetensors")))
    assert got.keys() == want.keys() and want
    for name, tensor in want.items():
        assert got[name][:2] == tensor[:2]
        assert np.array_equal(nan_as_one(got[name]), nan_as_one(tensor)), name
    if special:
        if any(not np.isfinite(np.frombuffer(t.data, "<f4")).all() for t in want.values()):
            assert run("convert", source, tmp_path / "refused", *flags).returncode == 1
            assert not (tmp_path / "refused" / "ggshard.json").exists()


# The corpus.


@pytest.mark.parametrize("dtype", DTYPES)
def test_corpus_models(corpus_file, corpus_source, tmp_path, dtype):
    model, name = corpus_file
    expected = json.loads((CORPUS / "models" / model / "expected.json").read_text())[name]["tensors"]
    sources = [corpus_source]
    if name.endswith("Q4_K_M.gguf") and dtype == "bf16":
        for folder, part in (("split", -1), ("split-meta-first", 0)):
            if (corpus_source.parent / folder).is_dir():
                sources += [corpus_source.parent / folder, sorted((corpus_source.parent / folder).iterdir())[part]]
    for number, source in enumerate(sources):
        ok("convert", source, tmp_path / str(number), "--tp", 1, "--dtype", dtype)
        assert check(tmp_path / str(number), expected, dtype) == len(expected) > 0
