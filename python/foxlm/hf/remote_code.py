"""Files beside a checkpoint with which `AutoModel` finds foxlm's classes by itself (`trust_remote_code=True`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .configuration import FlaFoxConfig, FoxConfig, FoxTransformerConfig

_FILE = "modeling_foxlm.py"
_AUTOS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}
_PREFIXES = {FoxConfig.model_type: "Fox", FoxTransformerConfig.model_type: "FoxTransformer",
             FlaFoxConfig.model_type: "FlaFox"}  # fmt: skip
_HEADER = '''"""The model of this folder is computed by the package foxlm, which must be installed."""

import foxlm.hf


class {prefix}Config(foxlm.hf.{prefix}Config):
    def __init__(self, **fields):
        super().__init__(**fields)
'''
_CLASS = '''

class {name}(foxlm.hf.{name}):
    config_class = {prefix}Config
'''


def write_remote_code(folder: str | os.PathLike[str]) -> None:
    """Adds to a saved model what `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` needs to find
    foxlm's classes without `import foxlm.hf`, as in programs of others: the file `modeling_foxlm.py`, and `auto_map` in
    `config.json`. foxlm must be installed there.

    Raises:
        ValueError: the folder holds no checkpoint of FoX.
    """
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text())
        prefix = _PREFIXES[config["model_type"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = ", ".join(_PREFIXES)
        raise ValueError(f"{path} is not the configuration of a FoX model; its model_type must be {known}") from error
    names = {auto: f"{prefix}{name}" for auto, name in _AUTOS.items()}
    code = _HEADER.format(prefix=prefix)
    code += "".join(_CLASS.format(name=name, prefix=prefix) for name in names.values())
    Path(folder, _FILE).write_text(code)
    module = Path(_FILE).stem
    config["auto_map"] = {auto: f"{module}.{name}" for auto, name in ({"AutoConfig": f"{prefix}Config"} | names).items()}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
