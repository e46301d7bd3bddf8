"""What the tests share: the program, models with their original checkpoints, and engines in processes of their own."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAMILIES = ROOT / "tests" / "families"
BIN = Path(os.environ.get("GGSHARD_BIN", ROOT / "target" / "release" / "ggshard")).resolve()
CORPUS = Path(os.environ["GGSHARD_CORPUS"]).resolve() if os.environ.get("GGSHARD_CORPUS") else None
MODEL = CORPUS / "serving" / "deepseek_v3" if CORPUS else None
PROFILE = "vllm-0.32-cpu"
TOKENS = 16
PROMPTS = [
    [5, 6, 7, 8, 9],
    [100, 200, 300, 400, 500, 600],
    [1, 1023, 2, 1022],
    [42, 17, 900, 3, 3, 3, 77, 512, 640],
    [(7 * i + 11) % 1024 for i in range(40)],
    [350],
]
LONGEST = 300  # seconds that an engine may take

needs_corpus = pytest.mark.skipif(
    CORPUS is None, reason="GGSHARD_CORPUS names no corpus; tokens are compared with its serving/deepseek_v3 (BF16 GGUF and hf/)"
)


def ggshard(*args):
    return subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def convert(source, folder, *args):
    done = ggshard("convert", source, folder, *args)
    assert done.returncode == 0, done.stderr
    return folder


def python(log, *args, longest=LONGEST):
    """Runs a script of ours that starts processes of its own; what it says goes into a file."""
    begin = time.monotonic()
    with open(log, "w") as said:
        child = subprocess.Popen([sys.executable, *map(str, args)], stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                                 start_new_session=True)
        try:
            child.wait(longest)
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # whatever is left of the group
            except ProcessLookupError:
                pass
            child.wait()
    text = log.read_text()
    assert child.returncode == 0, f"{args}: exit {child.returncode}\n{text[-6000:]}"
    return text, time.monotonic() - begin


def engine(folder, load_format, overrides=None, **extra):
    """An engine that is to be started: what replaces fields of config.json, and settings of the load format by keyword."""
    tokenizer = (Path(folder) / "tokenizer.json").exists()
    return {"model": str(folder), "load_format": load_format, "extra": extra, "tokenizer": tokenizer, "overrides": overrides or {}}


def run(out, tp, engines, prompts=PROMPTS, nvfp4=False):
    """What each of the engines answers or why it refused, in one process after the other; and what they all said."""
    jobs = out.with_suffix(".jobs")
    jobs.write_text(json.dumps({"tp": tp, "prompts": prompts, "tokens": TOKENS, "nvfp4": nvfp4, "engines": engines}))
    text, seconds = python(out.with_suffix(".log"), HERE / "generate.py", jobs, out, longest=LONGEST * len(engines))
    found = json.loads(out.read_text())
    print(f"\n{len(engines)} engines at tp {tp}: {found[0]['versions']}, {seconds:.0f} s")
    for wanted, got in zip(engines, found, strict=True):
        print(f"{Path(wanted['model']).name}, {wanted['load_format']} {wanted['extra'] or ''}: {got.get('seconds', got.get('refused'))}")
        for tokens in got.get("tokens", []):
            print("  ", *tokens)
    return found, text


def generate(out, tp, engines, prompts=PROMPTS, nvfp4=False):
    """Tokens of engines that start. The same question has to get the same answer, or nothing could be compared."""
    found, text = run(out, tp, engines, prompts, nvfp4)
    for answers in found:
        assert "refused" not in answers, f"{answers}\n{text[-6000:]}"
        assert answers["again"] == answers["tokens"]
        assert [len(t) for t in answers["tokens"]] == [TOKENS] * len(prompts)
    for complaint in ("loading tensor of shape", "Attempted to load weight"):  # what sharded_state says of another shape or dtype
        assert complaint not in text
    return found
