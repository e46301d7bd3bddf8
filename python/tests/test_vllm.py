"""The loader of vLLM against a small module, where vLLM is installed: what it accepts, and that it names every difference."""
import ggshard
import pytest
from conftest import GLM

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from ggshard.vllm import GgshardLoader, load, match, places  # noqa: E402
from vllm.config.load import LoadConfig  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("raw") / "out"
    ggshard.convert(GLM, out, tp=1, mtp="drop")
    return ggshard.open_rank(out, 0)


@pytest.fixture
def model(checkpoint):
    """A module with exactly the checkpoint's parameters, unset, and a second name for its norm."""
    root = torch.nn.Module()
    for name, tensor in checkpoint.items():
        *path, leaf = name.split(".")
        at = root
        for step in path:
            if step not in at._modules:
                at.add_module(step, torch.nn.Module())
            at = at._modules[step]
        at.register_parameter(leaf, torch.nn.Parameter(torch.full_like(tensor.torch(), float("nan")), requires_grad=False))
    root.a_second_name = root.model.norm
    return root


def test_every_parameter_gets_its_own_values_by_whatever_name(checkpoint, model):
    assert len(match(checkpoint, model)) == len(checkpoint) == len(places(model))
    load(checkpoint, model)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor.torch()) for name, tensor in checkpoint.items())
    assert torch.equal(state["a_second_name.weight"], checkpoint["model.norm.weight"].torch())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_blocks_are_decoded_into_their_parameters(checkpoint, model, dtype, tmp_path):
    name = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
    for folder, form in ("plain", name), ("keep", "keep"):
        ggshard.convert(GLM, tmp_path / folder, tp=1, mtp="drop", dtype=form)
    plain, kept = (ggshard.open_rank(tmp_path / folder, 0) for folder in ("plain", "keep"))
    blocks = {kept.blocks(name).weight for name in kept if kept.blocks(name)}
    assert len(blocks) > 20 and blocks < set(plain)
    for weight in blocks:
        owner, _, leaf = weight.rpartition(".")
        owner = model.get_submodule(owner)
        setattr(owner, leaf, torch.nn.Parameter(getattr(owner, leaf).to(dtype), requires_grad=False))
    assert len(match(kept, model)) == len(kept)
    load(kept, model)
    assert all(torch.equal(model.get_parameter(weight), plain[weight].torch()) for weight in blocks)
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight[1:].char(), requires_grad=False)
    with pytest.raises(ggshard.CheckpointError, match="blocks of .*, the model's is torch.int8") as caught:
        match(kept, model)
    assert "embed_tokens.qweight': shape" in str(caught.value)


def test_all_differences_are_named(checkpoint, model):
    norm = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(norm[:-1].clone(), requires_grad=False)
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.float(), requires_grad=False)
    del model.lm_head.weight
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ggshard.CheckpointError) as caught:
        match(checkpoint, model)
    found = caught.value.found.split("; ")
    assert len(found) == 4 and caught.value.file == str(checkpoint.dir) and caught.value.remedy
    assert any("'model.norm.weight': shape [" in line for line in found)
    assert any("'model.embed_tokens.weight': torch.bfloat16, the model's is torch.float32" in line for line in found)
    assert any("'lm_head.weight': the model has no such parameter" in line for line in found)
    assert any("'extra': not in the folder" in line for line in found)


def test_two_tensors_for_one_parameter_are_refused(checkpoint, model):
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ggshard.CheckpointError, match="is also"):
        match(checkpoint, model)


def test_a_part_of_another_tensor_is_no_place_of_its_own():
    model = torch.nn.Module()
    model.whole = torch.nn.Parameter(torch.zeros(4, 2))
    model.part = torch.nn.Parameter(model.whole.data[1:3])
    assert [place.names for place in places(model)] == [["whole"]]


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="ggguf"):
        GgshardLoader(LoadConfig(load_format="ggshard", model_loader_extra_config={"ggguf": "x"}))
