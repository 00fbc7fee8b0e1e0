"""diffusers' own pipelines in eager PyTorch, from the same folder."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.hunyuan_video.components import CLASSES, DTYPES, Components, _class
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.prompts import tokenize
from recipes.quiet import quietly


def pipeline(folder: Path, options: Options) -> Any:
    """The pipeline of a task, every component read by its own library."""
    diffusers: Any = importlib.import_module("diffusers")
    components, dtype = Components(folder, options.precision), DTYPES[options.precision]
    with quietly():
        models = {n: _class(name).from_pretrained(folder / n) for n, name in CLASSES.items()}
    others = {
        "tokenizer": components.tokenizer("tokenizer"),
        "tokenizer_2": components.tokenizer("tokenizer_2"),
        "scheduler": components.scheduler(),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=options.guidance),
    }
    models = {name: model.to(dtype).eval() for name, model in models.items()}
    if options.task == "i2v":
        others["feature_extractor"] = components.image_processor()
        made = diffusers.HunyuanVideo15ImageToVideoPipeline(**models, **others)
    else:
        del models["image_encoder"]
        made = diffusers.HunyuanVideo15Pipeline(**models, **others)
    # 108 is what the published tokenizer gives; this one's opening is longer.
    made.prompt_template_encode_start_idx = tokenize(others["tokenizer"], ["a"]).opening
    made.set_progress_bar_config(disable=True)
    return made


def relative(found: Any, expected: torch.Tensor) -> float:
    """The largest difference by the largest value."""
    wanted = expected.detach().float().numpy()
    assert found.shape == wanted.shape
    return float(np.abs(np.asarray(found, np.float32) - wanted).max() / np.abs(wanted).max())
