"""What a user types and gets back: exit statuses, error lines, JSON, and which folders are taken."""
import json
import os
import re
import resource
import shutil
import subprocess

import numpy as np
import pytest
from conftest import BIN, CORPUS, DEEPSEEK, FIXTURES, GLM, files_of, ok, refused, run
from gguf_files import rewrite, tiny
from join import read_file, read_ranks, read_whole

FIRST = "deepseek_v3-Q4_K_M-00001-of-00004.gguf"


@pytest.fixture
def strange(tmp_path):
    """A GGUF of an architecture that nobody knows."""
    return tiny(tmp_path / "strange.gguf", "nonesuch", {"blk.0.odd.weight": np.arange(12, dtype=np.float32).reshape(3, 4)})


# Exit statuses and error lines.


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["shard"],
        ["convert", GLM],
        ["convert", GLM, "out"],
        ["convert", GLM, "out", "--tp", "0"],
        ["convert", GLM, "out", "--tp", "two"],
        ["convert", GLM, "out", "--tp", "2", "--dtype", "f8"],
        ["convert", GLM, "out", "--tp", "2", "--ranks", "1-0"],
        ["convert", GLM, "out", "--tp", "2", "--part-size", "0"],
        ["convert", GLM, "out", "--tp", "2", "--part-size", "5Q"],
        ["verify"],
        ["completions", "dos"],
    ],
    ids=lambda args: " ".join(str(getattr(a, "name", a)) for a in args) or "nothing",
)
def test_usage_errors_have_exit_status_2(tmp_path, args):
    done = run(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage" in done.stderr or "error: invalid value" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_and_version():
    version = ok("--version")
    assert re.fullmatch(r"ggshard \d+\.\d+\.\d+\n", version)
    for command in ("inspect", "plan", "convert", "verify", "completions"):
        assert command in ok("--help")
        assert "Usage: ggshard " + command in ok(command, "--help")


def test_errors_name_the_file(tmp_path):
    missing = tmp_path / "missing.gguf"
    text = tmp_path / "notes.gguf"
    text.write_text("version https://example.com\n")
    (tmp_path / "empty").mkdir()
    for command in (["inspect"], ["plan", "--tp", "2"], ["convert", "--tp", "2"]):
        for source in (missing, text, tmp_path / "empty"):
            out = [tmp_path / "out"] if command[0] == "convert" else []
            assert str(source) in refused(*command, source, *out)
    assert not (tmp_path / "out").exists()
    for folder in (missing, tmp_path / "empty"):
        assert str(folder) in refused("verify", folder)


def test_an_unknown_architecture_is_named_with_its_key(strange, tmp_path):
    line = refused("convert", strange, tmp_path / "out", "--tp", 2)
    assert str(strange) in line and "general.architecture" in line and "'nonesuch'" in line and "no built-in mapping" in line
    assert not (tmp_path / "out").exists()


def test_a_missing_and_a_surplus_tensor_are_named(tmp_path):
    lacking = rewrite(GLM, tmp_path / "lacking.gguf", leave_out=["blk.1.attn_q_b.weight"])
    line = refused("convert", lacking, tmp_path / "out", "--tp", 2)
    assert str(lacking) in line and "blk.1.attn_q_b.weight" in line
    renamed = rewrite(GLM, tmp_path / "renamed.gguf", rename={"blk.1.attn_norm.weight": "blk.1.attn_norm2.weight"})
    line = refused("convert", renamed, tmp_path / "out", "--tp", 2)
    assert str(renamed) in line and ("'blk.1.attn_norm.weight'" in line or "'blk.1.attn_norm2.weight'" in line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tp", [3, 16])
def test_a_tp_that_does_not_divide_names_the_tensor_and_what_works(tmp_path, tp):
    line = refused("convert", GLM, tmp_path / "out", "--tp", tp)
    assert re.search(r"tensor 'model\.[a-z0-9_.]+'", line) and "1, 2, 4, 8" in line
    assert not (tmp_path / "out").exists()


def test_a_cut_file_is_refused_before_anything_is_written(tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(GLM.read_bytes()[:-1])
    line = refused("convert", short, tmp_path / "out", "--tp", 2)
    assert str(short) in line and str(GLM.stat().st_size) in line
    assert not (tmp_path / "out").exists()


def test_a_missing_part_is_named(tmp_path):
    for part in DEEPSEEK.glob("*.gguf"):
        if "-00003-" not in part.name:
            (tmp_path / part.name).write_bytes(part.read_bytes())
    for source in (tmp_path, tmp_path / FIRST):
        assert "deepseek_v3-Q4_K_M-00003-of-00004.gguf" in refused("convert", source, tmp_path / "out", "--tp", 2)


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path):
    done = run("convert", GLM, tmp_path / "out", "--tp", 2, "-v")
    assert done.returncode == 0
    assert "manifest" in done.stdout and "INFO" not in done.stdout
    assert "INFO" in done.stderr
    assert run("convert", GLM, tmp_path / "quiet", "--tp", 2).stderr == ""


# JSON.


def test_json_documents_parse(tmp_path):
    inspected = json.loads(ok("inspect", DEEPSEEK, "--json"))
    assert (inspected["architecture"], len(inspected["parts"])) == ("deepseek2", 4)
    assert sum(p["tensors"] for p in inspected["parts"]) == 52
    assert len(json.loads(ok("inspect", DEEPSEEK, "--json", "--tensors"))["tensors"]) == 52
    plan = json.loads(ok("plan", DEEPSEEK, "--tp", 2, "--json"))
    assert (plan["tp"], plan["source_tensors"], plan["used_tensors"], len(plan["tensors"])) == (2, 52, 52, 91)
    report = json.loads(ok("convert", DEEPSEEK, tmp_path / "out", "--tp", 2, "--json"))
    assert (report["tensors"], report["files"]) == (182, 2)
    size = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert report["output_bytes"] == size
    for rank, header in zip(plan["ranks"], read_ranks(tmp_path / "out")):
        assert rank["bytes"] == sum(len(t.data) for t in header.values())
    verified = json.loads(ok("verify", tmp_path / "out", "--json"))
    assert (verified["ok"], verified["files"] > 0, verified["tensors"], verified["findings"]) == (True, True, 182, [])


# The output folder.


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert str(out) in refused("convert", GLM, out, "--tp", 2)
    assert files_of(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").unlink()
    ok("convert", GLM, out, "--tp", 2)
    before = files_of(out)
    assert str(out) in refused("convert", GLM, out, "--tp", 2)
    assert files_of(out) == before


def test_the_folder_of_the_source_is_refused_under_every_name(tmp_path):
    home = tmp_path / "model"
    home.mkdir()
    source = shutil.copy(GLM, home / "model.gguf")
    (tmp_path / "link").symlink_to(home)
    (tmp_path / "elsewhere.gguf").symlink_to(source)
    before = files_of(home)
    for entry in (source, tmp_path / "elsewhere.gguf", home):
        for out in (home, tmp_path / "link", home / ".", home / ".." / "model"):
            assert "source" in refused("convert", entry, out, "--tp", 2) or "empty" in refused("convert", entry, out, "--tp", 2)
    assert files_of(home) == before


def test_an_output_that_is_a_file_is_refused(tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    assert str(out) in refused("convert", GLM, out, "--tp", 2)
    assert out.read_text() == "mine"


def test_the_source_is_only_read(tmp_path):
    source = shutil.copytree(DEEPSEEK, tmp_path / "set")
    before = files_of(source)
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    ok("convert", source, tmp_path / "out", "--tp", 2)
    assert files_of(source) == before
    source.chmod(0o755)


# Choices.


def test_some_ranks_only(tmp_path, converted):
    ok("convert", GLM, tmp_path / "some", "--tp", 4, "--ranks", "0,2-3", "--seal", "--part-size", "1M")
    every, some = files_of(converted(GLM, "--tp", 4, "--part-size", "1M")), files_of(tmp_path / "some")
    weights = {n for n in some if n.endswith(".safetensors")}
    assert weights == {n for n in every if n.endswith(".safetensors") and not n.startswith("model-rank-1-")}
    assert all(some[n] == every[n] for n in weights)
    assert json.loads(some["ggshard.json"])["topology"] == {"tp": 4, "ranks": [0, 2, 3]}
    ok("verify", tmp_path / "some")
    ok("verify", tmp_path / "some", "--rank", 2)
    assert "rank 1" in refused("verify", tmp_path / "some", "--rank", 1)
    assert "rank 4" in refused("convert", GLM, tmp_path / "none", "--tp", 4, "--ranks", "4")
    assert not (tmp_path / "none").exists()


def test_config_is_copied_byte_for_byte(tmp_path):
    config = tmp_path / "given.json"
    config.write_text('{\n   "architectures": ["GlmMoeDsaForCausalLM"], "strange":  [1.50, "ä"]\n}')
    ok("convert", GLM, tmp_path / "out", "--tp", 2, "--config", config)
    assert (tmp_path / "out" / "config.json").read_bytes() == config.read_bytes()
    manifest = json.loads((tmp_path / "out" / "ggshard.json").read_text())
    assert "config.json" in [other["name"] for other in manifest["others"]]
    assert "  config.json\n" in (tmp_path / "out" / "B3SUMS").read_text()
    config.write_text("{bad")
    for path in (config, tmp_path / "absent.json"):
        assert str(path) in refused("convert", GLM, tmp_path / "other", "--tp", 2, "--config", path)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("size, limit", [("1GB", 10**9), ("2M", 2 << 20), ("300k", 300 << 10), ("300KB", 300_000), ("12345", 12345)])
def test_part_size(converted, size, limit):
    folder = converted(GLM, "--tp", 2, "--part-size", size)
    parts = sorted(folder.glob("model-rank-1-part-*.safetensors"))
    assert (len(parts) > 1) == (limit < 9 << 20)
    for part in parts:
        # A tensor never spans files, so one alone may be larger.
        if part.stat().st_size > limit:
            assert len(read_file(part)) == 1, part.name
    assert json.loads((folder / "ggshard.json").read_text())["policy"]["part_size"] == limit


# A Hugging Face cache: what is given are links to blobs named by their hash.


def cache(tmp_path, files):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(files):
        blob = blobs / f"{number:02x}{'7e' * 31}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))
    return snapshot


def test_a_single_file_in_a_hugging_face_cache(tmp_path, converted):
    snapshot = cache(tmp_path, [GLM])
    for number, source in enumerate((snapshot / GLM.name, snapshot)):
        ok("convert", source, tmp_path / str(number), "--tp", 2)
        assert files_of(tmp_path / str(number)) == files_of(converted(GLM, "--tp", 2))


def test_a_split_set_in_a_hugging_face_cache(tmp_path, converted):
    snapshot = cache(tmp_path, sorted(DEEPSEEK.glob("*.gguf"), reverse=True))
    for number, source in enumerate((snapshot / FIRST, snapshot / FIRST.replace("00001", "00004"), snapshot)):
        ok("convert", source, tmp_path / str(number), "--tp", 2)
        assert files_of(tmp_path / str(number)) == files_of(converted(DEEPSEEK, "--tp", 2))
    names = [p["name"] for p in json.loads((tmp_path / "0" / "ggshard.json").read_text())["source"]["parts"]]
    assert names == sorted(p.name for p in DEEPSEEK.glob("*.gguf"))
    assert len(json.loads(ok("inspect", snapshot / FIRST, "--json"))["parts"]) == 4


def test_a_blob_by_itself(tmp_path):
    blob = next((cache(tmp_path, [GLM]).parents[1] / "blobs").iterdir())
    ok("convert", blob, tmp_path / "out", "--tp", 1)
    assert len(read_whole(tmp_path / "out")) == 110


# inspect and completions.


def test_inspect_needs_no_known_architecture(strange):
    assert "nonesuch" in ok("inspect", strange)
    assert "blk.0.odd.weight" in ok("inspect", strange, "--tensors")
    assert json.loads(ok("inspect", strange, "--json"))["architecture"] == "nonesuch"


def test_any_file_is_converted_under_its_own_names(strange, tmp_path):
    ok("convert", strange, tmp_path / "out", "--tp", 1, "--mapping", "raw", "--dtype", "f32")
    tensors = read_whole(tmp_path / "out")
    assert tensors["blk.0.odd.weight"] == ("F32", (3, 4), np.arange(12, dtype=np.float32).tobytes())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "elvish", "powershell"])
def test_completions(shell, tmp_path):
    script = ok("completions", shell)
    assert "ggshard" in script and "part-size" in script
    if shell == "bash":
        path = tmp_path / "ggshard.bash"
        path.write_text(script)
        subprocess.run(["bash", "-n", path], check=True)
        asked = f"source {path}; COMP_WORDS=(ggshard con); COMP_CWORD=1; _ggshard ggshard con ggshard; echo ${{COMPREPLY[@]}}"
        assert subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout == "convert\n"


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(["bash", "-c", f"set -o pipefail; '{BIN}' completions zsh | head -1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# verify.


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted(GLM, "--tp", 2, "--part-size", "1M"), tmp_path / "copy")


def test_verify_accepts_what_convert_wrote(copy):
    assert ok("verify", copy).startswith("ok")


def test_verify_names_the_file_and_tensor_of_a_flipped_bit(copy):
    path = sorted(copy.glob("model-rank-1-*.safetensors"))[1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"])
    done = run("verify", copy)
    assert done.returncode == 1 and path.name in done.stdout and last in done.stdout
    report = json.loads(run("verify", copy, "--json").stdout)
    assert report["ok"] is False and path.name in json.dumps(report["findings"])
    ok("verify", copy, "--rank", 0)
    assert run("verify", copy, "--rank", 1).returncode == 1


@pytest.mark.parametrize("damage", ["cut", "appended", "missing", "surplus", "partial", "swapped", "manifest", "sums"])
def test_verify_notices(copy, damage):
    files = sorted(copy.glob("*.safetensors"))
    if damage == "cut":
        os.truncate(files[0], files[0].stat().st_size - 2)
    elif damage == "appended":
        with open(files[0], "ab") as file:
            file.write(b"\0")
    elif damage == "missing":
        files[0].unlink()
    elif damage == "surplus":
        shutil.copy(files[0], copy / "model-rank-2-part-0.safetensors")
    elif damage == "partial":
        (copy / "model-rank-0-part-9.safetensors.partial").write_bytes(b"")
    elif damage == "swapped":
        a, b = copy / "model-rank-0-part-0.safetensors", copy / "model-rank-1-part-0.safetensors"
        first = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(first)
    elif damage == "manifest":
        text = (copy / "ggshard.json").read_text()
        (copy / "ggshard.json").write_text(text.replace('"tp": 2', '"tp": 1').replace('"tp":2', '"tp":1'))
    elif damage == "sums":
        text = (copy / "B3SUMS").read_text()
        (copy / "B3SUMS").write_text(text[1:] if text[0] != text[1] else "0" + text[1:-1])
    assert run("verify", copy).returncode == 1


# Container files: what a careful loader accepts and refuses.


def verdicts():
    for folder in [FIXTURES / "container"] + ([CORPUS / "container"] if CORPUS else []):
        for name, verdict in sorted(json.loads((folder / "verdicts.json").read_text()).items()):
            yield pytest.param(folder / name, verdict, id=f"{'corpus' if folder.parent != FIXTURES else 'fixtures'}/{name}")


def bounded():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


@pytest.mark.parametrize("path, verdict", list(verdicts()))
def test_container_verdicts(path, verdict):
    done = run("inspect", path, timeout=20, preexec_fn=bounded)
    if verdict["want"] == "accept":
        assert done.returncode == 0, done.stderr
    elif verdict["want"] == "refuse":
        assert done.returncode == 1, verdict["note"]
        assert path.name in done.stderr
    else:
        assert verdict["want"] == "either"


@pytest.mark.parametrize("path", sorted((FIXTURES / "attacks").glob("*.gguf")), ids=lambda p: p.name)
def test_attacks_end_quickly_in_little_memory(path, tmp_path):
    run("inspect", path, timeout=20, preexec_fn=bounded)
    run("convert", path, tmp_path / "out", "--tp", 2, timeout=20, preexec_fn=bounded)
    assert not (tmp_path / "out").exists()
