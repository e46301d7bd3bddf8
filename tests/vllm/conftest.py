import pytest

from engines import MODEL, PROMPTS, TOKENS, engine, generate


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
