import subprocess

import pytest

from engines import CORPUS, MODEL, PROMPTS, TOKENS, engine, generate


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """original(tp): what the original checkpoint answers. Asked once per size."""
    work, answers = tmp_path_factory.mktemp("original"), {}

    def ask(tp):
        if tp not in answers:
            [answers[tp]] = generate(work / f"tp{tp}.json", tp, [engine(MODEL / "hf", "auto")])
            tokens = answers[tp]["tokens"]
            assert len({tuple(t) for t in tokens}) == len(PROMPTS) and len({t for answer in tokens for t in answer}) > 3 * TOKENS
        return answers[tp]

    return ask


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A folder with llama-BF16.gguf, hf/, the checkpoint it was made of, and llama-Q4_K_M.gguf."""
    work = tmp_path_factory.mktemp("llama")
    zstd = subprocess.Popen(["zstd", "-q", "-d", "--long=27", "-c", CORPUS / "models/llama/llama.tar.zst"], stdout=subprocess.PIPE)
    wanted = ["llama/hf", "llama/llama-BF16.gguf", "llama/llama-Q4_K_M.gguf"]
    subprocess.run(["tar", "-x", "-C", work, *wanted], stdin=zstd.stdout, check=True)
    assert zstd.wait() == 0
    return work / "llama"
