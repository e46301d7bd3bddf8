"""transformers makes a model of weights that ggshard decodes on the fly, as docs/serving.md shows it. Here, as it needs PyTorch and the package."""
from engines import MODEL, needs_corpus


@needs_corpus
def test_a_model_of_weights_on_the_fly_is_the_original():
    import ggshard
    import torch
    from transformers import AutoConfig, DeepseekV3ForCausalLM

    original = DeepseekV3ForCausalLM.from_pretrained(MODEL / "hf", dtype=torch.bfloat16, local_files_only=True)
    weights = {name: tensor.torch() for name, tensor in ggshard.iter_weights(MODEL / "deepseek_v3-BF16.gguf", mtp="drop")}
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        None, config=AutoConfig.from_pretrained(MODEL / "hf"), state_dict=weights, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {kind: list(names) for kind, names in info.items() if names} == {}
    expected, found = original.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        assert torch.equal(original(ids).logits, model(ids).logits)
