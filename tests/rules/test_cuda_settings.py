"""Lines of host code that stand for CUDA, as scripts and configurations write them."""

import textwrap

import pytest

from tpuport.rules._apply import find
from tpuport.source.rewrite.finding import Severity

HOST = {
    "the other way round": """
        import torch
        def main():
            device = torch.device("cpu" if not torch.cuda.is_available() else "cuda")  # found
    """,
    "as a result": """
        import torch as th
        def dev():
            if th.cuda.is_available():
                return th.device(f"cuda")  # found
            return th.device("cpu")
        def name():
            if th.cuda.is_available():
                return th.cuda.get_device_name(0)
    """,
    "a number of devices, once a launcher is there": """
        import os
        import torch
        def init(args):
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                args.gpu = 0
            elif "SLURM_PROCID" in os.environ:
                args.gpu = args.rank % torch.cuda.device_count()  # found
    """,
    "a name that says so": """
        import torch
        use_cuda = not args.no_cuda and torch.cuda.is_available()
        def main():
            device = "cuda" if use_cuda else "cpu"  # found
    """,
    "as a statement": """
        import torch
        def main(args):
            device = "cpu"
            if torch.cuda.is_available() and not args.cpu:
                device = f"cuda:{args.local_rank}"  # found
            use_gpu = args.gpu
            other = "cuda" if use_gpu else "cpu"
    """,
    "visible devices": """
        import os
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # found
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # found
        print(os.environ["CUDA_VISIBLE_DEVICES"])
    """,
    "float16": """
        from transformers import TrainingArguments
        def main(parser):
            parser.add_argument("--precision", choices=["no", "fp16"], default="fp16")  # found
            TrainingArguments(fp16=True)  # found
            Trainer(precision="16-mixed")  # found
            Trainer(precision="bf16-mixed", fp16=False)
    """,
    "quantised weights": """
        from transformers import AutoModel
        def main():
            AutoModel.from_pretrained("x", load_in_8bit=True)  # found
            AutoModel.from_pretrained("x", load_in_8bit=False)
    """,
    "kernels": """
        def main(model, pipe):
            model.set_attn_mode("sageattn")  # found
            pipe.enable_xformers_memory_efficient_attention()  # found
            model.set_attn_mode("torch")
    """,
    "Lightning": """
        def main(pl):
            pl.Trainer(accelerator="gpu", devices=8)  # found
            pl.Trainer(accelerator="auto")
    """,
    "started by a launcher": """
        import os
        import torch
        import torch.distributed as dist
        def init():
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                torch.cuda.set_device(0)  # found
                dist.init_process_group("nccl")  # found
            if torch.cuda.is_available():
                dist.init_process_group(backend="nccl")
    """,
    "after an assertion": """
        import torch
        import torch.distributed as dist
        def main(rank):
            assert torch.cuda.is_available(), "needs a GPU"  # found
            dist.init_process_group("nccl")  # found
            device = rank % torch.cuda.device_count()  # found
            torch.cuda.set_device(device)  # found
    """,
    "in a try around everything": """
        import torch
        def worker(gpu, queue):
            try:
                torch.cuda.set_device(gpu)  # found
                data = queue.get()
                made = work(data)
                queue.put(made)
            except Exception as e:
                queue.put(e)
            try:
                torch.cuda.set_device(gpu)
            except Exception:
                gpu = None
    """,
    "to a backend by the system": """
        import os
        def start():
            backend = "gloo" if os.name == "nt" else "nccl"  # found
            other_backend = "nccl" if torch.cuda.is_available() else "gloo"
    """,
    "an option that needs a package": """
        def main(args):
            if args.use_liger:
                from liger_kernel.transformers import apply_liger_kernel_to_llama  # found
            if is_flash_attn_2_available():
                import flash_attn
            try:
                import xformers
            except ImportError:
                xformers = None
    """,
    "a dtype by name": """
        import torch
        class Pipeline:
            def __init__(self, model, memory: int):
                self.vae_dtype = torch.float16  # found
                self.other_dtype = torch.bfloat16
                is_half = model.dtype == torch.float16
                dtype = torch.float16 if is_half else torch.float32
    """,
}


@pytest.mark.parametrize("source", HOST.values(), ids=HOST)
def test_host_code_for_cuda_is_found_and_nothing_beside_it(source: str):
    text = textwrap.dedent(source).lstrip("\n")
    marked = {n for n, line in enumerate(text.splitlines(), 1) if "# found" in line}
    found = find(text, file="train.py")
    shown = {f.line for f in found if f.severity is not Severity.NOTE}
    assert shown == marked, [f.message for f in found]
