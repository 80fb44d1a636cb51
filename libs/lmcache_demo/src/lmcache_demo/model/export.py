"""Writes a trained model in the layout that ``LlamaForCausalLM.from_pretrained`` reads."""

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def export_model(model: "LlamaForCausalLM", tokenizer_path: Path, folder: Path) -> Path:
    """Exports weights as bfloat16 safetensors, with the configuration and the tokenizer beside
    them.

    Args:
        model: The trained model, float32; left as it is.
        tokenizer_path: The run's ``tokenizer.json``; ``tokenizer_config.json`` is expected beside
            it.
        folder: Where to write; created if missing.

    Returns:
        The folder.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).eval().to(torch.bfloat16)
    half.generation_config.do_sample = False
    half.save_pretrained(str(folder))
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_path.with_name(name), folder / name)
    return folder
