"""vLLM loads what ggshard wrote, or a GGUF directly, with ``--load-format ggshard``.

A plugin of the group ``vllm.general_plugins``: vLLM finds it once both packages are installed. Two ways:

- The model is a folder that ``ggshard convert --profile vllm-…`` wrote. Each rank maps its own files, and its tensors must
  be exactly the parameters of the model that vLLM built: every name, shape and type, nothing missing, nothing left over.
  Kept blocks are decoded into their parameters.
- The model is a folder with ``config.json`` and tokenizer, and ``--model-loader-extra-config '{"gguf": "model.gguf"}'``
  names the weights. They are decoded on the fly and pass through the model's own loader; afterwards no value of any
  parameter may be left unset.

vLLM's own loaders warn and go on where these refuse.
"""
from __future__ import annotations

import json
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, NoReturn, Optional

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .checkpoint import RankCheckpoint, open_rank
from .errors import CheckpointError, GgshardError, LayoutError
from .weights import iter_weights

MANIFEST = "ggshard.json"
OTHER_MODEL = (
    "config.json and GGUF are not of the same model, or this version of vLLM takes other names; convert the GGUF with "
    "`ggshard convert --config` to have it checked"
)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass
class Place:
    """A region of the model's memory, and every name by which the model reaches it."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)


class GgshardLoader(BaseModelLoader):
    """The loader of ``--load-format ggshard``.

    Keys of ``model_loader_extra_config``, all optional: ``gguf`` and ``mapping`` for weights from a GGUF; ``verify`` (check
    every byte of a folder) and ``any_version`` (accept a folder whose profile was made for another version of vLLM).
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self.gguf: Optional[str] = extra.pop("gguf", None)
        self.mapping: Optional[str] = extra.pop("mapping", None)
        self.verify = bool(extra.pop("verify", False))
        self.any_version = bool(extra.pop("any_version", False))
        self.expert_parallel: Optional[bool] = None
        if extra:
            raise ValueError(f"model_loader_extra_config has keys that load format 'ggshard' does not know: {sorted(extra)}")

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded: the files are local."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        self.expert_parallel = vllm_config.parallel_config.enable_expert_parallel
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        if self.gguf is not None:
            self._load_gguf(model, model_config, self.gguf)
        else:
            self._load_folder(model, model_config)

    def _load_folder(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        folder = Path(model_config.model_weights or model_config.model)
        if not (folder / MANIFEST).is_file():
            refuse(
                folder,
                [f"it has no {MANIFEST}"],
                "Give vLLM a folder that ggshard wrote, or name the weights: "
                "--model-loader-extra-config '{\"gguf\": \"model.gguf\"}'",
            )
        self._check_launch(folder)
        draft = model_config.runner_type == "draft"
        pipeline = get_pp_group()
        checkpoint = open_rank(
            folder,
            get_tensor_model_parallel_rank(),
            verify=self.verify,
            set="draft" if draft else "main",
            stage=None if draft or pipeline.world_size == 1 else pipeline.rank_in_group,
        )
        load(checkpoint, model)

    def _check_launch(self, folder: Path) -> None:
        """Compares what the folder was made for with what vLLM was started for."""
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            topology, profile = manifest["topology"], manifest["profile"]["name"]
        except (ValueError, KeyError, TypeError):
            open_rank(folder, 0)  # says what is wrong with the manifest
            raise
        tp, pp = get_tensor_model_parallel_world_size(), get_pp_group().world_size
        version = ".".join(vllm.__version__.split(".")[:2])
        wrong = []
        if topology["tp"] != tp:
            wrong.append(f"it was made for tp {topology['tp']}, and vLLM runs with --tensor-parallel-size {tp}")
        if topology.get("pp", 1) != pp:
            wrong.append(f"it was made for pp {topology.get('pp', 1)}, and vLLM runs with --pipeline-parallel-size {pp}")
        whole_experts = topology.get("expert_parallel", False)
        if self.expert_parallel is not None and whole_experts != self.expert_parallel and tp > 1:
            made, runs = ("with", "without") if whole_experts else ("without", "with")
            wrong.append(f"it was made {made} --ep, and vLLM runs {runs} --enable-expert-parallel")
        if profile == "hf" or profile.startswith("sglang"):
            wrong.append(f"its profile '{profile}' is not vLLM's layout")
        elif profile.startswith("vllm-") and profile.split("-")[1] != version and not self.any_version:
            wrong.append(f"its profile '{profile}' was checked with another version than this vLLM, {vllm.__version__}")
        if wrong:
            profiles = "PROFILE of this vLLM (see `ggshard profiles`)"
            options = f"--tp {tp}" + (f" --pp {pp}" if pp > 1 else "") + (" --ep" if self.expert_parallel else "")
            remedy = f"Start vLLM as the folder was made, or convert again with {options} --profile {profiles}"
            if "version" in wrong[-1]:
                remedy += "; another version is accepted with --model-loader-extra-config '{\"any_version\": true}'"
            refuse(folder, wrong, remedy)

    def _load_gguf(self, model: torch.nn.Module, model_config: ModelConfig, gguf: str) -> None:
        if model_config.quantization is not None:
            raise LayoutError(
                f"{gguf}: vLLM is to quantize the model ({model_config.quantization}), which load format 'ggshard' does not do "
                "for weights from a GGUF. Start vLLM without --quantization",
                file=gguf,
            )
        floating = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
        for _, parameter in floating:
            parameter.data.fill_(float("nan"))
        mtp = "only" if model_config.runner_type == "draft" else "drop"
        weights = iter_weights(gguf, dtype=_DTYPES[model_config.dtype], mapping=self.mapping, mtp=mtp)
        given = None

        def handed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal given
            for given, tensor in weights:
                yield given, tensor.torch()

        try:
            reported = model.load_weights(handed())
        except GgshardError:
            raise
        except Exception as error:
            # Models refuse by bare assertions and missing keys, which do not say of what.
            found = f"vLLM did not take the weight '{given}': {type(error).__name__} {error}".rstrip()
            raise CheckpointError(f"{gguf}: {found}. {OTHER_MODEL}", gguf, given, found=found, remedy=OTHER_MODEL) from error
        finally:
            weights.close()
        unset = [name for name, p in floating if bool(p.data.isnan().any())]
        if reported is not None:
            known = {name for name, _ in floating}
            unset += [name for name, _ in model.named_parameters() if name not in known and name not in reported]
        if unset:
            refuse(Path(gguf), [f"parameter '{name}' was not loaded, or not all of it" for name in unset], OTHER_MODEL)


def places(model: torch.nn.Module) -> list[Place]:
    """The model's state, each region of memory once.

    Several names may lead to one tensor, and which of them vLLM calls the first depends on the module's structure: all are
    kept. A tensor that is a part of another is left out, as the other holds it.
    """
    regions: dict[tuple[Any, ...], Place] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel() == 0:
            continue
        region = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        regions.setdefault(region, Place(tensor)).names.append(name)
    by_storage: dict[tuple[Any, ...], list[Place]] = defaultdict(list)
    for place in regions.values():
        by_storage[place.tensor.device, place.tensor.untyped_storage().data_ptr()].append(place)
    return [place for group in by_storage.values() for place in group if not any(_inside(place, other) for other in group)]


def _inside(place: Place, other: Place) -> bool:
    """Whether another tensor, without gaps, covers this one and more."""

    def extent(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (a, b), (c, d) = extent(place.tensor), extent(other.tensor)
    return other.tensor.is_contiguous() and c <= a and b <= d and d - c > b - a


def match(checkpoint: RankCheckpoint, model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """For each tensor of the checkpoint, the model's tensor that takes it. Refuses unless the two sets are the same.

    Kept blocks are the weight that they decode to, in whatever float type the model has it.
    """
    state = places(model)
    by_name = {name: place for place in state for name in place.names}
    taken: dict[int, str] = {}
    pairs: list[tuple[str, torch.Tensor]] = []
    wrong: list[str] = []
    for name in checkpoint:
        blocks = checkpoint.blocks(name)
        place = by_name.get(blocks.weight if blocks else name)
        if place is None:
            wrong.append(f"'{name}': the model has no such parameter")
            continue
        if id(place) in taken:
            wrong.append(f"'{name}': the model's parameter is also '{taken[id(place)]}'")
            continue
        taken[id(place)] = name
        held = checkpoint[name].torch()
        shape = blocks.shape if blocks else tuple(held.shape)
        if shape != tuple(place.tensor.shape):
            wrong.append(f"'{name}': shape {list(shape)}, the model's is {list(place.tensor.shape)}")
        if blocks and place.tensor.dtype not in _DTYPES:
            wrong.append(f"'{name}': blocks of {blocks.type}, the model's is {place.tensor.dtype}")
        if not blocks and held.dtype != place.tensor.dtype:
            wrong.append(f"'{name}': {held.dtype}, the model's is {place.tensor.dtype}")
        pairs.append((name, place.tensor))
    wrong += [f"'{min(place.names)}': not in the folder" for place in state if id(place) not in taken]
    if wrong:
        refuse(
            checkpoint.dir,
            wrong,
            f"It was made for {checkpoint.model_class} in {checkpoint.dtype} by profile '{checkpoint.profile}'. Convert again with "
            "the profile, dtype and config.json of the model that vLLM is to serve",
        )
    return pairs


def load(checkpoint: RankCheckpoint, model: torch.nn.Module) -> None:
    """Fills the model's tensors with the checkpoint's. Kept blocks are decoded, one tensor at a time."""
    pairs = match(checkpoint, model)
    # Reading ahead of the copies, in parallel.
    ahead = threading.Thread(target=checkpoint.prefetch, daemon=True)
    ahead.start()
    for name, place in pairs:
        kept = checkpoint.blocks(name) is not None
        tensor = checkpoint.decode(name, _DTYPES[place.dtype]) if kept else checkpoint[name]
        place.copy_(tensor.torch())
    ahead.join()


def refuse(file: Path, wrong: list[str], remedy: str) -> NoReturn:
    """Raises an error that names every difference."""
    found = "; ".join(wrong)
    raise CheckpointError(f"{file}: {found}. {remedy}", file=str(file), found=found, remedy=remedy)


def register() -> None:
    """The entry point: makes ``--load-format ggshard`` known."""
    register_model_loader("ggshard")(GgshardLoader)
