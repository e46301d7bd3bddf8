"""What the tests share: the binary, the models, and conversions that several tests look at."""
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
GLM = FIXTURES / "models" / "glm_moe_dsa-UD-IQ2_XXS.gguf"
DEEPSEEK = FIXTURES / "models" / "deepseek_v3-split"
MODELS = {"glm_moe_dsa": GLM, "deepseek_v3": DEEPSEEK}

# A folder with more models than a repository should hold. Optional; fixtures/ alone is enough for every promise.
CORPUS = Path(os.environ["GGSHARD_CORPUS"]).resolve() if os.environ.get("GGSHARD_CORPUS") else None

# Some weights keep F32 whatever type is asked for.
PINNED_F32 = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")


def binary():
    """The program under test: GGSHARD_BIN, or what cargo built last."""
    if os.environ.get("GGSHARD_BIN"):
        return Path(os.environ["GGSHARD_BIN"]).resolve()
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [p for p in (target / "debug" / "ggshard", target / "release" / "ggshard") if p.exists()]
    if not built:
        raise RuntimeError("no ggshard under target/; run `cargo build` or set GGSHARD_BIN")
    return max(built, key=lambda p: p.stat().st_mtime)


BIN = binary()


def run(*args, timeout=300, **more):
    """Runs ggshard; a crash by a signal or a panic fails the test at once."""
    done = subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, **more)
    assert done.returncode in (0, 1, 2), f"exit {done.returncode}: {done.stderr}"
    assert "panicked" not in done.stderr, done.stderr
    return done


def ok(*args, **more):
    """Runs ggshard, which must succeed; gives its stdout."""
    done = run(*args, **more)
    assert done.returncode == 0, f"ggshard {' '.join(map(str, args))}: {done.stderr}"
    return done.stdout


def refused(*args, **more):
    """Runs ggshard, which must refuse with exit status 1 and say why in one line; gives that line."""
    done = run(*args, **more)
    assert done.returncode == 1, f"ggshard {' '.join(map(str, args))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def files_of(folder):
    """{name: bytes} of every file below a folder."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """converted(source, "--tp", 2, ...): the folder of that conversion, made once per session."""
    made = {}

    def convert(source, *flags):
        key = (str(source), *map(str, flags))
        if key not in made:
            out = tmp_path_factory.mktemp("converted") / "out"
            ok("convert", source, out, *flags)
            made[key] = out
        return made[key]

    yield convert
    for folder in made.values():
        shutil.rmtree(folder)


# The corpus.


def corpus_models():
    """(model, file) of every GGUF that the corpus has the truth for."""
    if CORPUS is None:
        return []
    found = []
    for path in sorted(CORPUS.glob("models/*/expected.json")):
        found += [(path.parent.name, name) for name in json.loads(path.read_text())]
    return found


def pytest_generate_tests(metafunc):
    if "corpus_file" in metafunc.fixturenames:
        models = corpus_models()
        marks = [] if models else [pytest.mark.skip(reason="GGSHARD_CORPUS names no corpus")]
        values = [pytest.param(m, id="/".join(m)) for m in models] or [pytest.param(None, marks=marks)]
        metafunc.parametrize("corpus_file", values)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """unpacked(model): the folder with that model's GGUF files."""
    base = tmp_path_factory.mktemp("corpus")

    def unpack(model):
        if not (base / model).exists():
            archive = CORPUS / "models" / model / f"{model}.tar.zst"
            zstd = subprocess.Popen(["zstd", "-q", "-d", "--long=27", "-c", archive], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", base], stdin=zstd.stdout, check=True)
            assert zstd.wait() == 0
        return base / model

    yield unpack
    shutil.rmtree(base)


@pytest.fixture
def corpus_source(corpus_file, unpacked):
    """The corpus file's path, and all the paths by which the same model can be entered. Skips what has no mapping."""
    model, name = corpus_file
    folder = unpacked(model)
    source = folder / name
    if not source.exists():
        source = next(iter(sorted(folder.glob(f"{name.removesuffix('.gguf')}-00001-of-*.gguf"))))
    done = run("plan", "--tp", "1", source)
    if done.returncode == 1 and "no built-in mapping" in done.stderr:
        pytest.skip(done.stderr.strip())
    return source
