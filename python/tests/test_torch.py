"""PyTorch takes tensors without a copy, where it is installed."""
import gc

import ggshard
import pytest
from conftest import DEEPSEEK

torch = pytest.importorskip("torch")


def test_from_dlpack_shares_the_mapped_file(folder):
    checkpoint = ggshard.open_rank(folder, 0)
    assert {tensor.dtype for tensor in checkpoint.values()} >= {"BF16", "F32"}
    for tensor in checkpoint.values():
        if tensor.dtype == "BF16" or tensor.shape:
            taken, made = torch.from_dlpack(tensor), tensor.torch()
            assert taken.dtype == made.dtype and taken.shape == made.shape == torch.Size(tensor.shape)
            assert taken.data_ptr() == made.data_ptr(), "the same memory"
            assert taken.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.tobytes()


def test_from_dlpack_keeps_decoded_weights_alive():
    name, tensor = next(ggshard.iter_weights(DEEPSEEK))
    expected = tensor.tobytes()
    taken = torch.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert taken.reshape(-1).view(torch.uint8).numpy().tobytes() == expected


def test_decoded_blocks_are_tensors_of_their_weight(tmp_path):
    ggshard.convert(DEEPSEEK, tmp_path / "keep", tp=1, dtype="keep")
    checkpoint = ggshard.open_rank(tmp_path / "keep", 0)
    name = next(name for name in checkpoint if checkpoint.blocks(name))
    weight, _, shape = checkpoint.blocks(name)
    [(_, expected)] = ggshard.iter_weights(DEEPSEEK, names=[weight])
    for tensor in checkpoint.decode(name), dict(checkpoint.decoded())[weight]:
        assert tensor.torch().shape == shape and tensor.torch().dtype == torch.bfloat16
        assert torch.equal(tensor.torch(), expected.torch())


def test_weights_on_the_fly_are_a_state_dict():
    class Norm(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros_like(weight))

    state = {name: tensor.torch() for name, tensor in ggshard.iter_weights(DEEPSEEK, names=["model.norm.weight"])}
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": Norm(state["model.norm.weight"])})})
    model.load_state_dict(state)
    assert torch.equal(model["model"]["norm"].weight, state["model.norm.weight"])
