"""What the tests share: small models, a large one, and a folder that several tests look at."""
import struct
from pathlib import Path

import ggshard
import pytest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
GLM = FIXTURES / "models" / "glm_moe_dsa-UD-IQ2_XXS.gguf"
DEEPSEEK = FIXTURES / "models" / "deepseek_v3-split"
TP = 2


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """GLM for vLLM on two ranks, with a draft model."""
    out = tmp_path_factory.mktemp("converted") / "out"
    ggshard.convert(GLM, out, tp=TP, profile="vllm-0.32-cpu")
    return out


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A GGUF of one gigabyte of zeros that takes no room on the disk: work that takes a while."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    side = 1 << 14

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    tensor = text("large.weight") + struct.pack("<IQQIQ", 2, side, side, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("general.architecture") + struct.pack("<I", 8) + text("large") + tensor
    header += bytes(-len(header) % 32)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * side * side)
    return path
